"""Algorithms of one's own: their names, keys, and how much they explore."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO
from support.place import status_of
from support.small_cores import MODULE, SAMPLE, SquaredValues
from torch import Tensor

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import (
    ALGORITHMS,
    build_learner,
    find_algorithm,
    register_algorithm,
)
from juggler.learner.config import LearnerConfig
from juggler.learner.core.forward import Forward, Loss
from juggler.learner.core.gradient_core import GradientCore
from juggler.testing import sample_for

VECTOR = spaces.Box(-1, 1, (3,), np.float32)


@dataclass(kw_only=True)
class MyConfig(LearnerConfig):
    lr: float = 0.25
    sharpness: float = 2.0
    """How sharp."""

    def validate(self) -> None:
        super().validate()
        self.check_above("sharpness", 0)


class MyCore(GradientCore):
    name = "mine"

    def loss(self, *_: Any) -> Any:
        raise NotImplementedError


class Mine(Algorithm):
    config = MyConfig
    core = MyCore


def test_the_help_lists_every_algorithm_that_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("train", "--help") == 0
    words = re.sub(r"[^\w,:]+", " ", capsys.readouterr().out)  # without the frame of a box
    assert f"Algorithm: {', '.join(sorted(ALGORITHMS))}, or your own" in words


def test_a_class_that_was_given_is_found_by_its_name_with_its_keys_and_defaults() -> None:
    name = register_algorithm(Mine)
    assert find_algorithm(name) is Mine
    config = RunConfig.from_flat({"algorithm": name, "sharpness": 3.0})
    assert isinstance(config.learner, MyConfig)
    assert (config.learner.algorithm, config.learner.lr, config.learner.sharpness) == (
        name,
        0.25,
        3.0,
    )
    learner = build_learner(config.learner, None, VECTOR, TWO, {})
    assert isinstance(learner.core, MyCore)
    for keys, said in (
        ({"sharpnes": 1.0}, "unknown key 'sharpnes': did you mean 'sharpness'"),
        ({"sharpness": 0}, "sharpness = 0.0: must be above 0"),
        ({"sharpness": "very"}, 'sharpness: expected a number, not "very"'),
        ({"burn_in": 2}, "'burn_in' is a key of appo, impala, "),
    ):
        with pytest.raises(ConfigError, match=said):
            RunConfig.from_flat({"algorithm": name, **keys})


class NoAlgorithm:
    config = MyConfig
    core = MyCore


class Undecorated(LearnerConfig):
    pass


@dataclass(kw_only=True)
class Incomplete(LearnerConfig):
    depth: int


@dataclass(kw_only=True)
class Colliding(LearnerConfig):
    seed: int = 3


@dataclass(kw_only=True)
class Untyped(MyConfig):
    lr = 0.5  # the default of the base, 0.25, would stay
    SCALE = 2.0
    unit: ClassVar[float] = 1.0


@dataclass(kw_only=True)
class Callback(LearnerConfig):
    shape: Callable[[], int] = field(default=lambda: 3)


@dataclass(kw_only=True)
class Misfit(LearnerConfig):
    widths: list[int] = field(default_factory=lambda: ["w"])


@dataclass(kw_only=True)
class Possible(LearnerConfig):
    SCALE = 2.0
    unit: ClassVar[float] = 1.0
    names: dict[str, list[str]] = field(default_factory=dict)
    pair: tuple[int, float] | None = None
    words: tuple[str, ...] = ()
    kind: Literal["soft", "hard"] = "soft"
    rate: juggler.Scheduled = 1
    rest: dict[str, Any] = field(default_factory=lambda: {"any": 1})

    @property
    def doubled(self) -> float:
        return 2 * self.gamma


#: Of a file without `from __future__ import annotations`, whose types are no texts.
Evaluated = dataclass(kw_only=True)(
    type("Evaluated", (LearnerConfig,), {"__annotations__": {"share": float}, "share": "all"})
)


class Nameless(GradientCore):
    loss = Impala.loss


class Lossless(GradientCore):
    name = "lossless"


def algorithm(name: str, **attributes: Any) -> type[Algorithm]:
    return type(name, (Algorithm,), {"config": MyConfig, "core": MyCore, **attributes})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NoAlgorithm, "must be a class derived from"),
        (Mine(), "must be a class derived from"),
        (algorithm("Bare", config=Undecorated), r"with @dataclass\(kw_only=True\) above it"),
        (algorithm("Other", config=dict), "must be a class derived from"),
        (algorithm("Lacking", config=Incomplete), "the key 'depth' of its config has"),
        (algorithm("Coreless", core=None), "`core` must be a LearnerCore"),
        (algorithm("Guessing", config=Untyped), "has lr = 0.5 without a"),
        (algorithm("Calling", config=Callback), "a key 'shape' of type"),
        (algorithm("Wrong", config=Misfit), r"type list\[int\] with the default"),
        (algorithm("Plain", config=Evaluated), "'share' of type float with the"),
        (algorithm("Unnamed", core=Nameless), 'Nameless needs a name.*write name = "..."'),
        (algorithm("Aimless", core=Lossless), "Lossless needs a method 'loss'"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_what_it_lacks(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        register_algorithm(given)


def test_keys_of_all_types_that_a_file_can_hold_are_taken() -> None:
    name = register_algorithm(algorithm("Permitted", config=Possible))
    config = RunConfig.from_flat({"algorithm": name, "pair": [1, 2.0], "kind": "hard"})
    assert isinstance(config.learner, Possible)
    assert (config.learner.pair, config.learner.kind) == ((1, 2.0), "hard")


def test_an_action_space_that_an_algorithm_cannot_act_in_is_told_with_those_that_can() -> None:
    mine = algorithm("Picky", action_spaces=(spaces.Discrete, spaces.MultiDiscrete))
    picky = register_algorithm(mine)
    for name, needed in ((picky, "Discrete or MultiDiscrete"), ("pqn", "Discrete")):
        config = find_algorithm(name).config(algorithm=name)
        with pytest.raises(
            ValueError,
            match=f"algorithm '{name}' needs a {needed} action space, and this environment has "
            r"Box\(.*such as appo, impala, ",
        ):
            build_learner(config, None, VECTOR, VECTOR, {})
    build_learner(mine.config(algorithm=picky), None, VECTOR, TWO, {})


def test_a_key_that_every_run_has_is_refused() -> None:
    name = register_algorithm(algorithm("Twice", config=Colliding))
    with pytest.raises(ConfigError, match="has a key 'seed', which every run"):
        RunConfig.from_flat({"algorithm": name})


def test_a_class_of_a_script_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="this run's algorithm is Lost, of a script"):
        find_algorithm("__main__:Lost")


def test_a_core_needs_a_name() -> None:
    with pytest.raises(ValueError, match="Nameless needs a name, which its"):
        Nameless(MODULE, LearnerConfig())


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"algorithm": "impala", "lrr": 1}, "'lrr' is no key of 'impala': did"),
        ({"algorithm": "sac", "num_env_runners": 2}, "'num_env_runners' is no key of"),
        ("sac", "config = 'sac': give a table"),
    ],
)
def test_a_wrong_config_of_a_learner_is_told_as_that_of_a_run_is(config: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        build_learner(config, None, VECTOR, TWO, {})


# How much a policy explores follows its schedule, for every loss.


EXPLORED_VECTOR = spaces.Box(-10, 10, (4,), np.float32)
SCHEDULE = [(0.0, 1.0), (1000.0, 0.0)]


class SmallParameters(GradientCore):
    """Has a loss of its own, which knows of no exploration."""

    def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
        mean = juggler.LiveMean(columns["live"])
        size = sum((x.square().sum() for x in forward.named.values()), torch.zeros(()))  # []
        return Loss(size, mean.live_steps, {"size": size.detach()}, means={})


class OwnDqn(SmallParameters, juggler.Dqn): ...


class OwnPqn(SmallParameters, juggler.Pqn): ...


class OwnR2d2(SmallParameters, juggler.R2d2): ...


class OwnTd3(SmallParameters, juggler.Td3): ...


MEMORY = {"hidden_sizes": [4], "recurrent": "gru", "recurrent_size": 4}
#: The core and its config, its module, what it acts in, the key of the schedule, and the buffer.
EPSILON = ("exploration_epsilon", "epsilon")
NOISE = ("exploration_noise", "exploration_noise")
CASES: dict[str, tuple[Any, Any, Any, gymnasium.Space[Any], tuple[str, str], dict[str, Any]]] = {
    "dqn": (OwnDqn, juggler.DqnConfig, juggler.QNetwork, spaces.Discrete(2), EPSILON, {}),
    "pqn": (OwnPqn, juggler.PqnConfig, juggler.QNetwork, spaces.Discrete(2), EPSILON, {}),
    "r2d2": (OwnR2d2, juggler.R2d2Config, juggler.QNetwork, spaces.Discrete(2), EPSILON, MEMORY),
    "td3": (
        OwnTd3,
        juggler.Td3Config,
        juggler.DeterministicActorCritic,
        spaces.Box(-1, 1, (2,), np.float32),
        NOISE,
        {},
    ),
}


def made(case: str, own: Any = None) -> tuple[GradientCore, juggler.Sample, str]:
    """A user's core, its sample, and its buffer of exploration."""
    core, config, module, acts, (key, buffer), model = CASES[case]
    make = partial(module, EXPLORED_VECTOR, acts, model or {"hidden_sizes": [4]})
    return ((own or core)(make, config(**{key: SCHEDULE})), sample_for(make()), buffer)


