"""PPO against its equations, and what it does with a sample as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from slow_linear import Linear, gradient, ppo_loss, weights_of
from torch import Tensor

from juggler.learner.chunks import InChunks
from juggler.learner.collate import collate
from juggler.learner.config import PpoConfig
from juggler.learner.core import ALONE, Aux, Columns, Grads, Sample
from juggler.learner.gradient_core import GradientCore, State
from juggler.learner.learner import fetch_metrics
from juggler.learner.ppo import ADVANTAGES, Ppo
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import Batch, RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def make_core(module: Any = Linear, model: dict[str, Any] | None = None, **config: Any) -> Ppo:
    make = partial(build_module, module, VECTOR, TWO, model or {})
    return Ppo({"default": make}, PpoConfig(**config))


def parameters(core: Ppo, state: State) -> dict[str, Tensor]:
    return core._units["default"].named(state["default"]["parameters"])


def near(state: State, batch: EpisodeBatch, core: Ppo) -> EpisodeBatch:
    """The batch as if a policy a little off the present one had sampled it."""
    module = core.modules["default"]
    unit = core._units["default"]
    seen = torch.as_tensor(batch.observations).flatten(0, 1)
    outputs = unit.forward_train(
        "default", state["default"]["parameters"], {}, {"observations": seen}
    )
    logp = module.action_distribution()(outputs["action_dist_inputs"]).log_prob(
        torch.as_tensor(batch.actions).flatten()
    )
    noise = np.random.default_rng(9).normal(0, 0.3, batch.live.shape)
    batch.action_logp[:] = logp.detach().view(batch.live.shape).numpy() + noise
    return batch


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
    """After a first step of the optimizer, so that values have moved from the old ones."""
    core = make_core(entropy_coefficient=0.1, gamma=0.9, lr=0.1, **settings)
    before = core.init(seed=3)
    batch = near(before, make_batch(5, 9, seed=5, reset_rows=reset_rows), core)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    prepared, live_steps = core._prepared(before, {"default": collate([batch])}, ALONE)
    assert live_steps["default"] == batch.live_steps
    whole = {"default": prepared["default"].columns}
    state = core.apply(before, *GradientCore.grads(core, before, whole)).state

    old, new = weights_of(parameters(core, before)), weights_of(parameters(core, state))
    metrics = GradientCore.grads(core, state, whole)[1]["default"].metrics["default"]
    assert 0.1 < metrics["clipped_share"] < 0.9
    for weights, at in ((old, before), (new, state)):
        found = core._units["default"].named(GradientCore.grads(core, at, whole)[0]["default"])
        expected = gradient(lambda w: ppo_loss(w, old, batch, core.config), weights)
        assert found.keys() == expected.keys()
        for name, slopes in expected.items():
            np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def test_what_grads_gives_is_the_gradient_of_the_first_step(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=3)
    batch = near(state, make_batch(5, 9, seed=5), core)
    weights = weights_of(parameters(core, state))
    found = core._units["default"].named(
        core.grads(state, {"default": collate([batch])})[0]["default"]
    )
    expected = gradient(lambda w: ppo_loss(w, weights, batch, core.config), weights)
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


class Recorder:
    """A seam that notes what passes it, and adds nothing."""

    def __init__(self) -> None:
        self.aux: list[Aux] = []

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        self.aux.append(aux)
        return grads, aux

    def sums(self, x: Tensor) -> Tensor:
        return x


def equal(one: State, other: State) -> bool:
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
    output = core.step(core.init(seed=0), {"default": collate([batch])}, seam)
    steps = [int(aux["default"].live_steps["default"]) for aux in seam.aux]
    assert len(steps) == 12
    for epoch in range(3):
        assert sum(steps[4 * epoch : 4 * epoch + 4]) == batch.live_steps
    assert max(steps) - min(steps) <= 8, "as evenly as rows divide"
    assert output.state["default"]["moments"]["updates"] == 12
    assert output.state["default"]["steps"] == batch.live_steps, "each counts once"


def test_one_epoch_of_one_minibatch_is_one_step_on_the_whole(make_batch: MakeBatch) -> None:
    core = make_core(epochs=1, minibatches=1)
    sample = {"default": collate([make_batch(4, 8)])}
    state = core.init(seed=0)
    by_hand = core.apply(state, *core.grads(state, sample)).state
    torch.testing.assert_close(
        core.step(state, sample).state["default"]["parameters"],
        by_hand["default"]["parameters"],
        rtol=1e-5,
        atol=1e-6,
    )


def test_the_same_state_and_sample_give_the_same_result(make_batch: MakeBatch) -> None:
    core = make_core()
    sample = {"default": collate([make_batch(4, 8)])}
    first, second = (core.step(core.init(seed=0), sample).state for _ in range(2))
    assert equal(first, second)
    other = core.init(seed=0)
    other["default"]["extra"]["key"] = torch.tensor(1)
    assert not equal(core.step(other, sample).state, first), "other minibatches"


def advantages_in(core: Ppo, state: State, batches: list[EpisodeBatch]) -> Tensor:
    """Normalized, of live steps [M]."""
    prepared, _ = core._prepared(state, {"default": collate(batches)}, ALONE)
    columns = prepared["default"].columns
    live: Tensor = columns["live"]
    found: Tensor = columns[ADVANTAGES][live]
    return found


def test_advantages_have_mean_0_and_variance_1_over_live_steps_alone(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch(4, 9, seed=1)
    before = advantages_in(core, state, [batch])
    assert before.mean() == pytest.approx(0, abs=1e-6)
    assert before.std(correction=0) == pytest.approx(1, abs=1e-5)
    # Neither what reset rows hold matters, nor how far short rows are filled up.
    dead = ~batch.live
    assert dead.any()
    batch.rewards[dead] = 99.0
    batch.observations[dead] += 5.0
    torch.testing.assert_close(advantages_in(core, state, [batch]), before)
    short = make_batch(3, 4, seed=2)
    together = advantages_in(core, state, [batch, short])
    assert together.mean() == pytest.approx(0, abs=1e-6)
    assert together.std(correction=0) == pytest.approx(1, abs=1e-5)
    raw = make_core(normalize_advantages=False)
    unscaled = torch.cat([advantages_in(raw, state, [each]) for each in (batch, short)])
    by_hand = (unscaled - unscaled.mean()) / unscaled.std(correction=0)
    torch.testing.assert_close(together, by_hand, rtol=1e-4, atol=1e-5)


def test_two_learners_with_half_of_the_rows_each_make_the_update_of_one_with_all(
    make_batch: MakeBatch,
) -> None:
    """Minibatches, epochs, normalization and all; here the two take turns within one loop."""
    core = make_core(epochs=2, minibatches=3, target_kl=0.3, lr=1e-2)
    state = core.init(seed=0)
    batches = [near(state, make_batch(n, 9, seed=n), core) for n in (4, 6)]
    alone = core.step(state, {"default": collate(batches)}).state["default"]
    together = Together(core, state, [{"default": collate([each])} for each in batches]).run()
    assert together["steps"] == alone["steps"]
    torch.testing.assert_close(together["parameters"], alone["parameters"], rtol=1e-4, atol=1e-5)


class Together:
    """Learners in threads that wait for one another at the seam."""

    def __init__(self, core: Ppo, state: State, samples: list[Sample]) -> None:
        from threading import Barrier

        self._core, self._state, self._samples = core, state, samples
        self._barrier = Barrier(len(samples))
        self._slots: list[Any] = [None] * len(samples)

    def run(self) -> Any:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self._samples)) as pool:
            results = list(pool.map(self._learn, range(len(self._samples))))
        assert all(equal({"default": each}, {"default": results[0]}) for each in results)
        return results[0]

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self._slots[rank] = mine
        self._barrier.wait(timeout=20)
        everyone = list(self._slots)
        self._barrier.wait(timeout=20)
        return everyone

    def _learn(self, rank: int) -> Any:
        seam = Reducing(self, rank)
        return self._core.step(self._state, self._samples[rank], seam).state["default"]


class Reducing:
    """The seam of one of them."""

    def __init__(self, group: Together, rank: int) -> None:
        self._group, self._rank = group, rank

    def gradients(self, grads: Grads, aux: Aux) -> tuple[Grads, Aux]:
        found = aux["default"]
        mine = grads["default"], found.live_steps["default"], found.means["default"]["kl"]
        everyone = self._group.exchange(self._rank, mine)
        steps = sum(steps for _, steps, _ in everyone)
        kl = sum(kl * share for _, share, kl in everyone) / steps
        reduced = found._replace(live_steps={"default": steps}, means={"default": {"kl": kl}})
        mean = sum(gradient * share for gradient, share, _ in everyone) / steps
        return {"default": mean}, {"default": reduced}

    def sums(self, x: Tensor) -> Tensor:
        everyone: list[Tensor] = self._group.exchange(self._rank, x)
        return torch.stack(everyone).sum(0)


def test_an_update_ends_where_the_policy_has_gone_too_far(make_batch: MakeBatch) -> None:
    batch = make_batch(8, 16, seed=1)
    free, bound = make_core(lr=0.05), make_core(lr=0.05, target_kl=0.01)
    state = free.init(seed=0)
    sample = {"default": collate([near(state, batch, free)])}
    # The noise that `near` gives the sampling policy alone is a KL of about 0.05.
    output = bound.step(state, sample)
    metrics = fetch_metrics(output.metrics)["default"]
    assert metrics["stopped"] == 1.0
    assert metrics["skipped"] == 0.0
    assert equal(output.state, state), "not even a step was counted"

    wide = make_core(lr=0.2, target_kl=0.1)
    seam = Recorder()
    output = wide.step(state, sample, seam)
    kls = [float(aux["default"].means["default"]["kl"]) for aux in seam.aux]
    first = next(place for place, kl in enumerate(kls) if kl > 0.15)
    assert 0 < first < 15
    assert output.state["default"]["moments"]["updates"] == first
    assert fetch_metrics(output.metrics)["default"]["stopped"] == pytest.approx(1 - first / 16)
    assert "stopped" not in free.step(state, sample).metrics["default"]


def test_a_gradient_that_is_not_finite_changes_nothing(make_batch: MakeBatch) -> None:
    core = make_core()
    state = core.init(seed=0)
    batch = make_batch()
    batch.rewards[0, 0] = np.nan
    output = core.step(state, {"default": collate([batch])})
    assert equal(output.state, state)
    assert output.metrics["default"]["skipped"] == 1.0


def test_a_sample_without_live_steps_changes_nothing(make_batch: MakeBatch) -> None:
    for model in ({}, {"recurrent": "gru"}):
        core = make_core(None, model)
        state = core.init(seed=0)
        sample = collate(
            [make_batch(ends=0.0, live=np.zeros((3, 6), bool), states=states(core, 3))]
        )
        assert equal(core.step(state, {"default": sample}).state, state)


def states(core: Ppo, rows: int) -> dict[str, Any]:
    """As rows begin with that go on with an episode."""
    initial = core.modules["default"].get_initial_state()
    if not initial:
        return {}
    rng = np.random.default_rng(rows)
    drawn = {
        name: rng.normal(size=(rows, *each.shape)).astype(np.float32)
        for name, each in initial.items()
    }
    return {"module": drawn}


def test_modules_without_a_part_in_the_sample_stay_as_they_are(make_batch: MakeBatch) -> None:
    make = partial(build_module, Linear, VECTOR, TWO, {})
    core = Ppo({"one": make, "two": make}, PpoConfig())
    before = core.init(seed=0)
    output = core.step(before, {"two": collate([make_batch()])})
    assert output.metrics.keys() == {"two"}
    assert equal(output.state["one"], before["one"])  # type: ignore[arg-type]
    assert not equal(output.state["two"], before["two"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sample for modules \['three'\]; there are"):
        core.step(before, {"three": collate([make_batch()])})


def test_schedules_follow_the_environments_steps_and_not_the_epochs(make_batch: MakeBatch) -> None:
    core = make_core(lr=[[0, 1e-3], [100, 0.0]], epochs=4)
    sample = {"default": collate([make_batch(4, 10, ends=0.0)])}
    output = core.step(core.init(seed=0), sample)
    assert output.metrics["default"]["lr"] == pytest.approx(1e-3)
    again = core.step(output.state, sample)
    assert again.metrics["default"]["lr"] == pytest.approx(0.6e-3)


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
            output = core.step(state, {"default": collate([batch])})
            state = output.state
        ends.append((state["default"], fetch_metrics(output.metrics)["default"]))
    (plain, plain_metrics), (remembering, remembering_metrics) = ends
    torch.testing.assert_close(plain["parameters"], remembering["parameters"], rtol=1e-4, atol=1e-5)
    assert plain["steps"] == remembering["steps"]
    assert plain_metrics == pytest.approx(remembering_metrics, rel=1e-3, abs=1e-4)


def test_segments_are_dealt_out_whole_and_each_to_one_minibatch(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "lstm", "hidden_sizes": [8]}, epochs=2, minibatches=3)
    batch = make_batch(8, 12, seed=3, states=states(core, 8))
    seam = Recorder()
    output = core.step(core.init(seed=0), {"default": collate([batch])}, seam)
    steps = [int(aux["default"].live_steps["default"]) for aux in seam.aux]
    assert len(steps) == 6
    assert min(steps) > 0
    assert sum(steps[:3]) == sum(steps[3:]) == batch.live_steps == output.state["default"]["steps"]


def test_more_minibatches_than_segments_leave_some_without_steps(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "gru"}, epochs=1, minibatches=5)
    batch = make_batch(2, 6, ends=0.0, states=states(core, 2))
    seam = Recorder()
    output = core.step(core.init(seed=0), {"default": collate([batch])}, seam)
    assert sorted(int(aux["default"].live_steps["default"]) for aux in seam.aux) == [0, 0, 0, 6, 6]
    assert output.metrics["default"]["skipped"] == 0.0


def test_steps_that_warm_a_state_up_are_not_learned_from(make_batch: MakeBatch) -> None:
    core = make_core(None, {"recurrent": "gru"}, burn_in=2, epochs=1, minibatches=2)
    batch = make_batch(8, 12, seed=3, states=states(core, 8))
    goes_on = batch.segment_offsets > 0
    burnt = int(np.minimum(batch.segment_lengths[goes_on], 2).sum())
    assert burnt > 0
    output = core.step(core.init(seed=0), {"default": collate([batch])})
    assert output.state["default"]["steps"] == batch.live_steps - burnt


class Counting(RLModule):
    """Notes how many observations each pass without gradients has."""

    passes: list[int] = []  # noqa: RUF012

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = torch.nn.Linear(4, 3)

    def _forward(self, batch: Batch) -> dict[str, Any]:
        if not torch.is_grad_enabled():
            self.passes.append(len(batch["observations"]))
        outputs = self.head(batch["observations"])
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


def test_values_come_from_passes_of_bounded_size(
    make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(Counting)
    state = core.init(seed=0)
    batch = make_batch(8, 16, seed=1)
    sample: dict[str, Columns] = {"default": collate([batch])}
    whole = core.step(state, sample).state
    Counting.passes.clear()
    monkeypatch.setattr("juggler.learner.chunks.CHUNK", 50)
    parts = core.step(state, sample).state
    assert max(Counting.passes) == 50
    assert sum(Counting.passes) == 8 * 16 + 8 + len(batch.final_rows), "each observation once"
    torch.testing.assert_close(
        parts["default"]["parameters"], whole["default"]["parameters"], rtol=1e-5, atol=1e-6
    )


def test_a_pass_in_chunks_is_the_pass_as_a_whole_with_states_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(None, {"recurrent": "gru", "hidden_sizes": [8], "recurrent_size": 6})
    forward = core.forward(core.init(seed=0), "default")
    batch = {"observations": torch.randn(7, 5, 4), "states": {"hidden": torch.randn(7, 6)}}
    monkeypatch.setattr("juggler.learner.chunks.CHUNK", 11)
    parts, whole = InChunks(*forward)(batch), forward(batch)
    for name in ("action_dist_inputs", "values"):
        torch.testing.assert_close(parts[name], whole[name])
    torch.testing.assert_close(parts["states"]["hidden"], whole["states"]["hidden"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0),
        ("minibatches", 0),
        ("lambda_", 1.1),
        ("clip", 0.0),
        ("value_clip", -1.0),
        ("target_kl", 0.0),
        ("minibatches", 4096),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key} = {value}: must be"):
        PpoConfig(**{key: value}).validate()
