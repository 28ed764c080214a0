"""Fragments hold what happened, in trees and behind connectors too."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from support import vectors
from support.scripted_environments import (
    AsTrees,
    NativeAsTrees,
    NativeScripted,
    NotFinite,
    Scripted,
)
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import KINDS, MODES, assert_recorded, seeds_of, vector_of, vector_of_functions

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.seeding import seed_process
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.sampler import Fragment, Sampler
from juggler.envrunner.together import EpisodeIds, Segments, Together, running_episodes
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.connectors.pipelines import (
    EnvToModule,
    build_runner_pipelines,
)
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.trees import flatten

STEPS = 4
# Over 12 fragments of 4 steps, every kind of end falls on the first, a middle and the last step.
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


def scripted_vector(
    kind: str, mode: AutoresetMode, scripts=SCRIPTS, box: bool = False
) -> VectorEnv:
    return vectors.vector_of(kind, mode, scripts, box)


def sampler_of(env: VectorEnv, steps: int = STEPS, seed: int = 5) -> Sampler:
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    return Sampler(env, Actor(module, env.num_envs, steps, 0), steps, seed)


@pytest.fixture(params=[(kind, mode) for kind in KINDS for mode in MODES])
def kind_and_env(request: pytest.FixtureRequest) -> Iterator[tuple[str, VectorEnv]]:
    kind, mode = request.param
    env = scripted_vector(kind, mode)
    yield kind, env
    env.close()


def test_fragments_hold_what_a_slow_loop_over_single_environments_records(kind_and_env) -> None:
    kind, env = kind_and_env
    sampler = sampler_of(env)
    fragments = [sampler.sample((3, f)) for f in range(12)]
    seen = assert_recorded(fragments, SCRIPTS, seeds_of(kind, 5, len(SCRIPTS)))
    ends, places = ("terminated", "truncated", "both"), ("first", "middle", "last")
    assert seen == {(end, place) for end in ends for place in places}
    dead = any(not f.batch.live.all() for f in fragments)
    assert dead == (env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP)
    for update, fragment in enumerate(fragments):
        assert (fragment.batch.segment_generations == 3).all()
        assert (fragment.batch.segment_updates == update).all()


def with_one(bad: Scripted, mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Sampler:
    return sampler_of(vectors.vector_of_functions("sync", mode, [Scripted, lambda: bad]))


@pytest.mark.parametrize(
    ("at", "column", "found", "step"),
    [
        (
            2,
            "observations",
            "observations",
            "at step 2",
        ),
        (4, "observations", "observations", "after step 3"),
        (3, "rewards", "rewards", "at step 2"),
    ],
)
def test_a_number_that_is_not_finite_is_named(at, column, found, step) -> None:
    sampler = with_one(NotFinite(at, column))
    with pytest.raises(NonFiniteBatch, match=f"{found} of environment 1 {step} of") as caught:
        sampler.sample((0, 0))
    assert caught.value.live_steps == 2 * STEPS
    with pytest.raises(RuntimeError, match="call reset first"):
        sampler.sample((0, 0))
    sampler.reset(0)  # its second episode is sound
    assert sampler.sample((0, 0)).batch.live_steps == 2 * STEPS


def test_a_reward_so_large_that_a_return_may_not_be_finite_is_named() -> None:
    sampler = with_one(NotFinite(3, "rewards", reward=-3e38))
    told = "rewards of environment 1 at step 2 of its episode are -3.* scale rewards to at most 1e"
    with pytest.raises(NonFiniteBatch, match=told):
        sampler.sample((0, 0))
    sampler.reset(0)
    assert sampler.sample((0, 0)).batch.live_steps == 2 * STEPS
    later = with_one(NotFinite(STEPS + 3, "rewards", reward=-3e38))
    later.sample((0, 0))
    with pytest.raises(NonFiniteBatch) as caught:  # in the second fragment, of the first episode
        later.sample((0, 0))
    assert (caught.value.step, caught.value.episode_step) == (2, STEPS + 2)
    most = with_one(NotFinite(3, "rewards", reward=MOST_REWARD)).sample((0, 0)).batch
    assert most.rewards[1, 2] == MOST_REWARD


@pytest.mark.parametrize("mode", MODES)
def test_a_truncated_episode_must_leave_a_finite_observation_to_bootstrap_from(mode) -> None:
    sampler = with_one(NotFinite(2, script=((2, "truncated"),)), mode)
    with pytest.raises(NonFiniteBatch) as caught:
        sampler.sample((0, 0))
    assert (caught.value.environment, caught.value.column) == (1, "final_observations")
    assert caught.value.step == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [2, STEPS])
def test_a_simulator_may_end_an_episode_because_its_state_is_not_finite(mode, length) -> None:
    sampler = with_one(NotFinite(length, script=((length, "terminated"),)), mode)
    for _ in range(2):
        batch = sampler.sample((0, 0)).batch
        for column in (batch.observations, batch.last_observations, batch.action_logp):
            assert np.isfinite(column).all()


def test_broken_weights_are_not_blamed_on_the_environment() -> None:
    env = scripted_vector("sync", AutoresetMode.SAME_STEP)
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    module.weight.fill_(torch.nan)
    sampler = Sampler(env, Actor(module, 3, STEPS, 0), STEPS, 0)
    with pytest.raises(
        NonFiniteBatch, match=r"weights are broken \(output 0 .* is nan\)"
    ) as caught:
        sampler.sample((0, 0))
    assert caught.value.column == "action_logp"


def test_same_step_autoreset_without_final_observations_is_refused() -> None:
    class Forgetful(NativeScripted):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    sampler = sampler_of(Forgetful([((2, "truncated"),)], AutoresetMode.SAME_STEP))
    with pytest.raises(EnvironmentFailed, match="final_obs"):
        sampler.sample((0, 0))
    of_one = LastShown(np.zeros((1, 3), np.float32), "truncated")
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* without"):
        sampler_of(of_one).sample((0, 0))


class LastShown(NativeScripted):
    """Gives what it is told to as last observations of two environments."""

    def __init__(self, finals: Any, end: str) -> None:
        super().__init__([((2, end),)] * 2, AutoresetMode.SAME_STEP)
        self.finals = finals

    def step(self, actions):
        *results, infos = super().step(actions)
        return *results, {"final_obs": self.finals} if infos else {}


def second_shows(last: Any) -> NDArray[Any]:
    finals = np.empty(2, object)
    finals[:] = [np.ones(3, np.float32), last]
    return finals


@pytest.mark.parametrize(
    ("finals", "words"),
    [
        (second_shows(np.zeros(1)), r"is float64 of shape \[1\], but"),
        (second_shows(np.full(3, 2j)), r"is complex128 of shape \[3\]"),
        (second_shows([1, 2]), r"is int64 of shape \[2\]"),
        (np.zeros((2, 1), np.float32), r"is float32 of shape \[1\]"),
    ],
)
def test_a_last_observation_is_held_to_its_space_as_all_others_are(finals, words) -> None:
    where = "environment [01] failed in step: at the end of a truncated episode, "
    with pytest.raises(EnvironmentFailed, match=f"{where}its observation {words}"):
        sampler_of(LastShown(finals, "truncated")).sample((0, 0))
    batch = sampler_of(LastShown(finals, "terminated")).sample((0, 0)).batch
    assert not len(batch.final_rows), "it is never read"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (np.zeros((1, 2), int), r"at 'count' is int64 of shape \[2\]"),
        (np.array([0.7]), r"at 'count' is float64 of shape \[\]"),
        (np.zeros(0, int), "has other parts than Dict.*IndexError"),
        (None, "has other parts than"),
    ],
)
def test_a_part_of_last_observations_that_does_not_fit_is_told(count: Any, words: str) -> None:
    class Parts(NativeAsTrees):
        def step(self, actions):
            *results, infos = super().step(actions)
            if finals := infos.pop("final_obs", None):
                del finals["count"]
                more = {} if count is None else {"count": count}
                infos["final_obs"] = {**finals, **more}
            return *results, infos

    def sampler_that(end: str) -> Sampler:
        return sampler_of(Parts(NativeScripted([((2, end),)], AutoresetMode.SAME_STEP)))

    with pytest.raises(EnvironmentFailed, match=f"environment 0 .* its observation {words}"):
        sampler_that("truncated").sample((0, 0))
    sampler_that("terminated").sample((0, 0))


def test_a_fragment_says_where_its_time_went() -> None:
    fragment = sampler_of(scripted_vector("sync", AutoresetMode.SAME_STEP)).sample((0, 0))
    assert set(fragment.seconds) == {"environment", "inference", "connectors", "frames"}
    assert all(seconds > 0 for seconds in fragment.seconds.values())


def booked(
    running: dict[str, NDArray[Any]], ids: EpisodeIds, rewards, terminated, live
) -> tuple[Segments, list[float], list[int]]:
    columns = Together(None, *np.shape(rewards))
    columns.rewards[:], columns.terminated[:], columns.live[:] = rewards, terminated, live
    columns.step = columns.live.shape[1]
    ended = columns.book(running, ids)
    (segments,) = columns.segments
    return segments, *ended


def test_returns_are_summed_in_double_precision_across_fragments() -> None:
    running, ids = running_episodes(1), EpisodeIds()
    large, small = np.float32(2**24), np.float32(1)  # whose float32 sum is the large one
    rewards = np.array([[large, small, small, small]])
    first, returns, _ = booked(running, ids, rewards, False, True)
    assert len(returns) == 0
    done = np.array([[False, False, False, True]])
    second, returns, lengths = booked(running, ids, rewards, done, True)
    assert returns == [2**25 + 6]
    assert lengths == [8]
    assert second.offsets.tolist() == [4]
    assert second.episodes.tolist() == first.episodes.tolist()


def test_a_fragment_of_nothing_but_resets_has_no_segments() -> None:
    running, ids = running_episodes(2), EpisodeIds()
    ended, *_ = booked(running, ids, np.ones((2, 1)), True, True)
    segments, returns, _ = booked(running, ids, np.zeros((2, 1)), False, False)
    assert len(segments.rows) == len(returns) == 0
    after, *_ = booked(running, ids, np.ones((2, 1)), False, True)
    assert not set(after.episodes) & set(ended.episodes)
    assert after.offsets.tolist() == [0, 0]


# A reset sampler does the same as a new one.


BEGINNING_ANEW_STEPS = 7
SHORT = {"env": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 10}}
CONFIGS = [
    {"env": "CartPole-v1"},  # a vector of its own
    *({"mode": mode} for mode in AutoresetMode),
    SHORT,
    {**SHORT, "vectorize": "async"},
]


def sampler_anew(config: dict[str, Any], seed: int) -> Sampler:
    factory = None
    if "mode" in config:
        make = functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=10)
        factory = functools.partial(SyncVectorEnv, [make] * 3, autoreset_mode=config["mode"])
    given = {key: value for key, value in config.items() if key != "mode"}
    env = make_vector_env(EnvRunnerConfig(envs_per_runner=3, **given), factory)
    pieces = ["mean_std_filter", "previous_actions_and_rewards"]
    connectors = ConnectorsConfig(env_to_module=pieces, learner=["normalize_rewards"])
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, env.single_observation_space, env.single_action_space
    )
    torch.manual_seed(0)
    model = {"recurrent": "lstm", "recurrent_size": 4}
    spaces = env_to_module.module_observation_space, module_to_env.action_space
    module = build_module(None, *spaces, model)
    policy = Actor(module, env.num_envs, BEGINNING_ANEW_STEPS, seed, module_to_env, env_to_module)
    return Sampler(env, policy, BEGINNING_ANEW_STEPS, seed)


def arrays_of(fragment: Fragment) -> dict[str, Any]:
    """Without the ids of episodes, which are never given twice."""
    arrays = {"/".join(path): array for path, array in flatten(fragment.batch.to_tree())}
    del arrays["segment_episodes"]
    return arrays


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_fragments_behind_a_reset_are_those_of_a_new_sampler(config: dict[str, Any]) -> None:
    used, new = sampler_anew(config, 1), sampler_anew(config, 9)
    for _ in range(4):
        used.sample((0, 0))
    used.reset(9)
    ended = 0
    for _ in range(4):
        mine, expected = used.sample((0, 0)), new.sample((0, 0))
        assert arrays_of(mine).keys() == arrays_of(expected).keys()
        for name, array in arrays_of(expected).items():
            np.testing.assert_array_equal(arrays_of(mine)[name], array, err_msg=name)
        assert mine.episode_returns == expected.episode_returns
        assert mine.episode_lengths == expected.episode_lengths
        ended += len(mine.episode_returns)
    assert ended > 0
    for sampler in (used, new):
        sampler._env.close()


def test_a_seed_of_the_process_reaches_all_global_generators() -> None:
    def numbers(seed: int) -> tuple[float, float, float]:
        seed_process(seed)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert numbers(2**64 - 1) == numbers(2**64 - 1)
    assert not set(numbers(1)) & set(numbers(2))


# Observations and actions in Dicts and Tuples are sampled alike.


def policy_of(module: RLModule, rows: int = 3) -> Actor:
    return Actor(module, rows, STEPS, 0)


def test_a_number_that_is_not_finite_is_named_with_its_place_in_the_tree() -> None:
    class Broken(AsTrees):
        def step(self, action):
            observation, *rest = super().step(action)
            if self.unwrapped.steps == 2:
                observation["floats"][1]["state"][:] = np.nan
            return observation, *rest

    script = ((9, "terminated"),)
    functions = [lambda: AsTrees(Scripted(script)), lambda: Broken(Scripted(script))]
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, functions)
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    sampler = Sampler(env, policy_of(module, rows=2), STEPS, 5)
    with pytest.raises(
        NonFiniteBatch, match=r"^observations/floats/1/state of environment 1 at step 2"
    ):
        sampler.sample((0, 0))


# Sampling with connectors between environments and policy, in every autoreset mode.


FRAGMENT = 5
ROWS = len(SCRIPTS)


class Infinite(Scripted):
    """Shows an infinite number first, after two steps."""

    def __init__(self) -> None:
        super().__init__(((9, "both"),))

    def observation(self):
        observation = super().observation()
        if self.steps == 2:
            observation[0] = np.inf
        return observation


class Idle(RLModule):
    """Acts the same for every observation."""

    def _forward(self, batch):
        observations = batch["observations"]
        rows = len(observations if isinstance(observations, torch.Tensor) else observations["x"])
        if isinstance(self.action_space, spaces.Box):
            return {"actions": torch.full((rows, *self.action_space.shape), 0.5)}
        return {"actions": torch.ones(rows, dtype=torch.int64)}


def connected(
    env: VectorEnv[Any, Any, Any], module: Any = None, **pieces: Any
) -> tuple[Sampler, EnvToModule, Actor]:
    """A sampler with connectors, and a given or default module."""
    config = ConnectorsConfig(**pieces)
    spaces_ = env.single_observation_space, env.single_action_space
    env_to_module, module_to_env = build_runner_pipelines(config, *spaces_)
    torch.manual_seed(0)
    seen, acted = env_to_module.module_observation_space, module_to_env.action_space
    built = build_module(module, seen, acted, {})
    policy = Actor(built, env.num_envs, FRAGMENT, 0, module_to_env, env_to_module)
    return Sampler(env, policy, FRAGMENT, 7), env_to_module, policy


@pytest.mark.parametrize("kind", ["in turn", "native", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_every_column_of_observations_is_what_the_connectors_make(kind: str, mode) -> None:
    plain_env, env = vector_of(kind, mode, SCRIPTS), vector_of(kind, mode, SCRIPTS)
    plain, _, _ = connected(plain_env, Idle)
    filtered, connectors, _ = connected(env, Idle, env_to_module=["mean_std_filter"])
    for fragment in range(6):
        expected, found = plain.sample((0, 0)), filtered.sample((0, 0))
        for name in ("observations", "last_observations", "final_observations"):
            raw, made = getattr(expected.batch, name), getattr(found.batch, name)
            np.testing.assert_array_equal(made, connectors(raw))
            assert made.dtype == np.float32
        assert expected.connector_delta == {}
        delta = Moments.from_tree(found.connector_delta["mean_std_filter"])
        seen = Moments.of(expected.batch.observations[expected.batch.live])
        assert delta.count == expected.batch.live_steps
        np.testing.assert_allclose(delta.mean, seen.mean)
        np.testing.assert_allclose(delta.m2, seen.m2)
        if fragment == 2:
            connectors.set_state(found.connector_delta)
    assert not np.array_equal(expected.batch.observations, found.batch.observations)
    plain_env.close()
    env.close()


def test_batches_hold_what_the_policy_chose_and_environments_get_what_connectors_make() -> None:
    env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS, box=True)
    got: list[np.ndarray] = []
    step = env.step
    env.step = lambda actions: (got.append(actions), step(actions))[1]
    sampler, _, policy = connected(env, Idle, module_to_env=["rescale_actions"])
    batch = sampler.sample((0, 0)).batch
    assert (batch.actions == 0.5).all()
    assert len(got) == FRAGMENT
    assert all((actions == 0.25).all() for actions in got)  # the bounds are -0.5 and 0.5
    got.clear()
    evaluate(env, policy, ROWS, 0)
    assert all((actions == 0.25).all() for actions in got)
    env.close()


def test_an_evaluation_shows_the_policy_what_sampling_does_and_learns_nothing() -> None:
    env = vector_of("in turn", AutoresetMode.NEXT_STEP, SCRIPTS)
    pieces = ["mean_std_filter", {"use": "frame_stack", "k": 2}]
    sampler, connectors, policy = connected(env, env_to_module=pieces)
    connectors.set_state(sampler.sample((0, 0)).connector_delta)
    seen: list[np.ndarray] = []
    infer = policy._acting.infer
    firsts: list[np.ndarray] = []
    act = policy.act
    policy.act = lambda *given, first, **kept: (
        firsts.append(first.copy()),
        act(*given, first=first, **kept),
    )[1]
    policy._acting.infer = lambda observations, states: (
        seen.append((observations.copy(), firsts[-1])),
        infer(observations, states),
    )[1]
    evaluate(env, policy, 6, 3)
    env.close()
    assert connectors.take_delta(np.zeros((ROWS, 0), np.bool_))["mean_std_filter"]["count"] == 0
    last = np.zeros((ROWS, 3), np.float32)
    for stacks, first in seen:
        before, now = stacks[:, :3], stacks[:, 3:]
        np.testing.assert_array_equal(before, np.where(first[:, None], now, last))
        last = now
    assert max(stacks.max() for stacks, _ in seen) == 10  # as the filter clips; steps count to 30


def test_an_infinite_observation_is_found_though_the_filter_clips_it() -> None:
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, [Scripted, Infinite])
    sampler, _, _ = connected(env, Idle, env_to_module=["mean_std_filter"])
    with pytest.raises(NonFiniteBatch) as found:
        sampler.sample((0, 0))
    error = found.value
    assert (error.environment, error.step, error.column) == (1, 2, "observations")
    assert error.live_steps == 2 * FRAGMENT
    sampler.reset(0)
    env.close()


def test_a_reset_starts_with_contexts_and_watches_of_its_own() -> None:
    env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS)
    pieces = ["mean_std_filter", {"use": "frame_stack", "k": 2}]
    sampler, _, _ = connected(env, Idle, env_to_module=pieces)
    first = sampler.sample((0, 0))
    step = env.step
    env.step = lambda actions: 1 / 0  # it fails in the middle of a fragment
    with pytest.raises(ZeroDivisionError):
        sampler.sample((0, 0))
    env.step = step
    sampler.reset(7)
    fragment = sampler.sample((0, 0))
    count = fragment.connector_delta["mean_std_filter"]["count"]
    assert count == ROWS * FRAGMENT == fragment.batch.live_steps
    context = fragment.batch.states["connectors"]["frame_stack"]
    np.testing.assert_array_equal(context[:, 0], fragment.batch.observations[:, 0])
    assert first.batch.states["connectors"]["frame_stack"].shape == (ROWS, 1, 3)
    env.close()


# The state of a recurrent module, from step to step, fragment to fragment, episode to episode.


RECURRENT_SAMPLING_STEPS = 4


def test_states_at_the_start_of_rows_outlive_a_module_that_writes_into_its_own() -> None:
    class InPlace(Summing):
        def _forward(self, batch):
            outputs = super()._forward(batch)
            state = batch["states"]["sum"]["of"]
            state.copy_(outputs["states"]["sum"]["of"])
            return {**outputs, "states": batch["states"]}

    def states(kind) -> list[np.ndarray]:
        env = vector_of("in turn", AutoresetMode.SAME_STEP, SCRIPTS)
        module = kind(env.single_observation_space, env.single_action_space)
        sampler = Sampler(
            env, Actor(module, 3, RECURRENT_SAMPLING_STEPS, 0), RECURRENT_SAMPLING_STEPS, 5
        )
        batches = [sampler.sample((0, 0)).batch for _ in range(4)]
        return [batch.states["module"]["sum"]["of"] for batch in batches]

    np.testing.assert_array_equal(states(InPlace), states(Summing))


def test_an_initial_state_that_is_learned_comes_with_the_weights() -> None:
    class Learned(LinearPolicy):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.initial = torch.nn.Parameter(torch.zeros(2))

        def get_initial_state(self):
            return {"h": self.initial}

        def _forward(self, batch):
            return {**super()._forward(batch), "states": batch["states"]}

    env = vector_of("in turn", AutoresetMode.SAME_STEP, [((2, "terminated"),), ((9, "truncated"),)])
    module = Learned(env.single_observation_space, env.single_action_space)
    policy = Actor(module, 2, RECURRENT_SAMPLING_STEPS, 0)
    sampler = Sampler(env, policy, RECURRENT_SAMPLING_STEPS, 5)
    assert not sampler.sample((0, 0)).batch.states["module"]["h"].any()
    weights = {"initial": np.array([3, 4], np.float32), "weight": module.weight.numpy()}
    policy.load(weights)
    # Both episodes that begin the next rows: one starts there, the other one began before.
    assert sampler.sample((0, 0)).batch.states["module"]["h"].tolist() == [[3, 4], [0, 0]]


# CartPole with hidden velocities is CartPole in everything but what is seen.


NAME = "juggler.envrunner.memory_cartpole:MemoryCartPole-v0"


@pytest.mark.parametrize("vectorize", ["native", "sync"])
def test_its_episodes_are_those_of_cartpole_without_the_velocities(vectorize: str) -> None:
    hidden, plain = (
        make_vector_env(EnvRunnerConfig(env=env, envs_per_runner=3, vectorize=vectorize))  # type: ignore[arg-type]
        for env in (NAME, "CartPole-v1")
    )
    seen, _ = hidden.reset(seed=3)
    everything, _ = plain.reset(seed=3)
    assert hidden.single_observation_space.shape == (2,)
    ends = 0
    for step in range(60):
        np.testing.assert_array_equal(seen, everything[:, ::2])
        assert hidden.observation_space.contains(seen)
        actions = np.full(3, step // 2 % 3 == 0, np.int64)  # [3]
        seen, *rest, _ = hidden.step(actions)
        everything, *others, _ = plain.step(actions)
        for mine, theirs in zip(rest, others, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        ends += int(rest[1].sum())
    assert ends > 0
    hidden.close()
    plain.close()
