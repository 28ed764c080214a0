from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from support import vectors
from support.scripted_environments import NotFinite, Scripted
from support.scripted_modules import LinearPolicy, Summing
from support.vectors import KINDS, MODES, seeds_of, vector_of_functions

from juggler.envrunner.evaluation import Goal, evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.frozen_weights import load_tree
from juggler.envrunner.info_numbers import (
    MOST_NAMES,
    InfoNumber,
    InfoWatch,
    from_messages,
    to_messages,
)
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.weights import WEIGHTS
from juggler.runtime.modules.module_specs import build_module

# The first environment's episodes are short, and the last one's long.
SCRIPTS = [
    ((1, "terminated"), (2, "truncated")),
    ((6, "truncated"), (3, "both")),
    ((40, "terminated"),),
]


def vector_of(kind: str, mode: AutoresetMode) -> VectorEnv:
    return vectors.vector_of(kind, mode, SCRIPTS)


def policy_of(rows: int, kind=LinearPolicy) -> Actor:
    env = Scripted()
    module = kind(env.observation_space, env.action_space)
    return Actor(module, rows, 1, 0)


def reference(script, seed: int, episodes: int, kind=LinearPolicy) -> list[tuple[float, int]]:
    """One environment, played alone."""
    env, policy = Scripted(script), policy_of(1, kind)
    played = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=None if episode else seed)
        total, steps, over = 0.0, 0, False
        while not over:
            first = np.array([steps == 0]) if policy.remembers else None
            action = policy.act(observation[None], first=first, explore=False).sent[0]
            observation, reward, terminated, truncated, _ = env.step(action)
            total, steps, over = total + reward, steps + 1, terminated or truncated
        played.append((total, steps))
    return played


def test_actions_are_drawn_as_in_training_if_asked_for() -> None:
    greedy, drawn, again = (
        evaluate(vector_of(KINDS[0], MODES[0]), policy_of(3), 8, 2, explore=explore).returns
        for explore in (False, True, True)
    )
    assert greedy != drawn == again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [LinearPolicy, Summing])
def test_every_environment_plays_its_share_of_whole_episodes(kind, mode, module) -> None:
    env = vector_of(kind, mode)
    returns, lengths, _ = evaluate(env, policy_of(3, module), episodes=8, seed=2)
    env.close()
    seeds = seeds_of(kind, 2, 3)
    expected = [
        episode
        for script, seed, share in zip(SCRIPTS, seeds, (3, 3, 2), strict=True)
        for episode in reference(script, seed, share, module)
    ]
    assert lengths == [1, 2, 1, 6, 3, 6, 40, 40]
    assert lengths == [length for _, length in expected]
    np.testing.assert_allclose(returns, [total for total, _ in expected])


@pytest.mark.parametrize(
    ("reward", "words"), [({}, "is nan"), ({"reward": 1e39}, r"is 1e\+39: scale rewards")]
)
def test_an_episode_whose_return_is_not_finite_in_float32_is_an_error(
    reward: dict[str, float], words: str
) -> None:
    bad = NotFinite(1, "rewards", ((2, "terminated"),), **reward)
    env = SyncVectorEnv([Scripted, lambda: bad], copy=False)
    with pytest.raises(EnvironmentFailed, match=f"environment 1 .* {words}"):
        evaluate(env, policy_of(2), episodes=2, seed=0)


def test_fewer_episodes_than_environments_are_played_by_the_first_ones() -> None:
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    assert evaluate(env, policy_of(3), episodes=2, seed=0)[1] == [1, 6]


def test_an_evaluation_does_not_depend_on_what_was_played_before() -> None:
    env = vector_of("native", AutoresetMode.NEXT_STEP)
    first = evaluate(env, policy_of(3), episodes=3, seed=4)
    for single in env.envs:
        single.episode = -1
    assert evaluate(env, policy_of(3), episodes=3, seed=4) == first
    for single in env.envs:
        single.episode = -1
    assert evaluate(env, policy_of(3), episodes=3, seed=5) != first


@pytest.mark.parametrize(
    ("returns", "best", "out"),
    [
        ([], 10.0, False),
        ([0.0], 10.0, False),  # 9 each of the other nine
        ([0.0, 0.0], 10.0, True),
        ([0.0, 30.0], 10.0, False),  # there are better ones than was known
        ([-1.0] * 9, 10.0, True),
        ([9.0] * 10, 10.0, False),
    ],
)
def test_a_goal_is_out_of_reach_when_the_best_episodes_would_not_get_there(
    returns: list[float], best: float, out: bool
) -> None:
    assert Goal(9.0, best).out_of_reach(returns, 10) is out