@pytest.mark.parametrize("case", CASES)
def test_a_core_that_is_derived_from_a_shipped_one_explores_by_the_schedule_with_any_loss(
    case: str,
) -> None:
    core, sample, buffer = made(case)
    state, steps = core.init(0), 0
    begun = float(core.get_params(state)[buffer])
    assert begun == (math.inf if case == "td3" else 1.0), "nothing is known yet"
    for _ in range(3):
        expected = 1 - steps / 1000
        state, metrics, _ = core.apply(state, *core.grads(state, sample))
        assert float(core.get_params(state)[buffer]) == pytest.approx(expected)
        assert float(metrics[buffer]) == pytest.approx(expected)
        assert "size" in metrics
        steps = int(state["steps"])
    assert steps > 0


def test_a_loss_may_set_the_buffer_by_itself() -> None:
    class Quiet(OwnDqn):
        def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
            forward.set_buffer("epsilon", torch.tensor(0.25))
            return super().loss(forward, columns, state)

    core, sample, _ = made("dqn", Quiet)
    state = core.step(core.init(0), sample).state
    assert float(core.get_params(state)["epsilon"]) == 0.25


class Exploring(SquaredValues):
    """Its module has no buffer to explore by."""

    says: Callable[[], dict[str, Tensor]]

    def exploration(self, state: Any) -> dict[str, Tensor]:
        return self.says()


def test_a_buffer_that_the_module_lacks_is_named() -> None:
    core = Exploring(MODULE, juggler.LearnerConfig())
    core.says = lambda: {"epsilon": torch.tensor(0.5)}
    with pytest.raises(ValueError, match="ActorCritic has no buffer 'epsilon'"):
        core.grads(core.init(0), SAMPLE)


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.5, "was given 0.5"), (torch.zeros(1), r"was given a tensor of shape \(1,\)")],
)
def test_what_is_no_tensor_of_the_shape_of_the_buffer_is_named(value: Any, told: str) -> None:
    core, sample, _ = made("dqn")
    core.exploration = lambda state: {"epsilon": value}  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=rf"buffer 'epsilon' of QNetwork {told}.*a tensor of shape \(\)$"
    ):
        core.grads(core.init(0), sample)
