"""An EnvRunner whose agents are played by two modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runner_world import PLAYED_BY, RunnerWorld
from support.scripted_agents import FOUR, THREE, ScriptedAgents, at_random

from juggler.envrunner import envrunner_worker
from juggler.envrunner.multi_agent import make_envs


@pytest.fixture
def envs() -> ScriptedAgents:
    script = at_random(tuple(PLAYED_BY), 8)
    return ScriptedAgents(2, {"red": THREE, "green": THREE, "blue": FOUR}, script)


@pytest.fixture
def make_world(
    envs: ScriptedAgents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make EnvRunners with their drivers and learners."""
    # All later tests of this process would step back, too.
    monkeypatch.setattr(envrunner_worker, "step_back", lambda *_: None)
    made: list[tuple[RunnerWorld, ScriptedAgents]] = []

    def make(
        *played_by: dict[str, str],
        kind: type[RunnerWorld] = RunnerWorld,
        envs: ScriptedAgents = envs,
        **keys: Any,
    ) -> RunnerWorld:
        monkeypatch.setattr(make_envs, "make_multi_agent_envs", lambda *_, **__: envs)
        made.append((kind(tmp_path, *(played_by or (PLAYED_BY,)), **keys), envs))
        return made[-1][0]

    yield make
    for world, its_envs in made:
        world.close()
        assert its_envs.closed or its_envs is not envs
