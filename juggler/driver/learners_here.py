"""What a run's learners need of this host together, and what only a single one of them can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.hosting import Hosting
from juggler.learner.process.devices import CPU
from juggler.runtime.actors.resources import usable_memory


def must_be_alone(config: RunConfig, num_learners: Mapping[str, int] | None = None) -> None:
    """
    Args:
        config: of a run.
        num_learners: of each module, by id; None: as many as the run begins with.

    Raises:
        ConfigError: a module has several learners, and a key that allows one.
    """
    hosting = Hosting(config, config.module_ids)
    for module_id in config.module_ids:
        most: int = getattr(config.of(module_id).learner, "max_times_sampled", 0)
        learners = (
            hosting.processes_of(module_id) if num_learners is None else num_learners[module_id]
        )
        if most and learners > 1:
            where = f"modules.{module_id}: " if config.played_by else ""
            raise ConfigError(
                f"{where}max_times_sampled = {most} with {learners} learners: they would run out "
                "of steps at different times, but have to make every step of the optimizer "
                "together; set it to 0, or num_learners to 1"
            )


def must_fit_together(
    config: RunConfig,
    kept: Mapping[str, float],
    devices: Sequence[str],
    free_on: Callable[[str], int | None],
) -> None:
    """
    Args:
        config: of a run whose learners are on this host.
        kept: bytes of steps that each learner of a module keeps, by module id.
        devices: of the learner processes. Those on "cpu" keep their steps in the memory of this
            host.
        free_on: says how many bytes of a GPU's memory are free; None: nobody knows. It is asked
            only where several replays are on one GPU.

    Raises:
        ConfigError: they do not all fit into this host's memory, or into that of a GPU.
    """
    hosting = Hosting(config, config.module_ids)
    hosted = [hosting.modules_of(index) for index in range(len(devices))]
    for gpu in sorted({*devices} - {CPU}):
        _must_fit_on(
            gpu,
            [
                kept[module_id]
                for module_ids, device in zip(hosted, devices, strict=True)
                for module_id in module_ids
                if device == gpu and kept[module_id]
            ],
            free_on,
        )
    here = {module_id for module_ids in hosted for module_id in module_ids}
    must_have_room(
        [
            sum(kept[module_id] for module_id in module_ids)
            for module_ids, device in zip(hosted, devices, strict=True)
            if device == CPU
        ],
        copies=bytes_of_copies(config, {module_id: kept[module_id] for module_id in here}),
    )


def _must_fit_on(gpu: str, sizes: Sequence[float], free_on: Callable[[str], int | None]) -> None:
    """
    Args:
        gpu: its name.
        sizes: bytes of each replay that is to be on it. A single one is looked at by its learner.
        free_on: as of `must_fit_together`.

    Raises:
        ConfigError: they do not all fit into its memory.
    """
    free = free_on(gpu) if len(sizes) > 1 else None
    if free is None or sum(sizes) <= free:
        return
    each = ", ".join(f"{size / 1e9:.1f}" for size in sizes)
    raise ConfigError(
        f"replay_capacity: the {len(sizes)} replays on {gpu} keep steps of {sum(sizes) / 1e9:.1f} "
        f"GB in all ({each}), and {free / 1e9:.1f} GB of its memory are free. Lower it, limit each "
        "replay with replay_memory, or keep the steps on disk with replay_directory"
    )


def bytes_of_copies(config: RunConfig, kept: Mapping[str, float]) -> float:
    """Bytes of copies of kept steps while a checkpoint is made: one learner of each module whose
    replay is saved makes one, and the driver takes it.

    Args:
        config: of the run.
        kept: bytes of steps that a learner of a module keeps, by module id.
    """
    saved = (
        size
        for module_id, size in kept.items()
        if getattr(config.of(module_id).learner, "save_replay", False)
    )
    return 2 * sum(saved)


def must_have_room(of_processes: Sequence[float], taken: float = 0.0, copies: float = 0.0) -> None:
    """
    Args:
        of_processes: bytes of this host's memory for the steps that each learner process keeps.
        taken: bytes that they have taken of it already.
        copies: bytes for copies of them while a checkpoint is made.

    Raises:
        ConfigError: they do not all fit into it.
    """
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
