"""What a run says that it waits for before its first update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_events_world import WorkersWorld

from juggler.driver.config import RunConfig
from juggler.driver.workers.standstill import Standstill, waits_for
from juggler.envrunner.program import ENVRUNNER


@pytest.mark.parametrize(
    ("gateway", "said"),
    [
        (True, "waiting for a simulator to dial in"),
        (False, "EnvRunners make their environments, CartPole-v1"),
    ],
)
def test_a_run_whose_envrunners_are_starting_says_what_they_wait_for(
    gateway: bool, said: str
) -> None:
    registry = SimpleNamespace(
        attached={"envrunner-0": SimpleNamespace(role=ENVRUNNER)}, of_role=lambda role: []
    )
    config = RunConfig.from_flat({"env": "CartPole-v1"})
    config.env_runner.gateway = gateway
    parts = SimpleNamespace(config=config, registry=registry, core=None)
    assert waits_for(cast(Any, parts)) == said


def test_the_first_update_is_said_to_be_under_way_and_its_steps_are_not_said_to_be_missing(
    tmp_path: Path,
) -> None:
    world = WorkersWorld(tmp_path, batch_size=40)
    assert waits_for(world.parts) == "0 of 40 steps are here for the first update"
    world.sample(0)
    assert waits_for(world.parts) == "20 of 40 steps are here for the first update"
    world.sample(1)
    assert waits_for(world.parts) == "the first update is under way"
    told = Standstill(world.parts).what_is_there()
    assert "an update takes 40 steps, 0 are there, beside those of an update under way" in told