def test_an_evaluation_ends_when_its_goal_is_out_of_reach() -> None:
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    whole = evaluate(env, policy_of(3), episodes=30, seed=0)[0]
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    goal = Goal(sum(whole) / len(whole) - 0.1, max(whole))
    assert evaluate(env, policy_of(3), episodes=30, seed=0, goal=goal)[0] == whole
    env = vector_of("sync", AutoresetMode.SAME_STEP)
    hopeless = evaluate(env, policy_of(3), episodes=30, seed=0, goal=Goal(1e9, 1.0))[0]
    assert hopeless == whole[:1]


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_without_an_end_counts_as_it_is_after_the_most_steps(mode) -> None:
    env = vectors.vector_of("sync", mode, [((1000, "terminated"),), ((2, "terminated"),)])
    returns, lengths, _ = evaluate(env, policy_of(2), episodes=6, seed=0, most_steps=7)
    assert lengths == [7, 7, 7, 2, 2, 2]
    alone = vectors.vector_of("sync", mode, [((7, "terminated"),), ((2, "terminated"),)])
    assert returns[0] == evaluate(alone, policy_of(2), episodes=2, seed=0)[0][0]


def test_a_checkpoint_that_lacks_weights_of_a_module_is_told() -> None:
    policy = policy_of(1)
    lacks: Any = {WEIGHTS: {}, CONNECTORS: {}}
    with pytest.raises(ValueError, match="'default' is another module's: it has no ") as told:
        load_tree("default", lacks, policy)
    assert all(name in str(told.value) for name in policy.names)


# Numbers of infos over episodes, whichever way environments reset and fragments cut.


LENGTHS = (3, 1, 5, 2)


