"""IMPALA with modules that remember, against playing every episode again step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.slow_impala import in_training, slow_gradients, slow_steps
from support.states import copied
from torch import Tensor

from juggler.learner.algorithms.actor_critic.core import PolicyAndValues, actor_critic_pass
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import Forward
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.structures import tree_map

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


class Accumulator(RLModule):
    """Its state is the sum of all that the episode showed, and how much that was.

    What the sum starts from is learned.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.start = torch.nn.Parameter(torch.full((4,), 0.5))
        self.head = torch.nn.Linear(4, 3)

    def get_initial_state(self) -> dict[str, Any]:
        return {"seen": {"sum": self.start, "count": torch.zeros((), dtype=torch.int64)}}

    def _forward(self, batch: Batch) -> dict[str, Any]:
        seen, observations = batch["states"]["seen"], batch["observations"]  # [B, T, 4]
        sums = seen["sum"].unsqueeze(1) + observations.cumsum(1)  # [B, T, 4]
        counts = seen["count"].unsqueeze(1) + torch.arange(1, observations.shape[1] + 1)  # [B, T]
        outputs = self.head(sums / counts.unsqueeze(-1))  # [B, T, 3]
        return {
            "action_dist_inputs": outputs[..., :2],
            "values": outputs[..., 2],
            "states": {"seen": {"sum": sums[:, -1], "count": counts[:, -1]}},
        }


MODULES: dict[str, Any] = {
    kind: partial(
        build_module,
        None,
        VECTOR,
        TWO,
        {"hidden_sizes": [8], "recurrent": kind, "recurrent_size": 6},
    )
    for kind in ("lstm", "gru")
}
MODULES["accumulator"] = partial(Accumulator, VECTOR, TWO, {})
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def batch_for(
    make_batch: MakeBatch, module: RLModule, *sizes: int, **settings: Any
) -> EpisodeBatch:
    """With a state of the module before each row: the initial one where an episode begins."""
    batch = make_batch(*sizes, **settings)
    rng = np.random.default_rng(settings.get("seed", 0))
    goes_on = np.zeros(batch.rows, bool)
    goes_on[batch.segment_rows[(batch.segment_starts == 0) & (batch.segment_offsets > 0)]] = True

    def states(initial: Tensor) -> np.ndarray:
        later = rng.integers(1, 9, (batch.rows, *initial.shape)) / 4
        first = np.broadcast_to(initial.detach(), later.shape)
        goes_on_here = goes_on.reshape(-1, *[1] * initial.ndim)
        return np.where(goes_on_here, later, first).astype(initial.detach().numpy().dtype)

    columns = {
        **batch.to_tree(),
        "states": {"module": tree_map(states, module.get_initial_state())},
    }
    return EpisodeBatch.from_tree(columns)


def outputs_of(
    core: Impala, state: Any, batches: list[EpisodeBatch], burn_in: int
) -> PolicyAndValues:
    unit = core.flat
    forward = Forward(unit, state["parameters"], state["buffers"])
    return actor_critic_pass(forward, collate(batches), burn_in)


def assert_as_played(
    outputs: PolicyAndValues, module: RLModule, batches: list[EpisodeBatch]
) -> None:
    start = 0
    for batch in batches:
        for (n, t), step in slow_steps(module, batch).items():
            at = start + n, t
            assert outputs.live[at]
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
            close(outputs.action_dist_inputs[at], step.inputs)
            close(outputs.values[at], step.value)
            if not batch.terminated[n, t]:
                close(outputs.next_values[at], step.next_value)
        start += batch.rows


@every_module
@pytest.mark.parametrize("reset_rows", [True, False], ids=["next_step", "same_step"])
def test_values_are_those_of_playing_every_episode_again(
    make_batch: MakeBatch, make: Callable[[], RLModule], reset_rows: bool
) -> None:
    core = Impala(make, ImpalaConfig())
    state = core.init(seed=3)
    module = in_training(core, state, make)
    batches = [
        batch_for(make_batch, module, 5, 9, seed=seed, reset_rows=reset_rows) for seed in (5, 6)
    ]
    truncated = np.concatenate([batch.truncated for batch in batches])
    offsets = np.concatenate([batch.segment_offsets for batch in batches])
    assert truncated[:, :-1].any()  # in the middle of a row
    assert 0 < (offsets > 0).sum() < 10
    assert_as_played(outputs_of(core, state, batches, 0), module, batches)


