"""Room: how many steps a replay keeps, and where."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import ceil, prod
from typing import Any, NamedTuple

import torch

from juggler.learner.data.replay.memory_columns import any_leaf, no_room_on_disk
from juggler.runtime.actors.resources import usable_memory
from juggler.runtime.connectors.frame_stack import FRAMES
from juggler.runtime.modules.columns import LIVE
from juggler.runtime.wire.structures import tree_leaves


class Room(NamedTuple):
    """How many steps of a module are kept, and where.

    Attributes:
        capacity: the most steps.
        memory: the most gigabytes that they take; none: what `capacity` takes.
        directory: where they lie on disk; "": in memory.
        begin: how many steps learning begins with, all of which must have room.
        saved: whether checkpoints hold them.
    """

    capacity: int
    memory: float | None = None
    directory: str = ""
    begin: int = 0
    saved: bool = False

    def steps_of(self, each: float, row_steps: int = 1) -> int:
        """How many steps are kept.

        Args:
            each: bytes of a step.
            row_steps: steps that are kept together.

        Raises:
            ValueError: in so little memory, too few.
        """
        if self.memory is None:
            return self.capacity
        steps = min(self.capacity, int(self.memory * 1e9 / each))
        for least, why, instead in (
            (row_steps, f"a row has {row_steps}", ""),
            (
                self.begin,
                f"learning begins with replay_begin = {self.begin}",
                ", or replay_begin to less",
            ),
        ):
            if steps < least:
                enough = ceil(least * each / 1e7) / 100  # gigabytes
                raise ValueError(
                    f"replay_memory = {self.memory:g}: {steps} steps of {each:.0f} bytes have "
                    f"room, and {why}; set replay_memory to {enough:g} or more{instead}"
                )
        return steps

    def taken_by(self, rows: Mapping[str, Any]) -> float:
        """The bytes of this host's memory that rows like these will take.

        Raises:
            ValueError: they do not fit into it, onto the disk, or into the memory of the device
                where they are.
        """
        if not rows:
            return 0.0
        each = bytes_of_step(rows)
        steps = self.steps_of(each, steps_of_row(rows))
        if self.directory:
            _must_fit_on_disk(self.directory, steps * each)
            if self.saved:
                _must_be_saved(self.directory, steps * each)
            return 0.0
        device = any_leaf(rows).device
        must_fit(steps, each, device)
        return steps * each if device.type == "cpu" else 0.0


def must_fit(steps: int, each: float, device: torch.device) -> None:
    """Raises:
    ValueError: so many steps, each of so many bytes, do not fit into the memory that is free there.
    """
    on_host = device.type == "cpu"
    room = usable_memory() if on_host else memory_of(device)
    if room is not None and steps * each > room:
        whose = "this host's memory" if on_host else f"the memory of {device}"
        raise ValueError(
            f"replay_capacity = {steps}: so many kept steps, of {each:.0f} bytes each, take "
            f"{steps * each / 1e9:.1f} GB, and {room / 1e9:.1f} GB of {whose} are free. "
            f"Set it to {int(room * 0.9 / each)} or less, or keep the steps on disk with "
            "replay_directory"
        )


def memory_of(device: torch.device) -> int | None:
    """Bytes of a device's memory that are free for this process; None: torch does not say."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def bytes_of_step(rows: Mapping[str, Any]) -> float:
    """The memory that each step of some rows [n, ...] takes, whose live steps, [n, T], tell T; rows
    without them are a step each. FRAMES [P, ...] are those of all n rows."""
    rest = {name: column for name, column in rows.items() if name != FRAMES}
    count = len(rest[LIVE] if LIVE in rest else any_leaf(rest))
    size: float = sum(prod(x.shape[1:]) * x.element_size() for _, x in tree_leaves(rest))
    frames = [x for _, x in tree_leaves(rows.get(FRAMES, {}))]
    size += sum(x.numel() * x.element_size() for x in frames) / max(1, count)
    return size / steps_of_row(rest)


def steps_of_row(rows: Mapping[str, Any]) -> int:
    """T of some rows [n, ...]; rows without live steps [n, T] are a step each."""
    return max(1, rows[LIVE].shape[1]) if LIVE in rows else 1


def _must_fit_on_disk(directory: str, size: float) -> None:
    """Raises:
    ValueError: the disk has not so many bytes left, or there is no such directory.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ValueError(
            f"replay_directory = {directory!r}: {error.strerror or error}; name another directory"
        ) from error
    if size > free:
        raise no_room_on_disk(directory, size, f"{free / 1e9:.1f} GB are free")


def _must_be_saved(directory: str, size: float) -> None:
    """Raises:
    ValueError: so many bytes on a disk do not fit into memory twice, where a checkpoint's copies
        are made by a learner and taken by the driver.
    """
    room = usable_memory()
    if room is not None and 2 * size > room:
        raise ValueError(
            f"replay_directory = {directory!r}: two copies of kept steps for a checkpoint, at the "
            f"learner and at the driver, take {2 * size / 1e9:.1f} GB of memory, and "
            f"{room / 1e9:.1f} GB of this host's memory are free. Set save_replay = false, or "
            "lower replay_capacity"
        )
