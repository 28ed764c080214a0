"""An EnvRunner whose agents are played by two modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runner_world import PLAYED_BY, RunnerWorld
from support.scripted_agents import FOUR, THREE, ScriptedAgents, at_random

from juggler.envrunner import stage_building
from juggler.envrunner.multi_agent import making


@pytest.fixture
def envs() -> ScriptedAgents:
    script = at_random(tuple(PLAYED_BY), 8)
    return ScriptedAgents(2, {"red": THREE, "green": THREE, "blue": FOUR}, script)


@pytest.fixture
def make_world(
    envs: ScriptedAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RunnerWorld]]:
    monkeypatch.setattr(stage_building, "step_back", lambda *_: None)  # all later tests would, too
    monkeypatch.setattr(making, "make_multi_agent_envs", lambda *_, **__: envs)
    worlds: list[RunnerWorld] = []

    def make(played_by: dict[str, str] = PLAYED_BY, **keys: Any) -> RunnerWorld:
        worlds.append(RunnerWorld(tmp_path, played_by, **keys))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
    assert envs.closed
