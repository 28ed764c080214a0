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
from juggler.learner.algorithms.registry import ALGORITHMS, build_learner
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


def bandit_batch(
    learner: Learner, make_batch: MakeBatch, reward: Callable[..., Any], seed: int
) -> EpisodeBatch:
    """Episodes of one step each, played by the learner's own policy."""
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
        rewards=np.asarray(reward(actions.numpy()), np.float32),
        live=np.ones(shape, bool),
        terminated=np.ones(shape, bool),
        truncated=np.zeros(shape, bool),
    )


def test_a_learner_finds_the_action_that_pays(make_batch: MakeBatch) -> None:
    learner = make_learner(spaces.Discrete(3, start=1), lr=0.02)
    before = policy_outputs(learner).softmax(-1)
    for seed in range(40):
        batch = bandit_batch(learner, make_batch, lambda actions: actions == 3, seed)
        learner.update_from_episodes([batch])
    assert before[2] < 0.5
    assert policy_outputs(learner).softmax(-1)[2] > 0.95


def test_a_learner_finds_the_torque_that_pays(make_batch: MakeBatch) -> None:
    learner = make_learner(spaces.Box(-1, 1, (1,), np.float32), lr=0.02)

    def reward(actions: np.ndarray) -> np.ndarray:
        return -np.square(actions[..., 0] - 0.8)

    for seed in range(80):
        learner.update_from_episodes([bandit_batch(learner, make_batch, reward, seed)])
    mean, log_std = policy_outputs(learner)
    assert abs(mean - 0.8) < 0.2
    assert log_std < -0.3  # and has become surer of it


def test_a_step_without_a_sample_takes_the_next_of_the_source(make_batch: MakeBatch) -> None:
    samples = [collate([make_batch(seed=seed)]) for seed in range(2)]
    given, sourced = make_learner(), make_learner()
    sourced.source = iter(samples)
    for sample in samples:
        assert fetch_metrics(given.step(sample)) == fetch_metrics(sourced.step())
    with pytest.raises(StopIteration):
        sourced.step()
    with pytest.raises(ValueError, match="needs a learner with a source"):
        given.step()


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


def without_weights(replay: dict[str, Any]) -> dict[str, Any]:
    """A replay's state cut in the middle: rows without their priorities."""
    kept = {name: x for name, x in replay["modules"]["default"].items() if name != "weights"}
    return {**replay, "modules": {"default": kept}}


