"""Where learners compute: what the key `devices` says, and what a host has. No torch to read it."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"


def parse_devices(text: str) -> list[str]:
    """The devices that learners are spread over, one after the other: "auto", "cpu", "cuda:0", or
    "fake:0", a process on the CPU that stands for a GPU. "fake:4" is short for four of them.

    Raises:
        ValueError: something else is named.
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
                f"devices = {text!r}: {name!r} is none; expected auto, cpu, cuda:0, fake:4, or "
                "several with commas between them"
            )
    return names


def devices_here() -> list[str]:
    """All GPUs of this host, or else the CPU."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def device_for(name: str, index: int, here: Sequence[str]) -> str:
    """A device for torch.

    Args:
        name: as `parse_devices` gives it.
        index: of the learner; under "auto" they take turns on what there is.
        here: what this host has.

    Raises:
        ValueError: this host has no such device.
    """
    if name == AUTO:
        return here[index % len(here)]
    if name == "cpu" or name.startswith("fake:"):
        return "cpu"
    if name not in here:
        raise ValueError(f"devices = {name!r}: this host has {', '.join(here)}")
    return name


def reserved_bytes(device: str) -> int:
    """Memory that this process has of a device, used or kept; 0 for the CPU, which has none."""
    import torch

    return torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0
