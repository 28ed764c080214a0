"""Starts and sets up learner processes. No torch: the driver imports this."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.resources import usable_cores
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.near_matches import all_of, one_of
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import training_pb2

LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class LearnerProgram:
    """Arguments of a learner process.

    Attributes:
        contact: address and credentials of its driver.
        bind: "host:port" to listen on for EnvRunners of other hosts; "": none.
        advertise: the address for them to dial; "": the bound one.
        insecure: whether to listen beyond loopback without encryption or authentication.
        reflection: whether tools may list the services of its server.
        own_code: cloudpickled (environment factory or None, module factory or None, connector
            classes by name), the same as for EnvRunners.
    """

    contact: Contact
    bind: str = ""
    advertise: str = ""
    insecure: bool = False
    reflection: bool = False
    own_code: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    """Settings of a learner process, for all modules that it hosts.

    Attributes:
        device: its device, as named by `parse_devices`.
        threads: number of threads on a CPU.
        updates_in_flight: maximum number of unanswered updates of a module.
        may_meet: whether its modules may be trained together with other learners.
        shared: by pattern of parameters' names, ids of the modules that share matching parts.
        synchronous: whether modules that share parts are published together, once each of them has
            updated. Otherwise each is published after its own update.
        outlives_failures: whether the process replies to a failed command with the failure, refuses
            an invalid batch, and continues for its other modules. Otherwise it ends.
    """

    device: str
    updates_in_flight: int
    may_meet: bool
    threads: int = 1
    shared: dict[str, list[str]] = field(default_factory=dict)
    synchronous: bool = False
    outlives_failures: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSetup:
    """Settings of a module and its training.

    Attributes:
        learner: fields of the algorithm's config, by name.
        module: the module's configuration.
        connectors: the table `connectors` of a configuration.
    """

    learner: dict[str, Any]
    module: ModuleConfig
    connectors: dict[str, Any]


def critic_space_of(command: training_pb2.AddModule) -> Space[Any] | None:
    """Return the space of a value function's private observations, or None."""
    return space_from_message(command.critic_space) if command.HasField("critic_space") else None


AUTO, CPU = "auto", "cpu"


def parse_devices(text: str) -> list[str]:
    """Parse learners' devices: "auto", "cpu", "cuda:0", "fake:0".

    "fake:0" is the CPU in the role of a GPU, and "fake:4" short for four of these.

    Raises:
        ValueError: a name is not a device.
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
    """Return the GPUs of this host; without any, the CPU."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def device_for(name: str, index: int, here: Sequence[str]) -> str:
    """Return the name of a learner's device in torch.

    Args:
        name: a name from `parse_devices`.
        index: index of the learner; with "auto", learners use the devices of the host in turn.
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
    """Return device memory reserved by this process, used or not; CPU: 0."""
    import torch

    return torch.cuda.memory_reserved(device) if device.startswith("cuda") else 0


def use_threads(count: int) -> str:
    """Set the number of CPU threads; return a warning, or ""."""
    import torch

    torch.set_num_threads(count)
    if count <= (cores := usable_cores()):
        return ""
    return (
        f"computes in {count} threads (learner_threads), and its host has {cores:g} cores: the "
        "threads wait for each other, so updates take longer"
    )
