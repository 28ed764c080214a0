"""DQN, R2D2 and PQN against losses written out in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.slow_losses import Step, in_training, slow_steps
from support.small_cores import Doubled
from torch import Tensor

from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.pqn import PqnConfig
from juggler.learner.algorithms.pqn.core import Pqn
from juggler.learner.algorithms.r2d2 import R2d2Config
from juggler.learner.algorithms.r2d2.core import R2d2, scaled, unscaled
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.returns import rows_of_transitions, transitions
from juggler.learner.core.sequences import all_observations
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.learner import Learner
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic, QNetwork
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.structures import tree_map


def make_core(module: Any = QNetwork, model: dict[str, Any] | None = None, **config: Any) -> Dqn:
    make = partial(module, VECTOR, TWO, model or {"hidden_sizes": [8]})
    return Dqn(make, DqnConfig(**config))


def slow_values(
    parameters: torch.Tensor, observation: torch.Tensor, atoms: dict[str, Any] | None = None
) -> np.ndarray:
    """Q(x, ·) [2], or logits [2, K], of one observation in float64."""
    module = Doubled(QNetwork(VECTOR, TWO, atoms or {"hidden_sizes": [8]}), parameters)
    with torch.no_grad():
        outputs = module({"observations": observation[None]})
    found: np.ndarray = outputs["return_logits" if atoms else "action_dist_inputs"][0].numpy()
    return found


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_loss_is_hubers_of_the_errors_of_n_step_targets(
    make_batch: MakeBatch, double: bool, n_step: int
) -> None:
    core = make_core(double=double, n_step=n_step, reward_scale=0.7, gamma=0.9)
    columns = dict(collate([make_batch(4, 6, seed=1)]))
    columns[IMPORTANCE_WEIGHTS] = weights = torch.tensor([1.0, 0.2, 0.5, 0.7])
    state = core.init(0)
    state["extra"]["target"] = core.init(5)["parameters"]
    own, target = state["parameters"], state["extra"]["target"]
    found, seen = transitions(columns, n_step, 0.9), all_observations(columns)
    costs, errors = [], np.zeros((4, 6))
    for n, t in zip(*np.nonzero(columns["live"].numpy()), strict=True):
        after = seen[found.after[n, t]]
        by_target = slow_values(target, after)
        chooser = slow_values(own, after) if double else by_target
        goal = 0.7 * float(found.rewards[n, t])
        goal += float(found.discounts[n, t]) * by_target[chooser.argmax()]
        values = slow_values(own, columns["observations"][n, t])
        error = abs(goal - values[int(columns["actions"][n, t])])
        costs.append(float(weights[n]) * (error**2 / 2 if error < 1 else error - 0.5))
        errors[n, t] = error
    _, aux = core.grads(state, columns)
    loss = float(aux.metrics["value_loss"])
    assert loss == pytest.approx(np.mean(costs), rel=1e-5)
    priorities = aux.priorities.numpy()
    np.testing.assert_allclose(priorities, errors.max(1), rtol=1e-5)


def slow_projection(
    likely: np.ndarray, reward: float, discount: float, returns: np.ndarray
) -> np.ndarray:
    """Each probability goes to the nearest return above and below."""
    found = np.zeros_like(returns)
    for probability, value in zip(likely, returns, strict=True):
        moved = min(max(reward + discount * value, returns[0]), returns[-1])
        above = int(np.searchsorted(returns, moved))
        if returns[above] == moved:
            found[above] += probability
            continue
        share = (moved - returns[above - 1]) / (returns[above] - returns[above - 1])
        found[above] += probability * share
        found[above - 1] += probability * (1 - share)
    return found


ATOMS: dict[str, Any] = {"hidden_sizes": [8], "atoms": 11, "v_min": -2.0, "v_max": 2.5}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n_step", [1, 3])
def test_with_atoms_the_loss_is_the_cross_entropy_with_projected_returns(
    make_batch: MakeBatch, double: bool, n_step: int
) -> None:
    core = make_core(model=ATOMS, double=double, n_step=n_step, reward_scale=0.7, gamma=0.9)
    columns = collate([make_batch(4, 6, seed=1)])
    state = core.init(0)
    generator = torch.Generator().manual_seed(7)
    # At first, all returns are about as likely as one another: these are not.
    own = state["parameters"]
    own = own + 0.5 * torch.randn(own.shape, generator=generator)
    target = own + 0.5 * torch.randn(own.shape, generator=generator)
    state["parameters"], state["extra"]["target"] = own, target
    found, seen = transitions(columns, n_step, 0.9), all_observations(columns)
    returns = np.linspace(-2.0, 2.5, 11)
    costs, surprises = np.zeros((4, 6)), np.zeros((4, 6))
    for n, t in zip(*np.nonzero(columns["live"].numpy()), strict=True):
        after = seen[found.after[n, t]]
        by_target = softmax(slow_values(target, after, ATOMS))  # [2, K]
        chooser = softmax(slow_values(own, after, ATOMS)) if double else by_target
        reward, discount = 0.7 * float(found.rewards[n, t]), float(found.discounts[n, t])
        best = (chooser @ returns).argmax()
        goal = slow_projection(by_target[best], reward, discount, returns)
        assert goal.sum() == pytest.approx(1.0)
        now = softmax(slow_values(own, columns["observations"][n, t], ATOMS))
        now = now[int(columns["actions"][n, t])]
        costs[n, t] = -(goal * np.log(now)).sum()
        some = goal > 0
        surprises[n, t] = (goal[some] * np.log(goal[some] / now[some])).sum()
    _, aux = core.grads(state, columns)
    loss = float(aux.metrics["value_loss"])
    assert loss == pytest.approx(costs.sum() / columns["live"].sum().item(), rel=1e-5)
    priorities = aux.priorities.numpy()
    np.testing.assert_allclose(priorities, surprises.max(1), rtol=1e-5, atol=1e-7)


def softmax(logits: np.ndarray) -> np.ndarray:
    shares: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"atoms": 1}, "model.atoms = 1: must be 0, or at least"),
        ({"atoms": 51, "v_min": 3.0, "v_max": 3.0}, r"model.v_min must be below v_max = 3\.0"),
        ({"atoms": 51, "v_max": "high"}, "model.v_max: expected a number"),
        ({"atom": 51}, "model has no key 'atom': did you"),
    ],
)
def test_wrong_atoms_are_named(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_core(model=model)


def test_only_dqn_takes_atoms() -> None:
    with pytest.raises(ValueError, match="with algorithm = 'pqn': only dqn learns"):
        Pqn(partial(QNetwork, VECTOR, TWO, ATOMS), PqnConfig())


def test_a_core_that_derives_from_dqn_takes_atoms_whatever_its_name() -> None:
    class Own(Dqn):
        name = "own"

    core = Own(partial(QNetwork, VECTOR, TWO, ATOMS), DqnConfig())
    assert core.module.atoms == ATOMS["atoms"]


def test_drawn_transitions_have_the_loss_of_the_rows_that_they_are_from(
    make_batch: MakeBatch,
) -> None:
    core = make_core(n_step=3)
    columns = collate([make_batch(4, 6, seed=2)])
    state = core.init(0)
    rows = rows_of_transitions(columns, 3, core.config.gamma)
    of_episodes, aux = core.grads(state, columns)
    of_rows, _ = core.grads(state, rows)
    torch.testing.assert_close(of_episodes, of_rows)
    weights = torch.full((len(rows["rewards"]),), 0.5)
    weighted, _ = core.grads(state, {**rows, IMPORTANCE_WEIGHTS: weights})
    torch.testing.assert_close(0.5 * of_episodes, weighted)
    assert aux.priorities is not None
    assert aux.priorities.shape == (4,)


def test_the_target_network_moves_when_it_is_due_and_as_far_as_it_shall(
    make_batch: MakeBatch,
) -> None:
    core = make_core(target_period=3, target_share=0.25, lr=1e-2)
    sample = collate([make_batch(4, 6, seed=0)])
    state = core.init(0)
    first = state["parameters"].clone()
    for step in range(1, 4):
        state = core.step(state, sample).state
        target = state["extra"]["target"]
        if step < 3:
            torch.testing.assert_close(target, first)
    torch.testing.assert_close(target, torch.lerp(first, state["parameters"], 0.25))


@pytest.mark.parametrize("target_acts", [True, False])
def test_the_target_network_acts_if_it_is_to(make_batch: MakeBatch, target_acts: bool) -> None:
    core = make_core(target_acts=target_acts, lr=1e-2)
    state = core.init(0)
    for seed in range(3):
        state = core.step(state, collate([make_batch(4, 6, seed=seed)])).state
    group, saved = core.flat, core.state_to_tree(state)
    target = group.named(state["extra"]["target"])
    trained = group.named(state["parameters"])
    expected = target if target_acts else trained
    kept = weights_in({"default": saved}, acting=True)["default"]
    for name, tensor in core.get_params(state).items():
        if name in expected:
            torch.testing.assert_close(tensor, expected[name])
            np.testing.assert_array_equal(kept[name], tensor.numpy())
    assert any((target[name] != trained[name]).any() for name in target)
    restored = core.state_from_tree(saved, like=core.init(1))
    torch.testing.assert_close(restored, state)


def test_schedules_count_what_arrived_and_not_how_often_it_was_drawn(make_batch: MakeBatch) -> None:
    core = make_core(replay_begin=0, replay_batch_size=8, exploration_epsilon=[(0, 1.0), (99, 0.0)])
    learner, arrived = Learner(core), 0
    for seed in range(3):
        batch = make_batch(4, 6, seed=seed)
        metrics = fetch_metrics(learner.update_from_episodes([batch]))
        arrived += batch.live_steps
        before = arrived - batch.live_steps
        assert 1 - arrived / 99 < metrics["epsilon"] < 1 - before / 99 + 0.01
    assert int(learner.state["steps"]) == arrived


@pytest.mark.parametrize("passes", [{}, {"num_epochs": 2, "minibatch_size": 3}])
def test_priorities_reach_the_replay_of_a_learner(
    make_batch: MakeBatch, passes: dict[str, Any]
) -> None:
    core = make_core(priority_exponent=1.0, replay_batch_size=8, replay_begin=0, replay_ratio=8.0)
    learner = Learner(core)
    learner.update_from_episodes([make_batch(4, 6)], **passes)
    tree, _ = learner.save()
    replay: Any = tree["replay"]
    assert len(np.unique(replay["modules"]["default"]["weights"])) > 4


def test_a_module_with_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave out model\.recurrent, or"):
        make_core(model={"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 8})


def test_a_module_that_no_learner_can_have_explore_is_refused() -> None:
    with pytest.raises(ValueError, match="dqn needs a module with a buffer 'epsilon'"):
        make_core(module=ActorCritic)


# R2D2's loss, targets and priorities against those of episodes played again step by step.


MODEL = {"hidden_sizes": [8], "recurrent": "lstm", "recurrent_size": 6}
GAMMA, SCALE, STEPS = 0.9, 0.7, 3


def make_core_of_r2d2(module: Any = QNetwork, model: Any = None, **config: Any) -> R2d2:
    make = partial(module, VECTOR, TWO, model or MODEL)
    keys = {"gamma": GAMMA, "reward_scale": SCALE, "n_step": STEPS, **config}
    return R2d2(make, R2d2Config(**keys))


def batch_of(make_batch: MakeBatch, seed: int, rows: int = 4, steps: int = 9) -> EpisodeBatch:
    rng = np.random.default_rng(seed)
    state = {
        name: rng.standard_normal((rows, 6), dtype=np.float32) for name in ("hidden", "cell")
    }  # [N, 6] each
    return make_batch(rows, steps, seed=seed, ends=0.15, states={"module": state})


class R2d2Doubled(QNetwork):
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
    """Play a batch's observations one by one in float64, after the burn-in."""
    module, at = R2d2Doubled(VECTOR, TWO, MODEL).double(), 0
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
    core, batch = make_core_of_r2d2(burn_in=burn_in), batch_of(make_batch, seed=3)
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


