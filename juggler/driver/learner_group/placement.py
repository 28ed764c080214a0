"""Which module of a LearnerGroup is trained where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import NamedTuple

from juggler.driver.config import RunConfig

CPU = "cpu"


class Place(NamedTuple):
    """Of one module.

    Attributes:
        shard: number of the process that trains it.
        devices: set aside for that shard; it computes on the first.
        share: of GPUs that the module has, as the books say: no limit of memory or time.
    """

    shard: int
    devices: tuple[str, ...]
    share: float


@dataclass(slots=True)
class _Shard:
    number: int
    devices: list[str]  # the first computes
    modules: list[str]
    open: bool = True  # takes further modules


class Placement:
    """Which shards there are, on which devices, and who is on them.

    At first there are as many shards as GPUs, or modules, if these are fewer; without a GPU as many
    as there are modules. A shard whose last module goes stays, without one, for the next.
    """

    def __init__(self, devices: Sequence[str], module_ids: Iterable[str]) -> None:
        """Args:
            devices: GPUs, or what stands for them; none: every shard is on the CPU.
            module_ids: to begin with; each of them once.

        Raises:
            ValueError: there is no module.
        """
        module_ids = list(module_ids)
        if not module_ids:
            raise ValueError("a group needs at least one module")
        shards = min(len(devices) or len(module_ids), len(module_ids))
        self._gpus = len(devices)
        self._per_shard = len(devices) // shards  # at least 1 where there is a GPU
        self._free = list(devices)
        self._shards: list[_Shard] = []
        for _ in range(shards):
            self._new_shard()
        for index, module_id in enumerate(module_ids):
            self._shards[index % shards].modules.append(module_id)

    def __len__(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    def __contains__(self, module_id: object) -> bool:
        return any(module_id in shard.modules for shard in self._shards)

    def add(self, module_id: str) -> int:
        """Place another module: on a shard without any, else on a new one if there is a device for
        it, else on the one with fewest.

        Returns:
            The number of the shard; that of a new one is `len` of this placement before.

        Raises:
            ValueError: there is none that takes it.
        """
        shard = min(
            (shard for shard in self._shards if shard.open),
            key=lambda shard: len(shard.modules),
            default=None,
        )
        if (shard is None or shard.modules) and self._has_room():
            shard = self._new_shard()
        if shard is None:
            raise ValueError("no shard is left that takes a module, and no device for another")
        shard.modules.append(module_id)
        return shard.number

    def remove(self, module_id: str) -> None:
        """Take a module off its shard."""
        self._shards[self.shard_of(module_id)].modules.remove(module_id)

    def close(self, shard: int) -> None:
        """Place nothing there any more."""
        self._shards[shard].open = False

    def shard_of(self, module_id: str) -> int:
        return next(shard.number for shard in self._shards if module_id in shard.modules)

    def modules_on(self, shard: int) -> list[str]:
        return list(self._shards[shard].modules)

    def device_of(self, shard: int) -> str:
        """Where it computes."""
        return self._shards[shard].devices[0]

    def places(self) -> dict[str, Place]:
        """By module id, in order of shards."""
        modules = sum(len(shard.modules) for shard in self._shards)
        return {
            module_id: Place(shard.number, tuple(shard.devices), self._share(shard, modules))
            for shard in self._shards
            for module_id in shard.modules
        }

    def _share(self, shard: _Shard, modules: int) -> float:
        if modules > self._gpus:
            return self._gpus / modules
        return len(shard.devices) / len(shard.modules)

    def _has_room(self) -> bool:
        """Whether a device computes nothing."""
        return not self._gpus or bool(self._free) or len(self._widest().devices) > 1

    def _widest(self) -> _Shard:
        return max(self._shards, key=lambda shard: len(shard.devices))

    def _new_shard(self) -> _Shard:
        shard = _Shard(len(self._shards), self._devices_for_one(), [])
        self._shards.append(shard)
        return shard

    def _devices_for_one(self) -> list[str]:
        if not self._gpus:
            return [CPU]
        if self._free:
            taken, self._free = self._free[: self._per_shard], self._free[self._per_shard :]
            return taken
        # Those beyond its first one are set aside for this very case.
        widest = self._widest()
        kept = -(-len(widest.devices) // 2)
        widest.devices, taken = widest.devices[:kept], widest.devices[kept:]
        return taken


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
        """Nobody hosts it any more."""
        for shard in self._shards:
            if module_id in shard:
                shard.remove(module_id)
