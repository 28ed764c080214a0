"""The Learner: its inputs, errors, saving, and learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.small_cores import copied, make_core, samples_of
from torch import Tensor

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.data.collate import collate
from juggler.learner.learner import Episodes, Learner
from juggler.runtime.checkpoints.checkpoint import REPLAY
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.testing import assert_same


def make_learner(
    action_space: gymnasium.Space[Any] = TWO, *, seed: int = 0, hidden: int = 8, **config: Any
) -> Learner:
    model = {"hidden_sizes": [hidden]}
    return build_learner(ImpalaConfig(**config), None, VECTOR, action_space, model, seed=seed)


def policy_outputs(learner: Learner) -> Tensor:
    """What the policy puts out for a fixed observation."""
    module = learner.core._make_module()
    strip_to_acting(module)
    module.load_state_dict(learner.get_params())
    with torch.no_grad():
        outputs = module.forward_inference({"observations": torch.ones(1, 4)})
    return outputs["action_dist_inputs"][0]


def bandit_batch(learner: Learner, make_batch: MakeBatch, seed: int) -> EpisodeBatch:
    """Episodes of one step each, in which action 3 pays, by the learner's own policy."""
    spec = learner.core._make_module().action_distribution()
    shape = (16, 8)
    noise = spec.draw_noise(shape, torch.Generator().manual_seed(seed))
    distribution = spec(policy_outputs(learner).expand(*shape, -1))
    actions = distribution.sample(noise)
    return make_batch(
        *shape,
        observations=np.ones((*shape, 4), np.float32),
        actions=actions.numpy(),
        action_logp=distribution.log_prob(actions).numpy(),
        rewards=(actions == 3).float().numpy(),
        live=np.ones(shape, bool),
        terminated=np.ones(shape, bool),
        truncated=np.zeros(shape, bool),
    )


def test_a_learner_finds_the_action_that_pays(make_batch: MakeBatch) -> None:
    learner = make_learner(spaces.Discrete(3, start=1), lr=0.02)
    before = policy_outputs(learner).softmax(-1)
    for seed in range(40):
        learner.update_from_episodes([bandit_batch(learner, make_batch, seed)])
    assert before[2] < 0.5
    assert policy_outputs(learner).softmax(-1)[2] > 0.95


def test_a_number_takes_the_place_of_a_schedule_until_it_is_taken_back(
    make_batch: MakeBatch,
) -> None:
    """The oracle is a learner that was made with that number."""
    samples = [collate([make_batch(seed=seed)]) for seed in range(3)]
    told, made = make_learner(lr=1e-3), make_learner(lr=1e-2)
    told.use_values({"lr": 1e-2})
    for learner in (told, made):
        assert fetch_metrics(learner.step(samples[0]))["lr"] == pytest.approx(1e-2)
    for name, weights in made.get_weights().items():  # type: ignore[union-attr]
        np.testing.assert_array_equal(told.get_weights()[name], weights)  # type: ignore[index, call-overload]
    told.use_values({"entropy_coefficient": 0.5})
    assert fetch_metrics(told.step(samples[1]))["lr"] == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="impala has no schedule 'gamma'"):
        told.use_values({"gamma": 0.5})
    told.use_values({})
    assert float(told.core.schedules["entropy_coefficient"](told.state["steps"])) == (
        pytest.approx(told.config.entropy_coefficient)
    )


def test_an_update_that_the_algorithm_does_not_serve_says_which_it_does(
    make_batch: MakeBatch,
) -> None:
    class OfEpisodes(Impala):
        trains_on = frozenset({"episodes"})

    make_module = make_learner().core._make_module
    learner = Learner(OfEpisodes(make_module, ImpalaConfig()))
    sample = collate([make_batch()])
    for asynchronous in (False, True):
        with pytest.raises(TypeError, match="does not serve update_from_batch"):
            learner.update_from_batch(sample, async_update=asynchronous)

    class OfBatches(Impala):
        trains_on = frozenset({"batch"})

    other = Learner(OfBatches(make_module, ImpalaConfig()))
    assert other.update_from_batch(sample)["skipped"] == 0
    with pytest.raises(TypeError, match="does not serve"):
        other.update_from_episodes([make_batch()])


def test_weights_are_the_parameters_that_acting_needs_as_arrays_by_name() -> None:
    learner = make_learner(spaces.Box(-1, 1, (3,)))
    acting = learner.core._make_module()
    strip_to_acting(acting)
    weights = learner.get_weights()
    assert weights.keys() == acting.state_dict().keys()
    parameters = learner.save()[0]["default"]["parameters"]
    assert len(parameters) > len(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(array, parameters[name])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"hidden": 16}, r"'parameters/encoder\S*weight' has"),
        ({"optimizer": "rmsprop"}, "'moments/mean' is here, and not"),
        ({"action_space": spaces.Box(-1, 1, (2,))}, r"'parameters/\S*log_std' is in the"),
    ],
)
def test_a_checkpoint_from_another_module_is_refused_and_changes_nothing(
    other: dict[str, Any], said: str
) -> None:
    tree, extras = make_learner(**other).save()
    learner = make_learner()
    before = learner.state
    with pytest.raises(StateMismatch, match=said):
        learner.restore(tree, extras)
    assert learner.state is before