def test_rows_may_begin_with_a_reset_row_and_end_with_steps_that_fill_them_up(
    make_batch: MakeBatch,
) -> None:
    live = np.ones((3, 5), bool)
    live[1, 0] = live[2, 3:] = False
    core = Impala(MODULES["lstm"], ImpalaConfig())
    state = core.init(seed=3)
    module = in_training(core, state, MODULES["lstm"])
    batch = batch_for(make_batch, module, 3, 5, ends=0.0, live=live)
    batch.states["module"]["hidden"][1] = 77.0
    assert_as_played(outputs_of(core, state, [batch], 0), module, [batch])


def test_rows_of_different_lengths_end_with_their_own_last_observation(
    make_batch: MakeBatch,
) -> None:
    core = Impala(MODULES["gru"], ImpalaConfig())
    state = core.init(seed=3)
    module = in_training(core, state, MODULES["gru"])
    batches = [
        batch_for(make_batch, module, rows, steps, seed=rows, ends=0.1)
        for rows, steps in [(2, 4), (3, 9), (4, 1)]
    ]
    assert_as_played(outputs_of(core, state, batches, 0), module, batches)


@every_module
@pytest.mark.parametrize("burn_in", [0, 1, 3])
def test_gradients_are_those_of_playing_every_episode_again(
    make_batch: MakeBatch, make: Callable[[], RLModule], burn_in: int
) -> None:
    """Through all of an episode's steps in its row, but those of the burn-in."""
    config = ImpalaConfig(burn_in=burn_in, gamma=0.9, lambda_=0.9, entropy_coefficient=0.1)
    core = Impala(make, config)
    state = core.init(seed=3)
    module = in_training(core, state, make)
    batch = batch_for(make_batch, module, 6, 7, seed=8, ends=0.2)
    lengths = batch.segment_lengths[batch.segment_offsets > 0]
    assert len(lengths) > 1
    assert lengths.min() < 3 < lengths.max()  # one is over before its burn-in
    grads, aux = core.grads(state, collate([batch]))
    expected = slow_gradients(module, batch, config)
    found = core.flat.named(grads)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-5)
    burnt = np.minimum(lengths, burn_in).sum()
    assert aux.live_steps == batch.live_steps - burnt


def test_steps_that_are_only_burnt_in_do_not_count_in_a_mean_over_learners(
    make_batch: MakeBatch,
) -> None:
    module = MODULES["lstm"]()
    core = Impala(MODULES["lstm"], ImpalaConfig(burn_in=2))
    state = core.init(seed=0)
    batches = [batch_for(make_batch, module, n, 6, seed=n) for n in (3, 5)]
    together, aux = core.grads(state, collate(batches))
    mean = torch.zeros_like(together)
    for batch in batches:
        alone, its = core.grads(state, collate([batch]))
        share = its.live_steps / aux.live_steps
        mean += alone * share
    torch.testing.assert_close(together, mean, rtol=1e-4, atol=1e-6)


def test_what_is_not_live_does_not_change_the_gradient_and_may_be_all_there_is(
    make_batch: MakeBatch,
) -> None:
    module = MODULES["gru"]()
    core = Impala(MODULES["gru"], ImpalaConfig(burn_in=1))
    state = core.init(seed=0)
    batch = batch_for(make_batch, module, 4, 8, seed=1)
    dead = ~batch.live
    assert dead.any()
    before, _ = core.grads(state, collate([batch]))
    batch.action_logp[dead] = -77.0
    batch.observations[dead] += 9.0
    after, _ = core.grads(state, collate([batch]))
    torch.testing.assert_close(after, before)

    nothing = batch_for(make_batch, module, 4, 1, ends=0.0, live=np.zeros((4, 1), bool))
    output = core.step(copied(state), collate([nothing]))
    assert torch.equal(output.state["parameters"], state["parameters"])
    assert output.metrics["skipped"] == 0


def test_episodes_without_states_are_refused(make_batch: MakeBatch) -> None:
    core = Impala(MODULES["lstm"], ImpalaConfig())
    with pytest.raises(ValueError, match="has a state, and the episodes have none"):
        core.step(core.init(0), collate([make_batch()]))


def test_burn_in_without_anything_to_warm_up_is_refused() -> None:
    make = partial(build_module, None, VECTOR, TWO, {})
    with pytest.raises(ValueError, match="burn_in = 2: the module has no state"):
        Impala(make, ImpalaConfig(burn_in=2))