def test_scaling_is_undone_over_all_sizes() -> None:
    x = torch.tensor([-1e6, -300.0, -1.0, -1e-3, 0.0, 1e-4, 0.5, 20.0, 1e5], dtype=torch.float64)
    torch.testing.assert_close(unscaled(scaled(x)), x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scaled(x).numpy(), [h(float(each)) for each in x], rtol=1e-12)
    singles = x.float()
    torch.testing.assert_close(unscaled(scaled(singles)), singles, rtol=1e-4, atol=1e-6)


def test_a_module_without_a_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has none: set model\.recurrent ="):
        make_core_of_r2d2(model={"hidden_sizes": [8]})


def test_a_burn_in_that_leaves_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="burn_in = 32: must be below"):
        R2d2Config(burn_in=32).validate_rows(32)


# Values of actions where an episode was cut off in a state without a legal action.


MASKED = spaces.Dict({"observation": VECTOR, "action_mask": spaces.MultiBinary(2)})
MEMORY = {"recurrent": "gru", "recurrent_size": 4}


def seen(observations: Any, mask: int) -> dict[str, Any]:
    return {
        "observation": observations,
        "action_mask": np.full((*observations.shape[:-1], 2), mask, np.int8),
    }


def masked(batch: EpisodeBatch, at_ends: int) -> EpisodeBatch:
    """The batch with masks `at_ends` in final observations, and ones elsewhere."""
    return replace(
        batch,
        observations=seen(batch.observations, 1),
        last_observations=seen(batch.last_observations, 1),
        final_observations=seen(batch.final_observations, at_ends),
        states={"module": {"hidden": np.zeros((len(batch.rewards), 4), np.float32)}},
    )


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [("dqn", {}), ("dqn", {"double": False, "n_step": 1}), ("r2d2", {}), ("pqn", {})],
)
def test_a_final_observation_without_a_legal_action_is_worth_its_best_action(
    make_batch: MakeBatch, algorithm: str, keys: dict[str, Any]
) -> None:
    model = {"hidden_sizes": [8], **(MEMORY if algorithm == "r2d2" else {})}
    found = ALGORITHMS[algorithm]
    package, _, name = found.core.partition(":")
    core: Any = getattr(__import__(package, fromlist=[name]), name)(
        partial(QNetwork, MASKED, spaces.Discrete(2), model), found.config(**keys)
    )
    batch = make_batch(4, 12, seed=1, ends=0.3)
    assert len(batch.final_rows), "an episode is truncated"
    state, gradients = core.init(0), []
    for at_ends in (0, 1):
        sample = collate([masked(batch, at_ends)])
        gradient, aux = core.grads(state, sample)
        assert float(aux.metrics["value_loss"]) < 100
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)