def without_selection(replay: dict[str, Any]) -> dict[str, Any]:
    """A replay's state cut in the middle: rows without their priorities."""
    kept = {name: x for name, x in replay["modules"]["default"].items() if name != "selection"}
    return {**replay, "modules": {"default": kept}}


@pytest.mark.parametrize(
    ("capacity", "damage", "said"),
    [
        (1000, lambda replay: {**replay, "format": np.array(5)}, "is of format 5"),
        (8, lambda replay: replay, "cannot continue in one of 8"),
        (1000, without_selection, "holds no replay table: KeyError"),
    ],
)
def test_samples_that_cannot_be_kept_are_refused_and_leave_all_as_it_was(
    make_batch: MakeBatch, capacity: int, damage: Callable[[Any], Any], said: str
) -> None:
    def make(capacity: int) -> Learner:
        return Learner(make_core("dqn", replay_capacity=capacity), seed=1)

    one, other, fresh = make(1000), make(capacity), make(capacity)
    samples = samples_of(make_batch, 6)
    for sample in samples[:3]:
        one.step(sample)
    for each in (other, fresh):
        each.step(samples[3])
    tree, extras = one.save()
    before = copied(other.state)
    with pytest.raises(ValueError, match=said):
        other.restore({**tree, REPLAY: damage(tree[REPLAY])}, extras)
    assert other.updates == 1
    assert_same(other.state, before)
    for sample in samples[4:]:
        assert_same(other.step(sample), fresh.step(sample))


def test_a_checkpoint_with_something_else_in_a_place_is_refused() -> None:
    learner = make_learner()
    tree, extras = learner.save()
    own: Any = tree["default"]
    with pytest.raises(StateMismatch, match="algorithm 'ppo'"):
        learner.restore(tree, {**extras, "algorithm": "ppo"})
    with pytest.raises(StateMismatch, match="'parameters' is here, and not in"):
        learner.restore({}, extras)
    with pytest.raises(StateMismatch, match=r"'steps' is torch\.float"):
        learner.restore({"default": {**own, "steps": np.zeros((), np.float32)}}, extras)
    with pytest.raises(StateMismatch, match="'steps' is a branch"):
        learner.restore({"default": {**own, "steps": {}}}, extras)
    with pytest.raises(StateMismatch, match="'moments' is an array"):
        learner.restore({"default": {**own, "moments": np.zeros(1)}}, extras)


# NaN and infinity in what a script has a learner learn from: they reach no replay.


def with_one(batch: EpisodeBatch, column: str, at: tuple[int, ...], value: float) -> EpisodeBatch:
    array = getattr(batch, column).copy()
    array[at] = value
    return replace(batch, **{column: array})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("column", "at", "where"),
    [
        ("rewards", (1, 2), "row 1 at step 2"),
        ("action_logp", (0, 3), "row 0 at step 3"),
        ("observations", (2, 4, 1), "row 2 at step 4"),
        ("last_observations", (1, 0), "row 1 at step 5"),
    ],
)
def test_a_number_that_is_not_finite_is_named_before_a_replay_keeps_it(
    make_batch: MakeBatch, column: str, at: tuple[int, ...], where: str, value: float
) -> None:
    learner = Learner(make_core("dqn"))
    bad = with_one(make_batch(3, 6, ends=0.0), column, at, value)
    with pytest.raises(ValueError, match=f"^{column} in {where} are {value}: only finite"):
        learner.update_from_batch(bad.to_tree())
    with pytest.raises(ValueError, match=f"^{column} in row . of batch 1 at step"):
        learner.update_from_episodes([make_batch(3, 6), bad])
    with pytest.raises(ValueError, match="only finite numbers"):
        learner.update_from_episodes([bad], async_update=True).result(60)
    assert (learner.updates, learner.data.books()) == (0, {})
    for seed in range(3):
        metrics = fetch_metrics(learner.update_from_episodes([make_batch(3, 6, seed=seed)]))
        assert metrics["skipped"] == 0.0
    learner.close()


def test_a_hook_that_mends_episodes_comes_before_anybody_looks_at_them(
    make_batch: MakeBatch,
) -> None:
    class Mends(Learner):
        def preprocess_episodes(self, episodes: Episodes) -> Episodes:
            return [_mended(each) for each in episodes]

    bad = with_one(make_batch(3, 6, ends=0.0), "rewards", (1, 2), np.nan)
    other = make_learner()
    one = Mends(other.core)
    found = fetch_metrics(one.update_from_episodes([bad]))
    assert found == fetch_metrics(other.update_from_episodes([_mended(bad)]))


def _mended(batch: EpisodeBatch) -> EpisodeBatch:
    return replace(batch, rewards=np.nan_to_num(batch.rewards))
