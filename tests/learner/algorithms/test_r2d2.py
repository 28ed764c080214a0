"""R2D2's loss, targets and priorities against those of episodes played again step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from juggler.learner.algorithms.r2d2.config import R2d2Config
from juggler.learner.algorithms.r2d2.core import R2d2, scaled, unscaled
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.data.sources import NEW_STEPS
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork
from juggler.runtime.wire.structures import tree_map

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
MODEL = {"hidden_sizes": [8], "recurrent": "lstm", "recurrent_size": 6}
GAMMA, SCALE, STEPS = 0.9, 0.7, 3


def make_core(module: Any = QNetwork, model: Any = None, **config: Any) -> R2d2:
    make = partial(module, VECTOR, TWO, model or MODEL)
    keys = {"gamma": GAMMA, "reward_scale": SCALE, "n_step": STEPS, **config}
    return R2d2(make, R2d2Config(**keys))


def batch_of(make_batch: MakeBatch, seed: int, rows: int = 4, steps: int = 9) -> EpisodeBatch:
    rng = np.random.default_rng(seed)
    state = {
        name: rng.standard_normal((rows, 6), dtype=np.float32) for name in ("hidden", "cell")
    }  # [N, 6] each
    return make_batch(rows, steps, seed=seed, ends=0.15, states={"module": state})


class Doubled(QNetwork):
    """Reads observations in float64, which no layer of its encoder makes float32."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        features = batch["observations"]  # [1, 1, 4]
        for layer in self.encoder:
            features = layer(features)  # [1, 1, 8]
        remembered, states = self.core(features, batch["states"])  # [1, 1, 6]
        values = self.value_head(self.normalize(remembered))  # [1, 1, 2]
        return {"action_dist_inputs": values, "states": states}


class Played(NamedTuple):
    before: dict[tuple[int, int], Tensor]  # Q [2] by (row, step), of the observation before it
    after: dict[tuple[int, int], Tensor]  # of the one after it
    learned: set[tuple[int, int]]  # steps behind the burn-in


