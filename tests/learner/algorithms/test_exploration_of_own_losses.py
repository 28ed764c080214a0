"""How much a policy explores follows its schedule, whatever the loss is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.squared_values import MODULE, SAMPLE, SquaredValues
from torch import Tensor

import juggler
from juggler.learner.core.forward import Forward, Loss
from juggler.learner.core.gradient_core import GradientCore
from juggler.testing import sample_for

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
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


def made(case: str) -> tuple[GradientCore, juggler.Sample, str]:
    """A core of a user's own, a sample for it, and the buffer that says how much it explores."""
    core, config, module, acts, (key, buffer), model = CASES[case]
    make = partial(module, VECTOR, acts, model or {"hidden_sizes": [4]})
    return (
        core(make, config(**{key: SCHEDULE})),
        sample_for(make()),
        buffer,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_core_that_is_derived_from_a_shipped_one_explores_by_the_schedule_with_any_loss(
    case: str,
) -> None:
    core, sample, buffer = made(case)
    state, steps = core.init(0), 0
    for _ in range(3):
        expected = 1 - steps / 1000
        state, metrics, _ = core.apply(state, *core.grads(state, sample))
        assert float(core.get_params(state)[buffer]) == pytest.approx(expected)
        assert float(metrics[buffer]) == pytest.approx(expected)
        assert "size" in metrics
        steps = int(state["steps"])
    assert steps > 0


@pytest.mark.parametrize("case", ["dqn", "td3"])
def test_so_do_the_members_of_a_population(case: str) -> None:
    core, sample, buffer = made(case)
    population = juggler.Population(core, size=2)
    state = population.init(0)
    for _ in range(2):
        state = population.step(state, sample).state
    values = population.get_params(state)[buffer]  # [2]
    assert len(values) == 2
    assert ((values > 0) & (values < 1)).all()


def test_a_loss_may_set_the_buffer_by_itself() -> None:
    class Quiet(OwnDqn):
        def loss(self, forward: Forward, columns: Any, state: Any) -> Loss:
            forward.set_buffer("epsilon", torch.tensor(0.25))
            return super().loss(forward, columns, state)

    _, sample, _ = made("dqn")
    make = partial(juggler.QNetwork, VECTOR, spaces.Discrete(2), {"hidden_sizes": [4]})
    core = Quiet(make, juggler.DqnConfig())
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
        ValueError,
        match=rf"buffer 'epsilon' of QNetwork {told}.*a tensor of shape \(\)$",
    ):
        core.grads(core.init(0), sample)
