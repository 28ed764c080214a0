"""Hyper-parameters that are out of range."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.config import IntrinsicConfig


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": 0.0}, "lr = 0.0: must be above 0"),
        ({"lr": float("nan")}, "lr = nan: must be above 0 and finite"),
        ({"lr": float("inf")}, "lr = inf: must be above 0 and finite"),
        ({"gamma": 1.1}, "gamma = 1.1: must be at least 0"),
        ({"rmsprop_decay": 1.0}, "rmsprop_decay = 1.0: must be at"),
        ({"adam_betas": (0.9, 1.0)}, r"adam_betas = \(0.9, 1.0\): must"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd' is not known"),
        ({"optimizer_epsilon": 0.0}, "optimizer_epsilon = 0.0: must be above 0"),
        ({"reward_scale": 0.0}, "reward_scale = 0.0: must be above 0"),
        ({"grad_clip": 0.0}, "grad_clip = 0.0: must be above 0"),
        ({"batch_size": 0}, "batch_size = 0: must be above 0"),
        ({"max_staleness": 0}, "max_staleness = 0: must be at least 1"),
        ({"weights_interval": 0}, "weights_interval = 0: must be at least 1"),
        ({"weights_interval": 7}, "weights_interval = 7 with"),
        ({"weights_dtype": "float16"}, "weights_dtype = 'float16' is not"),
        ({"burn_in": -1}, "burn_in = -1: must be at least 0"),
        ({"value_coefficient": -1.0}, "value_coefficient = -1.0: must be"),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient = -1.0: must"),
        ({"lr": []}, r"lr = \[\]: expected \[step"),
        ({"lr": [(5, 0.1), (5, 0.2)]}, r"lr = .*: expected \[step, value\]"),
        ({"lr": [(1e-3, 1e-4)]}, "lr = .*: the step 0.001 .* must"),
        (
            {"entropy_coefficient": [(0, 0.1), (0.5, 0)]},
            r"entropy_.*: the step 0.5 .* whole number",
        ),
        ({"lr": [(-1, 0.1)]}, r"lr = .*: expected \[step, value\]"),
        ({"lr": [(0, -0.1)]}, "lr = .*: values must be at least"),
        ({"entropy_coefficient": [(0, float("nan"))]}, "entropy_coefficient = .*: values must be"),
        ({"lambda_": 2.0}, "lambda_ = 2.0: must be at least 0"),
        ({"rho_bar_pg": 0.0}, "rho_bar_pg = 0.0: must be above 0"),
        ({"rho_bar": 0.5}, "rho_bar = 0.5: must be at least"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ImpalaConfig(**wrong).validate()


def test_what_is_in_range_passes() -> None:
    ImpalaConfig().validate()
    ImpalaConfig(grad_clip=None, optimizer="rmsprop", rho_bar=2.0, gamma=1.0).validate()
    ImpalaConfig(lr=[(0, 0.0), (10, 1e-3), (1e6, 0.0)], entropy_coefficient=0.0).validate()


# Tables of a configuration with a dataclass of their own: what is wrong in one is told.


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"coeficient": 1.0}, "intrinsic has no key"),
        ({"kind": "rdn"}, "intrinsic.kind: 'rdn' is not"),
        ({"coefficient": "much"}, "intrinsic.coefficient: expected a"),
    ],
)
def test_what_is_wrong_in_a_table_is_told(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        IntrinsicConfig.parse(table)
