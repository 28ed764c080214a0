"""DQN's loss against one written out in float64, and what its steps do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.float64 import Doubled

from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.pqn.config import PqnConfig
from juggler.learner.algorithms.pqn.core import Pqn
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.sequences import all_observations
from juggler.learner.core.transitions import rows_of_transitions, transitions
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.data.sources import NEW_STEPS
from juggler.learner.learner import Learner
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)


def make_core(module: Any = QNetwork, model: dict[str, Any] | None = None, **config: Any) -> Dqn:
    make = partial(module, VECTOR, TWO, model or {"hidden_sizes": [8]})
    return Dqn(make, DqnConfig(**config))


def slow_values(parameters: torch.Tensor, observation: torch.Tensor) -> np.ndarray:
    """Q(x, ·) [2] by the module itself in float64, for one observation."""
    module = Doubled(QNetwork(VECTOR, TWO, {"hidden_sizes": [8]}), parameters)
    with torch.no_grad():
        values: np.ndarray = module({"observations": observation[None]})["action_dist_inputs"][
            0
        ].numpy()
    return values


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
    """Each probability goes to the nearest return above and below, one after the other."""
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


def slow_logits(parameters: torch.Tensor, observation: torch.Tensor) -> np.ndarray:
    """The logits [2, K] by the module itself in float64, for one observation."""
    module = Doubled(QNetwork(VECTOR, TWO, ATOMS), parameters)
    with torch.no_grad():
        logits: np.ndarray = module({"observations": observation[None]})["return_logits"][0].numpy()
    return logits


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
        by_target = softmax(slow_logits(target, after))  # [2, K]
        chooser = softmax(slow_logits(own, after)) if double else by_target
        reward, discount = 0.7 * float(found.rewards[n, t]), float(found.discounts[n, t])
        best = (chooser @ returns).argmax()
        goal = slow_projection(by_target[best], reward, discount, returns)
        assert goal.sum() == pytest.approx(1.0)
        now = softmax(slow_logits(own, columns["observations"][n, t]))
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


def test_atoms_learn_how_often_each_return_comes() -> None:
    """One step that is worth -1 or 1, by chance: the mean alone would be 0."""
    core = make_core(model={**ATOMS, "v_min": -1.0, "v_max": 1.0, "atoms": 3}, lr=0.05)
    rng, count = np.random.default_rng(0), 400
    sample = {
        "observations": torch.zeros(count, 1, 4),
        "last_observations": torch.zeros(count, 4),
        "actions": torch.zeros(count, 1, dtype=torch.int64),
        "rewards": torch.from_numpy(np.where(rng.random((count, 1)) < 0.25, 1.0, -1.0)).float(),
        "discounts": torch.zeros(count, 1),
        "live": torch.ones(count, 1, dtype=torch.bool),
    }
    state = core.init(0)
    for _ in range(300):
        state = core.step(state, sample).state
    outputs = core.forward(state)({"observations": torch.zeros(1, 4)})
    shares = outputs["return_logits"][0, 0].softmax(-1).detach().numpy()  # [3]
    often = float((sample["rewards"] > 0).float().mean())
    np.testing.assert_allclose(shares, [1 - often, 0.0, often], atol=0.02)
    assert float(outputs["action_dist_inputs"][0, 0].detach()) == pytest.approx(
        2 * often - 1, abs=0.03
    )


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"atoms": 1}, "model.atoms must be 0, or an integer of at least 2, such as 51, not 1"),
        ({"atoms": 51, "v_min": 3.0, "v_max": 3.0}, r"model.v_min must be below v_max = 3\.0"),
        ({"atoms": 51, "v_max": "high"}, "model.v_max must be a finite number"),
        ({"atom": 51}, "model has no key 'atom': did you mean 'atoms'"),
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


def test_schedules_count_what_arrived_and_not_how_often_it_was_drawn(
    make_batch: MakeBatch,
) -> None:
    schedule = [(0.0, 1.0), (100.0, 0.0)]
    core = make_core(replay_begin=0, replay_batch_size=8, exploration_epsilon=schedule)
    learner = Learner(core)
    arrived, metrics = 0, {}
    for seed in range(3):
        batch = make_batch(4, 6, seed=seed)
        arrived += batch.live_steps
        metrics = fetch_metrics(learner.update_from_episodes([batch]))
    assert int(learner.state["steps"]) == arrived
    assert 1 - arrived / 100 < metrics["epsilon"] < 1 - (arrived - batch.live_steps) / 100 + 0.01


def test_an_update_before_the_replay_has_begun_changes_nothing(make_batch: MakeBatch) -> None:
    learner = Learner(make_core(replay_begin=1000))
    before = learner.get_weights()
    assert learner.update_from_episodes([make_batch(4, 6)]) == {}
    np.testing.assert_equal(learner.get_weights(), before)
    assert learner.updates == 1


@pytest.mark.parametrize(("alpha", "saved"), [(0.0, True), (0.6, True), (0.0, False)])
def test_a_restored_learner_goes_on_as_the_saved_one(
    make_batch: MakeBatch, alpha: float, saved: bool
) -> None:
    keys: dict[str, Any] = {"priority_exponent": alpha, "replay_capacity": 30, "replay_begin": 5}
    keys |= {"replay_batch_size": 8, "replay_ratio": 1.0, "save_replay": saved}
    one, other = (Learner(make_core(**keys), seed=seed) for seed in (0, 1))
    for seed in range(4):
        one.update_from_episodes([make_batch(4, 6, seed=seed)])
    one.forget()
    other.restore(*one.save())
    for seed in range(4, 8):
        for learner in (one, other):
            learner.update_from_episodes([make_batch(4, 6, seed=seed)])
    np.testing.assert_equal(one.get_weights(), other.get_weights())


@pytest.mark.parametrize("passes", [{}, {"num_epochs": 2, "minibatch_size": 3}])
def test_priorities_reach_the_replay_of_a_learner(
    make_batch: MakeBatch, passes: dict[str, Any]
) -> None:
    core = make_core(priority_exponent=1.0, replay_batch_size=8, replay_begin=0, replay_ratio=8.0)
    learner = Learner(core)
    learner.update_from_episodes([make_batch(4, 6)], **passes)
    tree, _ = learner.save()
    replay: Any = tree["replay"]
    assert len(np.unique(replay["modules"]["default"]["selection"]["weights"])) > 4


def test_a_module_with_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave out model\.recurrent, or take another"):
        make_core(model={"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 8})


def test_a_module_that_no_learner_can_have_explore_is_refused() -> None:
    with pytest.raises(ValueError, match="dqn needs a module with a buffer 'epsilon'"):
        make_core(module=ActorCritic)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"replay_selector": "fifo", "replay_ratio": 32.0},
            "set max_times_sampled to 1 or more, after which it leaves, and replay_ratio, which is "
            "32, to that or less",
        ),
        ({"replay_ratio": 0}, "replay_ratio = 0: must be above 0"),
        ({"replay_begin": 200_000}, "so many steps are never kept; set it to 100000 or less"),
        ({"target_share": 1.5}, "target_share = 1.5: must be"),
        ({"target_share": 0.0}, "target_share = 0.0: the target network would never move"),
        ({"exploration_epsilon": [(0, 1.0), (10, 2.0)]}, "exploration_epsilon"),
        ({"n_step": 0}, "n_step = 0: must be at least 1"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DqnConfig(**keys).validate()


def test_new_steps_are_told_once(make_batch: MakeBatch) -> None:
    core = make_core(replay_batch_size=4, replay_begin=0)
    batch = make_batch(4, 6)
    drawn = list(core.data_source().add(collate([batch])))
    told = [int(each[NEW_STEPS]) for each in drawn]
    assert told[0] == batch.live_steps
    assert not any(told[1:])
