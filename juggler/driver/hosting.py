"""Hosting: the modules that each of a run's learner processes trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import cycle, islice

from juggler.driver.config import RunConfig


def hosted(
    processes: int, together: Sequence[Sequence[str]], counts: Mapping[str, int]
) -> list[list[str]]:
    """The modules that each of a run's learner processes hosts; those beyond begin with the first.

    Modules that share parts are in the same process, and count as one here. With at least as many
    processes as modules, each process hosts one, and those that host the same one update it
    together. With fewer, the modules are spread over the processes.

    Args:
        processes: that the run begins with.
        together: the modules of the run, in groups that share parts.
        counts: by id of some modules, which share no parts: how many processes host each. There are
            enough, and the others have what is left. {}: all modules have as many as there are.
    """
    if not counts:
        shards = min(processes, len(together))
        return [
            [each for module_ids in together[shard::shards] for each in module_ids]
            for shard in range(shards)
        ]
    turns = range(max(counts.values()))
    hosts = [list(ids) for turn in turns for ids in together if turn < counts.get(ids[0], 1)]
    others = [list(ids) for ids in together if ids[0] not in counts]
    return hosts + list(islice(cycle(others), processes - len(hosts)))


class Hosting:
    """Which modules each of a run's learner processes hosts, while modules come and go.

    Processes whose indices differ by a multiple of the number of shards host the same ones. That
    number stays what it is at the beginning, so that no module ever moves.

    Args:
        config: of the run.
        trained: the modules that are trained now, some of which may not be in the configuration,
            as some of that may not be trained any more.
    """

    def __init__(self, config: RunConfig, trained: Iterable[str]) -> None:
        self._processes = config.driver.learners
        self._shards = hosted(self._processes, config.trained_together, config.agents.own_learners)
        now = list(trained)
        for module_id in config.module_ids:
            if module_id not in now:
                self.remove(module_id)
        for module_id in now:
            if module_id not in config.module_ids:
                self.add(module_id)

    def modules_of(self, index: int) -> list[str]:
        """The modules that the process of this index is to host."""
        return list(self._shards[index % len(self._shards)])

    def processes_of(self, module_id: str) -> int:
        """How many of the first processes host this module; at least 1."""
        return sum(module_id in self.modules_of(index) for index in range(self._processes))

    def add(self, module_id: str, here: Collection[int] = ()) -> None:
        """Place another module where the fewest are.

        Args:
            module_id: of the module.
            here: indices of processes that are here, one of which is to host it; (): any.
        """
        able = {index % len(self._shards) for index in here} or range(len(self._shards))
        fewest = min(sorted(able), key=lambda shard: len(self._shards[shard]))
        self._shards[fewest].append(module_id)

    def remove(self, module_id: str) -> None:
        """Remove a module from all processes."""
        for shard in self._shards:
            if module_id in shard:
                shard.remove(module_id)
