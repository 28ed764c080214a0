"""Devices of learners: the key `devices`, and the devices of a host. Imports torch late."""

from __future__ import annotations

import re
from collections.abc import Sequence

from juggler.runtime.actors.resources import usable_cores
from juggler.runtime.nearest import all_of, one_of

AUTO, CPU = "auto", "cpu"


def parse_devices(text: str) -> list[str]:
    """The devices for learners, in order: "auto", "cpu", "cuda:0", or "fake:0", which is the CPU in
    the role of a GPU. "fake:4" is short for four of these.

    Raises:
        ValueError: a name is none of these.
    """
    names: list[str] = []
    for name in text.split(","):
        name = name.strip()
        if fakes := re.fullmatch(r"fake:([1-9]\d*)", name):
            names += [f"fake:{index}" for index in range(int(fakes[1]))]
        elif name in (AUTO, "cpu") or re.fullmatch(r"cuda:\d+", name):
            names.append(name)
        else:
            raise ValueError(
                f"devices = {text!r}: {name!r} is not a device; expected auto, cpu, cuda:0, "
                "fake:4, or several of these with commas between them"
            )
    return names


def devices_here() -> list[str]:
    """The GPUs of this host; without any, the CPU."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def device_for(name: str, index: int, here: Sequence[str]) -> str:
    """The name of a learner's device in torch.

    Args:
        name: from `parse_devices`.
        index: of the learner; with "auto", learners take the devices of the host in turn.
        here: the devices of this host.

    Raises:
        ValueError: this host has no such device.
    """
    if name == AUTO:
        return here[index % len(here)]
    if name == "cpu" or name.startswith("fake:"):
        return "cpu"
    if name not in here:
        gpu = "" if "cuda:0" in here else "; for a GPU, install a PyTorch that finds it"
        raise ValueError(
            f"devices = {name!r}: this host has {all_of(here)}: name {one_of(here)}, or leave "
            f"devices out{gpu}"
        )
    return name


def reserved_bytes(device: str) -> int:
    """Device memory that this process has reserved, in use or not; 0 for the CPU."""
    import torch

    return torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0


def use_threads(count: int) -> str:
    """Set the number of threads on the CPU. Returns why that is slow; "": it is not."""
    import torch

    torch.set_num_threads(count)
    if count <= (cores := usable_cores()):
        return ""
    return (
        f"computes in {count} threads (learner_threads), and its host has {cores:g} cores: the "
        "threads wait for each other, so updates take longer"
    )
