"""Episodes that may go on for ever."""

from __future__ import annotations

from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner.config import EnvRunnerConfig

#: Steps of each environment in which an episode should have ended.
_MANY = 5000
_TIMES = 2  # the longest of the last episodes

_LIMIT = 1000  # in the hint


class EndlessEpisodes:
    """Tells people once how episodes are ended where none has for long.

    Args:
        config: of the environments.
    """

    def __init__(self, config: EnvRunnerConfig) -> None:
        self._config = config
        self._told = False

    def look(self, workers: WorkerEvents) -> list[str]:
        """For people: the hint, if it is due now."""
        metrics = workers.metrics
        environments = workers.core.num_runners * self._config.envs_per_runner
        steps = metrics.steps_without_an_end // max(1, environments)  # of each
        if self._told or steps < max(_MANY, _TIMES * max(metrics.lengths, default=0)):
            return []
        self._told = True
        old = ", and the return is that of earlier ones" if metrics.returns else ""
        return [
            f"no episode has ended in the last {steps:,} steps of each environment{old}. "
            f"Where episodes may go on for ever, {self._remedy()}"
        ]

    def _remedy(self) -> str:
        config = self._config
        if config.gateway or config.is_elsewhere:
            return "have the simulator truncate them"
        if ":" in config.env:  # what is called with env_kwargs may know no such limit
            limit = f'env_wrappers = [{{ use = "TimeLimit", max_episode_steps = {_LIMIT} }}]'
        else:
            limit = f"env_kwargs = {{ max_episode_steps = {_LIMIT} }}"
        return f"set a limit: {limit}"
