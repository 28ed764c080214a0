from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.gateway_world import AgentsWorld, nobody_stalls

from juggler.gateway import gateway_worker

__all__ = ["nobody_stalls"]  # for every test here


@pytest.fixture(autouse=True, scope="module")
def _nobody_steps_back() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_worker, "step_back", lambda: None)  # all later tests would, too
        yield


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., AgentsWorld]]:
    """Makes gateways for several agents, which are closed behind the test."""
    worlds: list[AgentsWorld] = []

    def make(
        agents: dict[str, str | list[str]],
        gateway: str = "127.0.0.1:0",
        environments: int = 1,
        **keys: object,
    ) -> AgentsWorld:
        worlds.append(AgentsWorld(tmp_path, agents, gateway, environments=environments, **keys))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
