"""What holds an EnvRunner up is read off its stack."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from support.scripted_games import ScriptedParallel, drawn, play

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import (
    EnvironmentsInTurn,
    environment_in,
    make_vector_env,
)
from juggler.envrunner.multi_agent.games import ParallelGame
from juggler.envrunner.multi_agent.games_in_turn import GamesInTurn


class Looking(gymnasium.Env[Any, Any]):
    """Notes what its own thread is in, wherever `where` says."""

    observation_space = action_space = Discrete(2)

    def __init__(self, seen: list[str], where: str) -> None:
        self.seen, self.where = seen, where
        self._look("constructor")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self._look("reset")
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._look("step")
        return 0, 0.0, self.where == "reset", False, {}

    def _look(self, where: str) -> None:
        if where == self.where:
            self.seen.append(environment_in(_here()))


class Two(VectorEnv[Any, Any, Any]):
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def step(self, actions: Any) -> Any:
        self.seen.append(environment_in(_here()))


def _here() -> FrameType:
    return sys._current_frames()[threading.get_ident()]


@pytest.mark.parametrize("call", ["step", "reset"])
def test_the_environment_and_its_call_are_named(call: str) -> None:
    seen: list[str] = []
    makers = [lambda: Looking([], ""), lambda: Looking(seen, call)]
    env = EnvironmentsInTurn(makers, AutoresetMode.SAME_STEP, "Looking")
    env.reset()
    env.step(np.zeros(2, np.int64))
    assert set(seen) == {f"{call} of environment 1 (Looking)"}
    assert len(seen) == (1 if call == "step" else 2), "at the start, and at an episode's end"


class LookingWithOthers(ScriptedParallel):
    def __init__(self, seen: list[str]) -> None:
        super().__init__(drawn(0, "parallel"))
        self.seen = seen

    def step(self, actions: Any) -> Any:
        self.seen.append(environment_in(_here()))
        return super().step(actions)


def test_an_environment_with_several_agents_is_named_too() -> None:
    seen: list[str] = []
    games = [ParallelGame(LookingWithOthers(each), i) for i, each in enumerate([[], seen])]
    play(GamesInTurn(games, "Looking"), 0, 1)
    assert seen == ["step of environment 1 (Looking)"]


def test_environments_that_step_together_are_named_by_their_class() -> None:
    seen: list[str] = []
    VectorWrapper(Two(seen)).step(None)
    assert seen == ["step of Two"]


def test_a_constructor_is_named_as_such() -> None:
    seen: list[str] = []
    make_vector_env(EnvRunnerConfig(env="Looking"), lambda: Looking(seen, "constructor")).close()
    assert set(seen) == {"the constructor of an environment"}


def test_where_no_environment_is_on_the_stack_none_is_named() -> None:
    assert environment_in(_here()) == ""
