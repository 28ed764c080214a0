"""What a run says that it waits for before its first update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from juggler.driver.config import RunConfig
from juggler.driver.workers.standstill import waits_for
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
