"""Rehearse a configuration and its parts in the test's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from juggler.driver import preflight
from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import RunConfig
from juggler.driver.preflight import Trial
from juggler.runtime.checkpoints.checkpoint import Checkpoint


def rehearse(
    config: RunConfig,
    own_code: bytes = b"",
    report: Callable[[str], None] = lambda _: None,
    before: Checkpoint | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[FoundGroup, ...]:
    return preflight.rehearse(Trial(config, before), own_code, report, warn)


def learner_of(config: RunConfig, group: Any, critic_space: Any = None) -> Any:
    from juggler.driver import rehearsal
    from juggler.envrunner.stage import UserCode

    return rehearsal.learner_of(config, group, critic_space, UserCode(None, {}))


def stage_of(config: RunConfig) -> Callable[[Any, int], Any]:
    from juggler.driver import rehearsal
    from juggler.envrunner.stage import UserCode

    return lambda env, steps: rehearsal.stage_of(config, {}, UserCode(None, {}), env, steps)
