"""What a run waits for before its first update."""

from __future__ import annotations

from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.workers.registry import WorkerRegistry
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER


def waits_for(config: RunConfig, registry: WorkerRegistry, core: DriverCore) -> str:
    """For people, in a few words."""
    here = [worker.role for worker in registry.attached.values()]
    if ENVRUNNER not in here:
        return f"no EnvRunner is here yet, of {config.driver.num_env_runners}"
    if not registry.of_role(ENVRUNNER):
        return f"EnvRunners make their environments, {config.env_runner.env}"
    if LEARNER not in here:
        return "no learner is here yet"
    if not registry.of_role(LEARNER):
        return "the learner builds its module"
    if not core.members:
        return "the learners publish their first weights"
    size = config.learner.batch_size
    return f"{min(core.held_steps, size)} of {size} steps are here for the first update"
