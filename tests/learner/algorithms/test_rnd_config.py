"""Random network distillation: the table `intrinsic`, and cores that it is not for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.bc.config import BcConfig
from juggler.learner.algorithms.bc.core import Bc
from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.intrinsic.rnd import Rnd
from juggler.learner.algorithms.r2d2.config import R2d2Config
from juggler.learner.algorithms.r2d2.core import R2d2
from juggler.learner.core.population import Population
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
ACTING = partial(ActorCritic, VECTOR, TWO, {})


def test_bc_refuses_it_with_a_sentence() -> None:
    bc = Bc(ACTING, BcConfig())
    with pytest.raises(ValueError, match="bc, which learns nothing from rewards"):
        Rnd(bc)
    with pytest.raises(ConfigError, match="so that nothing that it does is ever rewarded"):
        RunConfig.from_flat(
            {"algorithm": "bc", "dataset": "somewhere", "intrinsic": {"kind": "rnd"}}
        )


def test_summed_rewards_of_several_kept_steps_are_refused() -> None:
    make = partial(QNetwork, VECTOR, TWO, {})
    with pytest.raises(ValueError, match=r"intrinsic with n_step = 3: .*; set n_step = 1"):
        Rnd(Dqn(make, DqnConfig()))
    Rnd(Dqn(make, DqnConfig(n_step=1)))


def test_kept_steps_that_all_look_like_ends_are_refused() -> None:
    make = partial(QNetwork, VECTOR, TWO, {})
    with pytest.raises(ValueError, match=r"intrinsic with gamma = 0: .*; set gamma above 0"):
        Rnd(Dqn(make, DqnConfig(n_step=1, gamma=0.0)))
    Rnd(Impala(ACTING, ImpalaConfig(gamma=0.0)))  # it knows ends by themselves


def test_whole_rows_that_are_kept_may_have_summed_rewards() -> None:
    model = {"recurrent": "gru", "recurrent_size": 8}
    make = partial(QNetwork, VECTOR, TWO, model)
    assert Rnd(R2d2(make, R2d2Config())).config.n_step > 1


def test_what_cannot_be_explored_with_says_so() -> None:
    with pytest.raises(ValueError, match="is for a GradientCore, and population of impala"):
        Rnd(Population(Impala(ACTING, ImpalaConfig()), size=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Put juggler\.Rnd\(core"):
        Impala(ACTING, ImpalaConfig(intrinsic={"kind": "rnd"}))


def test_a_population_of_curious_learners_is_refused_without_a_way_that_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"the algorithm alone.*; Rnd and Discriminator cannot"):
        Population(Rnd(Impala(ACTING, ImpalaConfig())), size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"kind": "rdn"}, r"intrinsic\.kind: 'rdn'"),
        ({"coefficent": 1.0}, r"no key 'coefficent': did you mean 'coefficient'"),
        ({"coefficient": 0.0}, r"intrinsic\.coefficient = 0\.0: must be above 0"),
        ({"gamma_int": 1.0}, r"intrinsic\.gamma_int = 1\.0: must be at least 0, below 1"),
        ({"predictor_share": 0.0}, r"predictor_share = 0\.0: must be above 0, at most 1"),
        ({"model": {"hiden_sizes": [8]}}, r"intrinsic\.model has no key 'hiden_sizes'"),
    ],
)
def test_a_wrong_table_names_the_key(table: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RunConfig.from_flat({"intrinsic": table})


def test_modules_may_differ_in_it() -> None:
    config = RunConfig.from_flat(
        {
            "agents": {"a": "one", "b": "two"},
            "modules": {"one": {"intrinsic": {"kind": "rnd", "coefficient": 2.0}}},
        }
    )
    assert config.of("one").learner.intrinsic["coefficient"] == 2.0
    assert config.of("two").learner.intrinsic == {}