@pytest.mark.parametrize(
    ("capacity", "damage", "said"),
    [
        (1000, lambda replay: {**replay, "format": np.array(3)}, "is of format 3"),
        (8, lambda replay: replay, "cannot continue in one of 8"),
        (1000, without_weights, "holds no replay table: KeyError"),
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


# The connectors that process batches before a learner's algorithm.


def piped_learner(seed: int = 0, reward_scale: float = 1.0, **connectors: Any) -> Learner:
    config = ImpalaConfig(reward_scale=reward_scale)
    model = {"hidden_sizes": [8]}
    return build_learner(config, None, VECTOR, TWO, model, connectors=connectors, seed=seed)


def with_context(batch: EpisodeBatch, **contexts: Any) -> EpisodeBatch:
    return replace(batch, states={"connectors": contexts})


def test_episodes_and_batches_go_through_the_pipeline_and_samples_do_not(
    make_batch: MakeBatch,
) -> None:
    piped = piped_learner(learner=[{"use": "scale_rewards", "factor": 0.5}])
    expected = fetch_metrics(piped_learner(reward_scale=0.5).update_from_episodes([make_batch()]))
    sample = piped.sample_from_episodes([make_batch()])
    np.testing.assert_array_equal(sample["rewards"], make_batch().rewards * 0.5)
    assert fetch_metrics(piped.step(sample)) == expected
    with pytest.raises(ValueError, match="no key 'learners': did you mean 'learner'"):
        build_learner(ImpalaConfig(), None, VECTOR, TWO, {}, connectors={"learners": []})

    class OfBatches(Impala):
        trains_on = frozenset({"batch"})

    core = OfBatches(piped.core._make_module, piped.config)
    of_batches = Learner(core, pipeline=piped.pipeline)
    found = of_batches.update_from_batch(collate([make_batch()]))
    assert fetch_metrics(found) == expected


def test_a_sample_with_whole_stacks_is_learned_from_as_one_with_each_frame_once(
    make_batch: MakeBatch,
) -> None:
    space = spaces.Box(0, 255, (36, 40, 2), np.uint8)
    config = {"algorithm": "dqn", "replay_begin": 4, "replay_batch_size": 8}
    connectors = {"env_to_module": [{"use": "frame_stack", "k": 3}]}
    learners = [
        build_learner(config, None, space, TWO, {"hidden_sizes": [8]}, connectors=connectors)
        for _ in range(2)
    ]
    seen = np.random.default_rng(0).integers(0, 200, (2, 7, *space.shape)).astype(space.dtype)
    batch = replace(
        make_batch(2, 4, ends=0.0),
        observations=seen[:, :4],
        last_observations=seen[:, 4],
        final_observations=seen[:0, 0],
    )
    batch = with_context(batch, frame_stack=seen[:, 5:])
    once = learners[0].sample_from_episodes([batch])
    assert "frames" in once
    learners[1].pipeline.frames_once = False
    whole = learners[1].sample_from_episodes([batch])
    learners[1].pipeline.keep_frames_once()
    found = [learners[0].step(once), learners[1].step(whole)]
    assert fetch_metrics(found[0]) == fetch_metrics(found[1])
    assert_same(learners[0].get_weights(), learners[1].get_weights())


def test_what_a_pipeline_has_learned_is_saved_and_restored(make_batch: MakeBatch) -> None:
    learner = piped_learner(learner=["normalize_rewards"])
    batches = [
        with_context(make_batch(seed=seed), discounted_returns=np.zeros(3, np.float32))
        for seed in range(4)
    ]
    for batch in batches[:2]:
        learner.update_from_episodes([batch])
    tree, extras = learner.save()
    saved: Any = tree["learner_pipelines"]
    kept = {name: x.copy() for name, x in saved["default"]["normalize_rewards"].items()}
    assert kept["count"] == sum(batch.live_steps for batch in batches[:2])
    expected = [fetch_metrics(learner.update_from_episodes([batch])) for batch in batches[2:]]
    assert saved["default"]["normalize_rewards"] == kept

    restored = piped_learner(seed=7, learner=["normalize_rewards"])
    restored.restore(tree, extras)
    found = [fetch_metrics(restored.update_from_episodes([batch])) for batch in batches[2:]]
    assert found == expected


def test_a_checkpoint_with_another_pipeline_is_refused_and_changes_nothing(
    make_batch: MakeBatch,
) -> None:
    plain, normalizing = piped_learner(), piped_learner(learner=["normalize_rewards"])
    before = normalizing.state
    with pytest.raises(
        StateMismatch, match="'learner_pipelines/normalize_rewards' is in the checkpoint"
    ):
        plain.restore(*normalizing.save())
    with pytest.raises(StateMismatch, match="'learner_pipelines/normalize_rewards' is here"):
        normalizing.restore(*plain.save())
    assert normalizing.state is before
    assert torch.equal(
        normalizing.pipeline.get_state()["normalize_rewards"]["count"],
        torch.zeros((), dtype=torch.float64),
    )


# Hyper-parameters that are out of range, but for those in `docs/errors.txt`.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lr": float("nan")}, "lr = nan: must be above 0 and finite"),
        ({"lr": float("inf")}, "lr = inf: must be above 0 and finite"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd' is not known"),
        ({"optimizer_epsilon": 0.0}, "optimizer_epsilon = 0.0: must be above 0"),
        ({"reward_scale": 0.0}, "reward_scale = 0.0: must be above 0"),
        ({"weights_interval": 7}, "weights_interval = 7 with"),
        ({"weights_dtype": "float16"}, "weights_dtype = 'float16' is not"),
        ({"value_coefficient": -1.0}, "value_coefficient = -1.0: must be"),
        ({"entropy_coefficient": -1.0}, "entropy_coefficient = -1.0: must"),
        ({"lr": [(1e-3, 1e-4)]}, "lr = .*: the step 0.001 .* must"),
        (
            {"entropy_coefficient": [(0, 0.1), (0.5, 0)]},
            r"entropy_.*: the step 0.5 .* whole number",
        ),
        ({"lr": [(-1, 0.1)]}, r"lr = .*: expected a number, or \[step, value\]"),
        ({"lr": [(0, -0.1)]}, "lr = .*: values must be at least"),
        (
            {"entropy_coefficient": [(0, float("nan"))]},
            "entropy_coefficient = .*: expected a number",
        ),
        ({"rho_bar_pg": 0.0}, "rho_bar_pg = 0.0: must be above 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ImpalaConfig(**wrong).validate()


@pytest.mark.parametrize(
    ("algorithm", "wrong", "said"),
    [
        ("appo", {"target_period": 0}, "target_period = 0: must be"),
        ("appo", {"buffer_batches": 0}, "buffer_batches = 0: must be"),
        ("appo", {"batch_uses": 0}, "batch_uses = 0: must be"),
        ("appo", {"clip": 0.0}, "clip = 0.0: must be"),
        ("appo", {"behaviour_clip": -1.0}, "behaviour_clip = -1.0: must be"),
        ("appo", {"kl_coefficient": 0.0}, "kl_coefficient = 0.0: must be"),
        ("appo", {"target_kl": -0.1}, "target_kl = -0.1: must be"),
        ("appo", {"target_kl": 0.1, "target_period": 1}, "target_kl = 0.1 with"),
        ("dqn", {"target_share": 1.5}, "target_share = 1.5: must be"),
        ("dqn", {"target_share": 0.0}, "target_share = 0.0: the target"),
        ("dqn", {"exploration_epsilon": [(0, 1.0), (10, 2.0)]}, "exploration_epsilon"),
        ("impala", {"replay_share": -0.1}, "replay_share = -0.1: must be"),
        ("impala", {"replay_capacity": 0}, "replay_capacity = 0: must be"),
        ("appo", {"replay_memory": 0}, "replay_memory = 0: must be"),
        ("ppo", {"minibatches": 4096}, "minibatches = 4096: must be"),
        ("ppo", {"clip": 0.0}, "clip = 0.0: must be"),
        ("ppo", {"value_clip": -1.0}, "value_clip = -1.0: must be"),
        ("ppo", {"target_kl": 0.0}, "target_kl = 0.0: must be"),
        ("sac", {"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        ("sac", {"temperature": 0.1, "target_entropy": -1.0}, ".* given is not learned"),
        ("td3", {"policy_period": 0}, "policy_period = 0: must be at least 1"),
        ("td3", {"exploration_noise": -0.1}, "exploration_noise = -0.1: must be"),
        ("td3", {"target_noise": -1.0}, "target_noise = -1.0: must be at least 0"),
        ("td3", {"target_noise_clip": -1.0}, "target_noise_clip = -1.0: must be"),
    ],
)
def test_a_value_out_of_range_of_an_algorithm_is_named(
    algorithm: str, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        ALGORITHMS[algorithm].config(**wrong).validate()


@pytest.mark.parametrize("algorithm", ["impala", "appo"])
def test_old_rows_need_room_for_a_whole_one(algorithm: str) -> None:
    config: Any = ALGORITHMS[algorithm].config
    with pytest.raises(ValueError, match="must be at least fragment_steps = 64"):
        config(replay_share=0.5, replay_capacity=63).validate_rows(64)


def test_what_is_in_range_passes() -> None:
    ImpalaConfig().validate()
    ImpalaConfig(grad_clip=None, optimizer="rmsprop", rho_bar=2.0, gamma=1.0).validate()
    ImpalaConfig(lr=[(0, 0.0), (10, 1e-3), (1e6, 0.0)], entropy_coefficient=0.0).validate()
