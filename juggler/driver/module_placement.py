"""Hosting: the modules that each of a run's learner processes trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import cycle, islice

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.process.learner_program import CPU
from juggler.runtime.actors.resources import usable_memory


def hosted(
    processes: int, together: Sequence[Sequence[str]], counts: Mapping[str, int]
) -> list[list[str]]:
    """Return the modules that each learner process hosts.

    Modules that share parts are in the same process, and count as one here. With at least as many
    processes as modules, each process hosts one, and processes of the same one update it
    together. With fewer, the modules are spread over the processes.

    Args:
        together: the modules of the run, in groups that share parts.
        counts: by id of some modules, which share no parts: number of processes that host each.
            There are enough, and the other modules share the rest. {}: no module has its own
            number.
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


class ModulePlacement:
    """The modules of each learner process, while modules come and go.

    Processes whose indices differ by a multiple of the number of shards host the same modules. The
    number of shards never changes, so that no module ever moves.
    """

    def __init__(self, config: RunConfig, trained: Iterable[str]) -> None:
        self._processes = config.driver.learners
        self._shards = hosted(
            self._processes, config.agents.trained_together, config.agents.own_learners
        )
        now = list(trained)
        for module_id in config.module_ids:
            if module_id not in now:
                self.remove(module_id)
        for module_id in now:
            if module_id not in config.module_ids:
                self.add(module_id)

    def modules_of(self, index: int) -> list[str]:
        """Return the modules that the process of this index hosts."""
        return list(self._shards[index % len(self._shards)])

    def processes_of(self, module_id: str) -> int:
        """Return how many of the first processes host this module."""
        return sum(module_id in self.modules_of(index) for index in range(self._processes))

    def add(self, module_id: str, here: Collection[int] = ()) -> None:
        """Place another module in the emptiest shard with a process in `here`."""
        able = {index % len(self._shards) for index in here} or range(len(self._shards))
        fewest = min(sorted(able), key=lambda shard: len(self._shards[shard]))
        self._shards[fewest].append(module_id)

    def remove(self, module_id: str) -> None:
        """Remove a module from all processes."""
        for shard in self._shards:
            if module_id in shard:
                shard.remove(module_id)


def must_fit_together(
    config: RunConfig,
    kept: Mapping[str, float],
    devices: Sequence[str],
    free_on: Callable[[str], int | None],
) -> None:
    """Check that kept steps fit into memory of host and GPUs."""
    hosting = ModulePlacement(config, config.module_ids)
    hosted = [hosting.modules_of(index) for index in range(len(devices))]
    for gpu in sorted({*devices} - {CPU}):
        sizes = [
            kept[module_id]
            for module_ids, device in zip(hosted, devices, strict=True)
            for module_id in module_ids
            if device == gpu and kept[module_id]
        ]
        # A learner checks a replay that is alone on its GPU.
        free = free_on(gpu) if len(sizes) > 1 else None
        if free is not None and sum(sizes) > free:
            total, each = sum(sizes) / 1e9, ", ".join(f"{size / 1e9:.1f}" for size in sizes)
            raise ConfigError(
                f"replay_capacity: the {len(sizes)} replays on {gpu} keep steps of {total:.1f} GB "
                f"in all ({each}), and {free / 1e9:.1f} GB of its memory are free. Lower it, limit "
                "each replay with replay_memory, or keep the steps on disk with replay_directory"
            )
    # On the CPU, all processes share the host's memory.
    here = {module_id for module_ids in hosted for module_id in module_ids}
    must_have_room(
        [
            sum(kept[module_id] for module_id in module_ids)
            for module_ids, device in zip(hosted, devices, strict=True)
            if device == CPU
        ],
        copies=bytes_of_copies(config, {module_id: kept[module_id] for module_id in here}),
    )


def bytes_of_copies(config: RunConfig, kept: Mapping[str, float]) -> float:
    """Return bytes of copies of kept steps during a checkpoint.

    For each saved replay, one learner makes a copy, and the driver receives it.
    """
    saved = (
        size
        for module_id, size in kept.items()
        if getattr(config.of(module_id).learner, "save_replay", False)
    )
    return 2 * sum(saved)


def must_have_room(of_processes: Sequence[float], taken: float = 0.0, copies: float = 0.0) -> None:
    """Check that kept steps, and copies, fit into the host's memory."""
    total, free = sum(of_processes), usable_memory()
    if free is None or total + copies <= (room := free + taken):
        return
    takes, instead = [], "keep the steps on disk with replay_directory"
    if of_processes:
        each = ", ".join(f"{size / 1e9:.1f}" for size in of_processes)
        takes.append(
            f"the {len(of_processes)} learners on this host keep steps of {total / 1e9:.1f} GB in "
            f"all ({each})"
        )
    # With kept steps on disk, copies alone may take too much.
    if copies:
        takes.append(
            f"while a checkpoint is made, {copies / 1e9:.1f} GB are taken by copies of kept steps, "
            "at a learner and at the driver"
        )
        if total > room:
            instead += ", and set save_replay = false"
        else:
            instead = "set save_replay = false"
    raise ConfigError(
        f"replay_capacity: {'; '.join(takes)}, and {room / 1e9:.1f} GB of this host's memory are "
        f"free for that. Lower it, limit each replay with replay_memory, or {instead}"
    )
