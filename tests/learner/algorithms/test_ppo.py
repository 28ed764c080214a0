"""PPO: its equations, its minibatches, and its updates as a whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import MakeBatch
from support.slow_losses import (
    TWO,
    VECTOR,
    Linear,
    gradient,
    make_core,
    near,
    parameters,
    ppo_loss,
    states,
    weights_of,
)
from support.small_cores import copied
from torch import Tensor

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo.core import row_keys, split_into_minibatches
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import ALONE, Aux, Grads
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import Batch
from juggler.testing import assert_same


@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"value_clip": 0.1, "normalize_advantages": False},
        {"lambda_": 0.7, "clip": 0.1, "reward_scale": 0.3},
    ],
)
def test_gradients_are_those_of_the_loss_written_out_step_by_step(
    make_batch: MakeBatch, reset_rows: bool, settings: dict[str, Any]
) -> None:
    """After an optimizer step, so that values differ from the old ones."""
    core = make_core(entropy_coefficient=0.1, gamma=0.9, lr=0.1, **settings)
    before = core.init(seed=3)
    batch = near(before, make_batch(5, 9, seed=5, reset_rows=reset_rows), core)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    prepared, live_steps = core._prepared(before, collate([batch]), ALONE)
    assert live_steps == batch.live_steps
    whole = prepared.columns
    state = core.apply(copied(before), *GradientCore.grads(core, before, whole)).state

    old, new = weights_of(parameters(core, before)), weights_of(parameters(core, state))
    metrics = GradientCore.grads(core, state, whole)[1].metrics
    assert 0.1 < metrics["clip_fraction"] < 0.9
    for weights, at in ((old, before), (new, state)):
        found = core.flat.named(GradientCore.grads(core, at, whole)[0])
        expected = gradient(lambda w: ppo_loss(w, old, batch, core.config), weights)
        assert found.keys() == expected.keys()
        for name, slopes in expected.items():
            np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def test_a_pass_in_chunks_is_the_pass_as_a_whole_with_states_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(None, {"recurrent": "gru", "hidden_sizes": [8], "recurrent_size": 6})
    forward = core.forward(core.init(seed=0))
    batch = {"observations": torch.randn(7, 5, 4), "states": {"hidden": torch.randn(7, 6)}}
    monkeypatch.setattr("juggler.learner.core.forward.CHUNK", 11)
    parts, whole = forward.in_chunks()(batch), forward(batch)
    for name in ("action_dist_inputs", "values"):
        torch.testing.assert_close(parts[name], whole[name])
    torch.testing.assert_close(parts["states"]["hidden"], whole["states"]["hidden"])


# PPO's updates as a whole: epochs of minibatches, where they end, and what they leave alone.


class Recorder:
    """A seam that notes what passes it, and adds nothing."""

    in_group = True

    def __init__(self) -> None:
        self.aux: list[Aux] = []

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        self.aux.append(aux)
        return grads, aux

    def sums(self, x: Tensor) -> Tensor:
        return x


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
    assert_same(output.state, state)  # not even a step was counted

    wide = make_core(lr=0.2, target_kl=0.1)
    seam = Recorder()
    output = wide.step(copied(state), sample, seam)
    kls = [float(aux.means["kl"]) for aux in seam.aux]
    first = next(place for place, kl in enumerate(kls) if kl > 0.15)
    assert 0 < first < 15
    assert output.state["moments"]["updates"] == first
    assert fetch_metrics(output.metrics)["kl_stop_fraction"] == pytest.approx(1 - first / 16)
    assert "kl_stop_fraction" not in free.step(copied(state), sample).metrics


class Remembering(Linear):
    """The same module with a state that it ignores."""

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
    """A seam that loses its peers in the third optimizer step."""

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
            core.in_parts(4, 1).step(state, sample, Leaving())
        assert_same(state, before)


@pytest.mark.parametrize(("in_group", "steps"), [(True, 8), (False, 2)])
def test_only_learners_of_a_group_make_steps_without_rows(
    make_batch: MakeBatch, in_group: bool, steps: int
) -> None:
    core = Impala(partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [8]}), ImpalaConfig())
    seam = Recorder()
    seam.in_group = in_group
    core.in_parts(8, 1).step(core.init(seed=0), collate([make_batch(2, 4)]), seam)
    assert len(seam.aux) == steps


# Minibatches: which steps are in which.


KEY = torch.tensor(7)


def some(rows: int, steps: int, dead: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of rows, and which steps are there."""
    rng = np.random.default_rng(rows * 100 + steps)
    return torch.arange(rows) + 11, torch.as_tensor(rng.random((rows, steps)) > dead)


@pytest.mark.parametrize(("rows", "steps", "count"), [(8, 32, 4), (5, 7, 3), (6, 1, 4), (1, 5, 8)])
def test_every_step_that_is_there_is_in_exactly_one_minibatch(
    rows: int, steps: int, count: int
) -> None:
    keys, present = some(rows, steps)
    places, there = split_into_minibatches(KEY, keys, present, count)
    assert places.shape == there.shape == (count, rows * -(-steps // count))
    dealt = places[there].sort().values
    assert dealt.tolist() == present.flatten().nonzero().squeeze(1).tolist()


def test_every_minibatch_gets_as_many_steps_of_each_row_as_the_others() -> None:
    keys, present = some(40, 30)
    places, there = split_into_minibatches(KEY, keys, present, 4)
    shares = torch.stack(
        [
            torch.bincount(part[is_there] // 30, minlength=40)
            for part, is_there in zip(places, there, strict=True)
        ]
    )  # [4, 40]
    assert (shares.max(0).values - shares.min(0).values).max() <= 1
    totals = shares.sum(1).float()
    assert totals.max() / totals.min() < 1.1, "what does not divide evenly goes to different ones"


def test_another_key_is_another_deal_and_the_same_key_the_same() -> None:
    keys, present = some(8, 32)
    first, _ = split_into_minibatches(KEY, keys, present, 4)
    assert torch.equal(first, split_into_minibatches(KEY, keys, present, 4)[0])
    assert not torch.equal(first, split_into_minibatches(KEY + 1, keys, present, 4)[0])


def test_a_part_of_a_sample_is_dealt_out_as_in_the_whole() -> None:
    """Learners' shares give the minibatches of the whole, despite padding."""
    logp, (_, live) = torch.randn(6, 9), some(6, 9)
    live[:3, 7:] = False
    places, there = split_into_minibatches(KEY, row_keys(logp, live), live, 4)
    whole = [set(part[is_there].tolist()) for part, is_there in zip(places, there, strict=True)]
    parts: list[set[int]] = [set() for _ in range(4)]
    for first, last, steps in ((0, 3, 7), (3, 6, 9)):
        part_live = live[first:last, :steps]
        keys = row_keys(logp[first:last, :steps], part_live)
        for minibatch, (part, is_there) in enumerate(
            zip(*split_into_minibatches(KEY, keys, part_live, 4), strict=True)
        ):
            parts[minibatch] |= {
                (first + int(place) // steps) * 9 + int(place) % steps for place in part[is_there]
            }
    assert parts == whole
