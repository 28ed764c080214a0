"""What a worker is told first of its own part of a run, whatever its modules are."""

from __future__ import annotations

from dataclasses import replace

from juggler.driver.config import RunConfig
from juggler.driver.record.candidates import CONFIRMING_EPISODES
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.program import EVALUATOR
from juggler.learner.process.program import LearnerSetup


def environments(config: RunConfig, role: str) -> int:
    """How many environments a worker steps."""
    rows = config.env_runner.envs_per_runner
    if role == EVALUATOR:
        most = config.driver.evaluation_episodes
        if config.driver.confirms:
            most = max(most, CONFIRMING_EPISODES)
        rows = min(rows, most)
    return rows


def env_runner_of(config: RunConfig, role: str) -> EnvRunnerConfig:
    """The environments of a worker. Evaluators have some where the others have a data set, and
    record nothing."""
    own = replace(config.env_runner, envs_per_runner=environments(config, role))
    return replace(own, dataset="", record="") if role == EVALUATOR else own


def learner_setup(config: RunConfig, index: int, *, may_meet: bool) -> LearnerSetup:
    """What a learner process is told.

    Args:
        config: of the run.
        index: of the process.
        may_meet: it may have to make updates together with others.
    """
    return LearnerSetup(
        device=config.driver.device_name(index),
        threads=config.driver.learner_threads,
        updates_in_flight=config.driver.updates_in_flight,
        may_meet=may_meet,
        shared=config.agents.shared,
        synchronous=config.driver.synchronous,
    )
