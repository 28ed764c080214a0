"""PPO's updates as a whole: epochs of minibatches, where they end, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.ppo_cases import TWO, VECTOR, make_core, near, states
from support.slow_linear import Linear
from support.states import copied
from torch import Tensor

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import TrainState
from juggler.learner.core.learner_core import Aux, Grads
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch

MakeBatch = Callable[..., EpisodeBatch]


class Recorder:
    """A seam that notes what passes it, and adds nothing."""

    def __init__(self) -> None:
        self.aux: list[Aux] = []

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        self.aux.append(aux)
        return grads, aux

    def sums(self, x: Tensor) -> Tensor:
        return x


def equal(one: TrainState, other: TrainState) -> bool:
    def leaves(tree: Any) -> list[Tensor]:
        if isinstance(tree, Tensor):
            return [tree]
        return [leaf for branch in tree.values() for leaf in leaves(branch)]

    return all(map(torch.equal, leaves(one), leaves(other)))


def test_an_update_is_so_many_minibatches_in_so_many_epochs_of_all_live_steps(
    make_batch: MakeBatch,
) -> None:
    core = make_core(epochs=3, minibatches=4)
    batch = make_batch(8, 16, seed=1)
    seam = Recorder()
    output = core.step(core.init(seed=0), collate([batch]), seam)
    steps = [int(aux.live_steps) for aux in seam.aux]
    assert len(steps) == 12
    for epoch in range(3):
        assert sum(steps[4 * epoch : 4 * epoch + 4]) == batch.live_steps
    assert max(steps) - min(steps) <= 8, "as evenly as rows divide"
    assert output.state["moments"]["updates"] == 12
    assert output.state["steps"] == batch.live_steps, "each counts once"


def test_one_epoch_of_one_minibatch_is_one_step_on_the_whole(make_batch: MakeBatch) -> None:
    core = make_core(epochs=1, minibatches=1)
    sample = collate([make_batch(4, 8)])
    state = core.init(seed=0)
    by_hand = core.apply(copied(state), *core.grads(state, sample)).state
    torch.testing.assert_close(
        core.step(copied(state), sample).state["parameters"],
        by_hand["parameters"],
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_same_state_and_sample_give_the_same_result(make_batch: MakeBatch) -> None:
    core = make_core()
    sample = collate([make_batch(4, 8)])
    first, second = (core.step(core.init(seed=0), sample).state for _ in range(2))
    assert equal(first, second)
    other = core.init(seed=0)
    other["extra"]["key"] = torch.tensor(1)
    assert not equal(core.step(copied(other), sample).state, first), "other minibatches"


def test_an_update_ends_where_the_policy_has_gone_too_far(make_batch: MakeBatch) -> None:
    batch = make_batch(8, 16, seed=1)
    free, bound = make_core(lr=0.05), make_core(lr=0.05, target_kl=0.01)
    state = free.init(seed=0)
    sample = collate([near(state, batch, free)])
    # The noise that `near` gives the sampling policy alone is a KL of about 0.05.
    output = bound.step(copied(state), sample)
    metrics = fetch_metrics(output.metrics)
    assert metrics["kl_stop_fraction"] == 1.0
    assert metrics["skipped"] == 0.0
    assert equal(output.state, state), "not even a step was counted"

    wide = make_core(lr=0.2, target_kl=0.1)
    seam = Recorder()
    output = wide.step(copied(state), sample, seam)
    kls = [float(aux.means["kl"]) for aux in seam.aux]
    first = next(place for place, kl in enumerate(kls) if kl > 0.15)
    assert 0 < first < 15
    assert output.state["moments"]["updates"] == first
    assert fetch_metrics(output.metrics)["kl_stop_fraction"] == pytest.approx(1 - first / 16)
    assert "kl_stop_fraction" not in free.step(copied(state), sample).metrics


def test_a_gradient_that_is_not_finite_changes_nothing(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch()
    batch.rewards[0, 0] = np.nan
    output = core.step(copied(state), collate([batch]))
    assert equal(output.state, state)
    assert output.metrics["skipped"] == 1.0


def test_a_sample_without_live_steps_changes_nothing(make_batch: MakeBatch) -> None:
    for model in ({}, {"recurrent": "gru"}):
        core = make_core(None, model)
        state = core.init(seed=0)
        sample = collate(
            [make_batch(ends=0.0, live=np.zeros((3, 6), bool), states=states(core, 3))]
        )
        assert equal(core.step(copied(state), sample).state, state)


def test_schedules_follow_the_environments_steps_and_not_the_epochs(make_batch: MakeBatch) -> None:
    core = make_core(lr=[[0, 1e-3], [100, 0.0]], epochs=4)
    sample = collate([make_batch(4, 10, ends=0.0)])
    output = core.step(core.init(seed=0), sample)
    assert output.metrics["lr"] == pytest.approx(1e-3)
    again = core.step(copied(output.state), sample)
    assert again.metrics["lr"] == pytest.approx(0.6e-3)


class Remembering(Linear):
    """The same module as one with a state, of which it makes nothing."""

    def get_initial_state(self) -> dict[str, Any]:
        return {"nothing": torch.zeros(1)}

    def _forward(self, batch: Batch) -> dict[str, Any]:
        outputs = super()._forward(batch)  # of [B, T, 4]
        return {**outputs, "states": batch["states"]}


@pytest.mark.parametrize("settings", [{}, {"value_clip": 0.2, "target_kl": 0.05}])
def test_a_module_with_a_state_that_it_does_not_use_learns_as_one_without(
    make_batch: MakeBatch, settings: dict[str, Any]
) -> None:
    cores = [
        make_core(module, minibatches=1, lr=1e-2, **settings) for module in (Linear, Remembering)
    ]
    ends = []
    for core in cores:
        state = core.init(seed=0)
        for seed in range(3):
            batch = make_batch(6, 9, seed=seed, states=states(core, 6))
            output = core.step(copied(state), collate([batch]))
            state = output.state
        ends.append((state, fetch_metrics(output.metrics)))
    (plain, plain_metrics), (remembering, remembering_metrics) = ends
    torch.testing.assert_close(plain["parameters"], remembering["parameters"], rtol=1e-4, atol=1e-5)
    assert plain["steps"] == remembering["steps"]
    assert plain_metrics == pytest.approx(remembering_metrics, rel=1e-3, abs=1e-4)


def test_segments_are_dealt_out_whole_and_each_to_one_minibatch(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "lstm", "hidden_sizes": [8]}, epochs=2, minibatches=3)
    batch = make_batch(8, 12, seed=3, states=states(core, 8))
    seam = Recorder()
    output = core.step(core.init(seed=0), collate([batch]), seam)
    steps = [int(aux.live_steps) for aux in seam.aux]
    assert len(steps) == 6
    assert min(steps) > 0
    assert sum(steps[:3]) == sum(steps[3:]) == batch.live_steps == output.state["steps"]


def test_more_minibatches_than_segments_leave_some_without_steps(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "gru"}, epochs=1, minibatches=5)
    batch = make_batch(2, 6, ends=0.0, states=states(core, 2))
    seam = Recorder()
    output = core.step(core.init(seed=0), collate([batch]), seam)
    assert sorted(int(aux.live_steps) for aux in seam.aux) == [0, 0, 0, 6, 6]
    assert output.metrics["skipped"] == 0.0


def test_steps_that_warm_a_state_up_are_not_learned_from(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "gru"}, burn_in=2, epochs=1, minibatches=2)
    batch = make_batch(8, 12, seed=3, states=states(core, 8))
    goes_on = batch.segment_offsets > 0
    burnt = int(np.minimum(batch.segment_lengths[goes_on], 2).sum())
    assert burnt > 0
    output = core.step(core.init(seed=0), collate([batch]))
    assert output.state["steps"] == batch.live_steps - burnt


class Leaving(Recorder):
    """A seam that loses the others in the third step of the optimizer."""

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        if len(self.aux) == 2:
            raise ConnectionError("gone")
        return super().gradients(grads, aux)


def test_an_update_that_fails_midway_leaves_the_state_as_it_was(make_batch: MakeBatch) -> None:
    sample = collate([make_batch(4, 8)])
    make = partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [8]})
    for core in (make_core(minibatches=4), Impala(make, ImpalaConfig())):
        state = core.init(seed=0)
        before = copied(state)
        with pytest.raises(ConnectionError):
            core.step_in_parts(state, sample, Leaving(), minibatches=4, epochs=1)
        assert equal(state, before)
