"""Recorded episodes end with their environment's last observation, if known."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from support.scripted_environments import Script, Scripted, masked
from support.vectors import MODES, vector_of_functions

from juggler.envrunner.datasets.dataset_writer import EpisodeRecorder
from juggler.envrunner.environments.action_masks import observe_masks
from juggler.runtime.datasets.dataset import RecordedEpisode

SCRIPTS = [((3, "terminated"), (2, "truncated"), (4, "both")), ((1, "terminated"), (2, "both"))]


def recorded(env: VectorEnv[Any, Any, Any], choose: Any) -> list[RecordedEpisode]:
    """Episodes of 20 steps, with actions [N] chosen from observations."""
    episodes: list[RecordedEpisode] = []
    env = EpisodeRecorder(env, episodes.append)
    observations, _ = env.reset(seed=0)
    for _ in range(20):
        observations, _, terminated, truncated, _ = env.step(choose(observations))
        over = terminated | truncated
        if env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            observations, _ = env.reset(options={"reset_mask": over})
    return episodes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in turn", "async", "sync"])
def test_episodes_with_action_masks_in_infos_are_recorded_whole_however_they_end(
    kind: str, mode: AutoresetMode
) -> None:
    functions = [functools.partial(masked, script) for script in SCRIPTS]
    env = observe_masks(vector_of_functions(kind, mode, functions))
    episodes = recorded(env, lambda seen: seen["action_mask"].argmax(1))
    env.close()
    assert {each.terminated for each in episodes} == {True, False}
    for each in episodes:
        steps = each.observations["observation"][:, 1]
        np.testing.assert_array_equal(steps, np.arange(len(each) + 1))


class Careless(Scripted):
    """Gives no mask and no observation at the end of episodes."""

    def __init__(self, script: Script, mask: Any, last: Any) -> None:
        super().__init__(script)
        self.observation_space = spaces.Dict({"numbers": self.observation_space})
        self.mask, self.last = mask, last

    def reset(self, **options: Any) -> Any:
        observation, _ = super().reset(**options)
        return {"numbers": observation}, {"action_mask": np.ones(3, np.int8)}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        shown = self.last if terminated else {"numbers": observation}
        mask = self.mask if terminated else np.ones(3, np.int8)
        return shown, reward, terminated, truncated, {"action_mask": mask}


@pytest.mark.parametrize("mask", [None, [], -np.ones(3, np.int8)], ids=["None", "empty", "-1"])
@pytest.mark.parametrize("last", [None, {}, {"numbers": np.zeros(2, np.float32)}])
@pytest.mark.parametrize("masks", [True, False])
def test_nobody_reads_what_comes_with_the_end_of_an_episode_that_terminates(
    masks: bool, last: Any, mask: Any
) -> None:
    functions = [functools.partial(Careless, SCRIPTS[0], mask, last)] * 2
    env = vector_of_functions("in turn", AutoresetMode.SAME_STEP, functions)
    if masks:
        env = observe_masks(env)
    episodes = recorded(env, lambda seen: np.zeros(2, np.int64))
    env.close()
    assert {each.terminated for each in episodes} == {True, False}
    for each in episodes:
        steps = np.arange(len(each) + 1)
        if each.terminated:
            steps[-1] -= 1
        np.testing.assert_array_equal(each.observations["numbers"][:, 1], steps)