class Told(gymnasium.Env[Any, Any]):
    """Episodes of known lengths, with the step number in infos."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, offset: int, integers: bool = False) -> None:
        self._offset, self._episode, self._integers = offset, -1, integers

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._episode, self._step = self._episode + 1, 0
        return np.zeros(1, np.float32), {"step": 1000.0, "success": 7.0, "name": "a reset"}

    def step(self, action: Any) -> Any:
        self._step += 1
        length = LENGTHS[(self._episode + self._offset) % len(LENGTHS)]
        over = self._step == length
        infos: dict[str, Any] = {"step": float(self._step), "name": "text", "far": [1.0, 2.0]}
        infos |= {"broken": float("nan"), "huge": -1e308}
        if self._integers:
            infos |= {"endless": 10**400, 7: 1.0}
        if over and length > 1:
            infos["success"] = length == 5
        cut = over and length == 2
        return np.zeros(1, np.float32), 1.0, over and not cut, cut, infos


def expected(lengths: list[int]) -> tuple[list[InfoNumber], list[InfoNumber]]:
    steps = [InfoNumber((1 + length) / 2, 1.0, float(length)) for length in lengths]
    return steps, [InfoNumber(*[float(length == 5)] * 3) for length in lengths if length > 1]


@pytest.mark.parametrize(
    ("mode", "ours"), [(AutoresetMode.SAME_STEP, True), *((mode, False) for mode in AutoresetMode)]
)
@pytest.mark.parametrize("fragment", [1, 4, 50])
def test_each_episode_tells_its_mean_its_least_and_its_most(
    mode: AutoresetMode, fragment: int, ours: bool
) -> None:
    functions = [lambda k=k: Told(k, ours) for k in range(2)]
    env = (
        vector_of_functions("in turn", mode, functions)
        if ours
        else SyncVectorEnv(functions, autoreset_mode=mode)
    )
    spaces = env.single_observation_space, env.single_action_space
    module = build_module(None, *spaces, {})
    sampler = Sampler(env, Actor(module, 2, fragment, 0), fragment, seed=0)
    steps, successes, lengths = [], [], []
    for _ in range(100 // fragment):
        sampled = sampler.sample((1, 0))
        lengths += sampled.episode_lengths
        steps += sampled.infos.get("step", [])
        successes += sampled.infos.get("success", [])
        assert sampled.infos.keys() <= {"step", "success"}
    assert len(lengths) > 40
    assert set(lengths) == {*LENGTHS}
    assert (steps, successes) == expected(lengths)


def test_a_new_start_drops_what_episodes_that_were_running_gave() -> None:
    watch = InfoWatch(1, 2, AutoresetMode.NEXT_STEP)
    live, done = np.ones((1, 2), np.bool_), np.zeros((1, 2), np.bool_)
    for _ in range(2):
        for t, value in enumerate((9.0, 1.0)):
            watch.see({"x": np.array([value])}, t, done[:, t])
        assert watch.advance(live, done) == {}
        watch.restart()
    watch.see({"x": np.array([2.0])}, 1, done[:, 1])
    done[0, 1] = True
    found = watch.advance(live, done)
    assert found == {"x": [InfoNumber(2.0, 2.0, 2.0)]}
    assert from_messages(to_messages(found)) == found


def test_of_many_numbers_the_first_are_told() -> None:
    watch = InfoWatch(1, 1, AutoresetMode.NEXT_STEP)
    one = np.ones((1, 1), np.bool_)
    infos = {f"x{k:03d}": np.ones(1) for k in range(MOST_NAMES + 9)}
    watch.see({"bad\n": np.ones(1), "n" * 101: np.ones(1), **infos}, 0, one[:, 0])
    found = watch.advance(one, one)
    assert list(found) == list(infos)[:MOST_NAMES]


@pytest.mark.parametrize(
    "other", [np.array(["n/a"], object), {"y": 1.0}, np.ones((1, 2)), "n/a", None]
)
def test_a_number_that_is_something_else_for_a_step_is_left_out_there(other: Any) -> None:
    watch = InfoWatch(1, 2, AutoresetMode.NEXT_STEP)
    live = np.ones((1, 2), np.bool_)
    done = np.array([[False, True]])
    watch.see({"x": np.array([3.0])}, 0, done[:, 0])
    watch.see({"x": other}, 1, done[:, 1])
    found = watch.advance(live, done)
    assert found == {"x": [InfoNumber(3.0, 3.0, 3.0)]}


@pytest.mark.parametrize("flags", [np.array([0.0]), np.ones((1, 2), np.bool_), "n/a", None])
def test_what_does_not_flag_the_environments_of_a_number_is_passed_over(flags: Any) -> None:
    watch = InfoWatch(1, 1, AutoresetMode.SAME_STEP)
    done = np.zeros((1, 1), np.bool_)
    watch.see({"x": np.array([3.0]), "_x": flags}, 0, done[:, 0])
    assert watch.advance(None, ~done) == {"x": [InfoNumber(3.0, 3.0, 3.0)]}


# What people are told of an environment that raises.


IN_A_LIBRARY = "/venv/lib/python3.11/site-packages/toys/art.py"


def _failed(call: str) -> EnvironmentFailed:
    """Call an installed library with a function that does not fit."""
    code = compile("def draw(x): ...\n\n\ndraw()", IN_A_LIBRARY, "exec")
    with pytest.raises(TypeError) as raised:
        exec(code, {})
    raised.value.__traceback__ = raised.tb.tb_next  # without this function's own frame
    return EnvironmentFailed.during("environment 0 (toy)", call, raised.value)


def test_where_a_library_failed_in_a_step_is_shown() -> None:
    assert IN_A_LIBRARY in _failed("step").traceback


def test_an_exception_of_a_step_lasts_if_it_comes_again_in_the_same_round() -> None:
    failed = _failed("step")
    failed.in_round(7)
    assert failed.lasting
    assert "environment 0 (toy) failed in step: " in str(failed)
    assert str(failed).endswith("(in round 7 of its EnvRunner)")


@pytest.mark.parametrize("call", ["reset", "step"])
def test_what_may_pass_by_itself_does_not_last(call: str) -> None:
    failed = EnvironmentFailed("environment 0", call, "it did not answer within 5 s", passing=True)
    failed.in_round(1)
    assert not failed.lasting


@pytest.mark.parametrize("call", ["constructor", "reset", "step"])
def test_a_broken_rule_lasts(call: str) -> None:
    assert EnvironmentFailed("environment 0", call, "its reward must be a number").lasting


def test_a_reset_as_gym_had_it_is_told_what_gymnasium_has() -> None:
    def reset() -> None: ...

    with pytest.raises(TypeError) as raised:
        reset(seed=1)  # type: ignore[call-arg]
    failed = EnvironmentFailed.during("environment 0 (old)", "reset", raised.value)
    assert "write reset(self, *, seed=None, options=None)" in failed.reason