def play(parameters: Tensor, batch: EpisodeBatch, burn_in: int) -> Played:
    """All observations of a batch, one at a time, in float64. The gradient stops where the burn-in
    ends."""
    module, at = Doubled(VECTOR, TWO, MODEL).double(), 0
    named = {}
    for name, parameter in module.named_parameters():
        named[name] = parameters[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    played = Played({}, {}, set())

    def look(observation: np.ndarray, state: Any) -> tuple[Tensor, Any]:
        seen = torch.from_numpy(observation).double()[None, None]  # [1, 1, 4]
        outputs = torch.func.functional_call(
            module, named, ({"observations": seen, "states": state},)
        )
        return outputs["action_dist_inputs"][0, 0], outputs["states"]

    segments = batch.segment_rows, batch.segment_starts, batch.segment_offsets
    offsets = {(n, t): offset for n, t, offset in zip(*segments, strict=True)}
    for n in range(batch.rows):
        state: Any = None
        goes_on = False
        for t in np.flatnonzero(batch.live[n]).tolist():
            if (n, t) in offsets:
                goes_on = offsets[n, t] > 0
                start = {name: torch.zeros(1, 6).double() for name in ("hidden", "cell")}
                if goes_on:
                    stored: Any = batch.states["module"]  # type: ignore[index, call-overload]
                    start = {k: torch.from_numpy(x[n : n + 1]).double() for k, x in stored.items()}
                state = start
            if goes_on and t == burn_in:
                state = tree_map(lambda x: x.detach(), state)
            played.before[n, t], state = look(batch.observations[n, t], state)
            follows = batch.last_observations[n]
            if batch.truncated[n, t]:
                (k,) = np.flatnonzero((batch.final_rows == n) & (batch.final_steps == t))
                follows = batch.final_observations[k]
            elif t + 1 < batch.steps:
                follows = batch.observations[n, t + 1]
            played.after[n, t] = look(follows, state)[0]
            if not goes_on or t >= burn_in:
                played.learned.add((n, t))
    return played


def h(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def inverse_of_h(y: float) -> float:
    """By halving an interval, since h rises."""
    low, high = -1e9, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < y else (low, middle)
    return low


def slow_targets(batch: EpisodeBatch, own: Played, target: Played) -> dict[tuple[int, int], float]:
    found = {}
    for n, t in own.learned:
        total, discount, at = 0.0, 1.0, t
        while True:
            total += discount * SCALE * float(batch.rewards[n, at])
            discount *= GAMMA
            ends = bool(batch.terminated[n, at] or batch.truncated[n, at])
            if ends or at + 1 == min(t + STEPS, batch.steps) or not batch.live[n, at + 1]:
                break
            at += 1
        if not batch.terminated[n, at]:
            best = int(own.after[n, at].argmax())
            total += discount * inverse_of_h(float(target.after[n, at][best]))
        found[n, t] = h(total)
    return found


@pytest.mark.parametrize("burn_in", [0, 2])
def test_loss_gradient_and_priorities_are_those_of_episodes_played_step_by_step(
    make_batch: MakeBatch, burn_in: int
) -> None:
    core, batch = make_core(burn_in=burn_in), batch_of(make_batch, seed=3)
    assert (batch.segment_offsets > 0).any()
    assert batch.truncated.any()
    assert batch.terminated.any()
    state = core.init(0)
    state["extra"]["target"] = core.init(5)["parameters"]
    parameters = state["parameters"].double().requires_grad_()
    own = play(parameters, batch, burn_in)
    targets = slow_targets(batch, own, play(state["extra"]["target"].double(), batch, burn_in))
    weights = np.linspace(0.2, 1.0, batch.rows)
    errors = {
        (n, t): targets[n, t] - own.before[n, t][int(batch.actions[n, t])]  # type: ignore[index, call-overload]
        for n, t in own.learned
    }
    costs = [0.5 * weights[n] * error**2 for (n, _), error in errors.items()]
    loss = torch.stack(costs).mean()  # []
    (gradient,) = torch.autograd.grad(loss, parameters)  # [P]
    rows = [
        [abs(float(errors[n, t].detach())) for m, t in errors if m == n] for n in range(batch.rows)
    ]
    priorities = [0.9 * max(row) + 0.1 * np.mean(row) for row in rows]

    columns = collate([batch])
    sample = {**columns, IMPORTANCE_WEIGHTS: torch.from_numpy(weights).float()}
    grads, aux = core.grads(state, sample)
    found = aux
    assert float(found.metrics["value_loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert int(found.live_steps) == len(own.learned)
    np.testing.assert_allclose(found.priorities.numpy(), priorities, rtol=1e-4)
    np.testing.assert_allclose(grads.numpy(), gradient.numpy(), rtol=1e-3, atol=1e-6)


def test_micro_batches_have_the_gradient_of_the_whole(make_batch: MakeBatch) -> None:
    columns = collate([batch_of(make_batch, seed=2)])
    whole, parts = make_core(), make_core(micro_batches=3)
    state = whole.init(0)
    sample = columns
    one, other = (core.grads(state, sample)[0] for core in (whole, parts))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_scaling_is_undone_over_all_sizes() -> None:
    x = torch.tensor([-1e6, -300.0, -1.0, -1e-3, 0.0, 1e-4, 0.5, 20.0, 1e5], dtype=torch.float64)
    torch.testing.assert_close(unscaled(scaled(x)), x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scaled(x).numpy(), [h(float(each)) for each in x], rtol=1e-12)
    singles = x.float()
    torch.testing.assert_close(unscaled(scaled(singles)), singles, rtol=1e-4, atol=1e-6)


def test_rows_with_large_errors_are_drawn_more_often(make_batch: MakeBatch) -> None:
    core = make_core(replay_batch_size=8, replay_begin=0, replay_ratio=20.0)
    learner = Learner(core)
    learner.update_from_episodes([batch_of(make_batch, seed=0)])
    replay: Any = learner.save()[0]["replay"]
    weights = replay["modules"]["default"]["selection"]["weights"]
    assert weights.shape == (4,)
    assert len(np.unique(weights)) == 4


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_a_restored_learner_goes_on_as_the_saved_one(make_batch: MakeBatch, alpha: float) -> None:
    """The rows become longer, and have more episodes, on both sides of the checkpoint."""
    keys: dict[str, Any] = {"priority_exponent": alpha, "replay_capacity": 120, "replay_begin": 20}
    keys["replay_batch_size"] = 4
    one, other = (Learner(make_core(**keys), seed=seed) for seed in (0, 1))
    lengths = [5, 5, 9, 7, 9, 12, 9, 9]
    batches = [batch_of(make_batch, seed, steps=steps) for seed, steps in enumerate(lengths)]
    for batch in batches[:4]:
        one.update_from_episodes([batch])
    one.forget()
    other.restore(*one.save())
    for batch in batches[4:]:
        for learner in (one, other):
            learner.update_from_episodes([batch])
    np.testing.assert_equal(one.get_weights(), other.get_weights())


def test_schedules_count_live_steps_that_arrived(make_batch: MakeBatch) -> None:
    learner = Learner(make_core(replay_begin=0, replay_batch_size=4, burn_in=2))
    arrived = 0
    for seed in range(3):
        batch = batch_of(make_batch, seed=seed)
        arrived += batch.live_steps
        metrics = fetch_metrics(learner.update_from_episodes([batch]))
        assert math.isfinite(metrics["value_loss"])
    assert int(learner.state["steps"]) == arrived


def test_learning_begins_after_so_many_steps(make_batch: MakeBatch) -> None:
    core, batch = make_core(replay_batch_size=4, replay_begin=60), batch_of(make_batch, seed=0)
    source, sample = core.data_source(), collate([batch])
    assert 30 < batch.live_steps < 60
    assert list(source.add(sample)) == []
    drawn = list(source.add(sample))
    assert len(drawn) == 4 * 8 / 4
    assert [int(each[NEW_STEPS]) for each in drawn[:2]] == [2 * batch.live_steps, 0]


def test_a_module_without_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r'has none: set model\.recurrent = "lstm", or take'):
        make_core(model={"hidden_sizes": [8]})


def test_a_module_that_no_learner_can_have_explore_is_refused() -> None:
    with pytest.raises(ValueError, match="r2d2 needs a module with a buffer 'epsilon'"):
        make_core(module=ActorCritic)


def test_a_burn_in_that_leaves_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="burn_in = 32: must be below fragment_steps = 32"):
        R2d2Config(burn_in=32).validate_rows(32)
