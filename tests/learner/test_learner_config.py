"""Hyper-parameters that are out of range, but for those in `docs/errors.txt`."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.registry import ALGORITHMS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": float("nan")}, "lr = nan: must be above 0 and finite"),
        ({"lr": float("inf")}, "lr = inf: must be above 0 and finite"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd' is not known"),
        ({"optimizer_epsilon": 0.0}, "optimizer_epsilon = 0.0: must be above 0"),
        ({"reward_scale": 0.0}, "reward_scale = 0.0: must be above 0"),
        ({"weights_interval": 7}, "weights_interval = 7 with"),
        ({"weights_dtype": "float16"}, "weights_dtype = 'float16' is not"),
        ({"value_coefficient": -1.0}, "value_coefficient = -1.0: must be"),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient = -1.0: must"),
        ({"lr": [(1e-3, 1e-4)]}, "lr = .*: the step 0.001 .* must"),
        (
            {"entropy_coefficient": [(0, 0.1), (0.5, 0)]},
            r"entropy_.*: the step 0.5 .* whole number",
        ),
        ({"lr": [(-1, 0.1)]}, r"lr = .*: expected a number, or \[step, value\]"),
        ({"lr": [(0, -0.1)]}, "lr = .*: values must be at least"),
        (
            {"entropy_coefficient": [(0, float("nan"))]},
            "entropy_coefficient = .*: expected a number",
        ),
        ({"rho_bar_pg": 0.0}, "rho_bar_pg = 0.0: must be above 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ImpalaConfig(**wrong).validate()


@pytest.mark.parametrize(
    ("algorithm", "wrong", "said"),
    [
        ("appo", {"target_period": 0}, "target_period = 0: must be"),
        ("appo", {"buffer_batches": 0}, "buffer_batches = 0: must be"),
        ("appo", {"batch_uses": 0}, "batch_uses = 0: must be"),
        ("appo", {"clip": 0.0}, "clip = 0.0: must be"),
        ("appo", {"behaviour_clip": -1.0}, "behaviour_clip = -1.0: must be"),
        ("appo", {"kl_coefficient": 0.0}, "kl_coefficient = 0.0: must be"),
        ("appo", {"target_kl": -0.1}, "target_kl = -0.1: must be"),
        ("appo", {"target_kl": 0.1, "target_period": 1}, "target_kl = 0.1 with"),
        ("dqn", {"target_share": 1.5}, "target_share = 1.5: must be"),
        ("dqn", {"target_share": 0.0}, "target_share = 0.0: the target"),
        ("dqn", {"exploration_epsilon": [(0, 1.0), (10, 2.0)]}, "exploration_epsilon"),
        ("impala", {"replay_share": -0.1}, "replay_share = -0.1: must be"),
        ("impala", {"replay_capacity": 0}, "replay_capacity = 0: must be"),
        ("appo", {"replay_memory": 0}, "replay_memory = 0: must be"),
        ("ppo", {"minibatches": 4096}, "minibatches = 4096: must be"),
        ("ppo", {"clip": 0.0}, "clip = 0.0: must be"),
        ("ppo", {"value_clip": -1.0}, "value_clip = -1.0: must be"),
        ("ppo", {"target_kl": 0.0}, "target_kl = 0.0: must be"),
        ("sac", {"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        ("sac", {"temperature": 0.1, "target_entropy": -1.0}, ".* given is not learned"),
        ("td3", {"policy_period": 0}, "policy_period = 0: must be at least 1"),
        ("td3", {"exploration_noise": -0.1}, "exploration_noise = -0.1: must be"),
        ("td3", {"target_noise": -1.0}, "target_noise = -1.0: must be at least 0"),
        ("td3", {"target_noise_clip": -1.0}, "target_noise_clip = -1.0: must be"),
    ],
)
def test_a_value_out_of_range_of_an_algorithm_is_named(
    algorithm: str, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ALGORITHMS[algorithm].config(**wrong).validate()


@pytest.mark.parametrize("algorithm", ["impala", "appo"])
def test_old_rows_need_room_for_a_whole_one(algorithm: str) -> None:
    config: Any = ALGORITHMS[algorithm].config
    with pytest.raises(ValueError, match="must be at least fragment_steps = 64"):
        config(replay_share=0.5, replay_capacity=63).validate_rows(64)


def test_what_is_in_range_passes() -> None:
    ImpalaConfig().validate()
    ImpalaConfig(grad_clip=None, optimizer="rmsprop", rho_bar=2.0, gamma=1.0).validate()
    ImpalaConfig(lr=[(0, 0.0), (10, 1e-3), (1e6, 0.0)], entropy_coefficient=0.0).validate()