# PQN's gradients against λ-returns in NumPy, and its exploration.


THREE = spaces.Discrete(3, start=0)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"hidden_sizes": [8]},
    "gru": {"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 8},
}


def make_pqn(module: Any = QNetwork, model: str = "plain", **config: Any) -> Pqn:
    make = partial(module, VECTOR, THREE, MODELS[model])
    return Pqn(make, PqnConfig(**config))


def test_the_trained_parameters_act_whatever_keys_a_config_of_ones_own_has() -> None:
    @dataclass(kw_only=True)
    class OwnConfig(PqnConfig):
        target_acts: bool = True  # there is no target network

    core = Pqn(partial(QNetwork, VECTOR, THREE, MODELS["plain"]), OwnConfig())
    state = core.init(0)
    assert core.acting_parameters(state) is state["parameters"]


def slow_returns(
    batch: EpisodeBatch, steps: dict[tuple[int, int], Step], config: PqnConfig
) -> dict[tuple[int, int], float]:
    """G_t of every live step, one at a time in float64."""
    returns: dict[tuple[int, int], float] = {}
    for n in range(batch.rows):
        for t in reversed(range(batch.steps)):
            if not batch.live[n, t]:
                continue
            reward = np.float64(batch.rewards[n, t]) * config.reward_scale
            after = np.float64(steps[n, t].next_value.item())  # max_a Q(x_{t+1}, a)
            if batch.terminated[n, t]:
                returns[n, t] = reward
            elif batch.truncated[n, t] or (n, t + 1) not in returns:
                returns[n, t] = reward + config.gamma * after
            else:
                mixed = (1 - config.lambda_) * after + config.lambda_ * returns[n, t + 1]
                returns[n, t] = reward + config.gamma * mixed
    return returns


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_gradients_are_those_of_lambda_returns_written_out_step_by_step(
    make_batch: MakeBatch, model: str, reset_rows: bool, lambda_: float
) -> None:
    core = make_pqn(model=model, lambda_=lambda_, gamma=0.9, reward_scale=0.3)
    state = core.init(seed=3)
    states = {"module": {"hidden": np.random.default_rng(1).normal(size=(4, 8)).astype("f4")}}
    states = states if model == "gru" else {}
    batch = make_batch(4, 9, seed=5, reset_rows=reset_rows, choices=3, states=states)
    assert len(batch.final_rows) > 1
    assert batch.terminated.any()
    grads, aux = core.grads(state, collate([batch]))
    module = in_training(core, state, core._make_module)
    steps = slow_steps(module, batch)
    returns = slow_returns(batch, steps, core.config)
    losses = [
        0.5 * (returns[at] - step.inputs[int(batch.actions[at])]) ** 2 for at, step in steps.items()
    ]
    loss = torch.stack(losses).mean()
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    expected = torch.autograd.grad(loss, list(named.values()))
    found = core.flat.named(grads)
    assert aux.metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found.keys() == named.keys()
    for name, gradient in zip(named, expected, strict=True):
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_best_action_is_chosen_or_with_epsilon_any_that_is_legal(epsilon: float) -> None:
    masked = spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(3)})
    module = QNetwork(masked, THREE, {"hidden_sizes": [8]}).eval()
    module.epsilon.fill_(epsilon)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 1]], dtype=torch.int8)  # [B, n]
    at = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))  # [B, 4]
    batch = {"observations": {"at": at, "action_mask": mask}}
    with torch.no_grad():
        inputs = module.forward_exploration(batch)["action_dist_inputs"]  # [B, n]
        values = module.forward_inference(batch)["action_dist_inputs"]  # [B, n]
        outputs = module.forward_train(batch)
    shares = inputs.softmax(-1)  # [B, n]
    legal = mask / mask.sum(-1, keepdim=True)  # [B, n]
    best = torch.nn.functional.one_hot(values.argmax(-1), 3)  # [B, n]
    torch.testing.assert_close(shares, epsilon * legal + (1 - epsilon) * best, atol=1e-6, rtol=0)
    assert torch.equal(outputs["values"], values.max(-1).values)
    assert (outputs["values"].abs() < 100).all(), "an illegal action is never the best"


def test_what_it_cannot_train_is_refused() -> None:
    with pytest.raises(ValueError, match="ActorCritic has none"):
        make_pqn(module=ActorCritic)
    with pytest.raises(UnsupportedSpace, match="QNetwork acts in Discrete spaces"):
        QNetwork(VECTOR, spaces.Box(-1, 1, (2,)), {})
    for keys, said in (
        (
            {"exploration_epsilon": 1.5},
            "exploration_epsilon = 1.5: must be at least 0 and at most 1",
        ),
        ({"lambda_": -0.1}, "lambda_ = -0.1"),
        ({"epochs": 0}, "epochs = 0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            PqnConfig(**keys).validate()
