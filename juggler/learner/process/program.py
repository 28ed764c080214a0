"""Starts and sets up learner processes. No torch: the driver imports this."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gymnasium import Space

from juggler.runtime.actors.resources import usable_cores
from juggler.runtime.actors.worker import Contact
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.nearest import all_of, one_of
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import training_pb2

LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class LearnerProgram:
    """All that a learner process is started with.

    Attributes:
        contact: how it finds its driver.
        bind: "host:port" to listen on for EnvRunners of other hosts; "": there are none.
        advertise: the address that they should dial; "": the bound one.
        insecure: whether to listen beyond loopback without encryption or authentication.
        reflection: whether tools may list the services of its server.
        own_code: cloudpickled (environment factory or None, module factory or None, connector
            classes by name), as the EnvRunners get them.
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
        device: where it computes, as named by `parse_devices`.
        threads: in which it computes on a CPU.
        updates_in_flight: the most unanswered updates of a module.
        may_meet: whether its modules may be trained together with other learners.
        shared: by pattern of names of parameters, the modules that share what it matches.
        synchronous: whether modules that share parts are published together, once each of them has
            been asked for an update. Else each is published behind its own.
        outlives_failures: whether the process answers a failed command as failed, refuses an
            invalid batch, and continues for its other modules. Otherwise it ends.
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
        learner: the fields of the algorithm's config, by name.
        module: the module's configuration.
        connectors: the table `connectors` of a configuration.
    """

    learner: dict[str, Any]
    module: ModuleConfig
    connectors: dict[str, Any]


def critic_space_of(command: training_pb2.AddModule) -> Space[Any] | None:
    """Space of a value function's private observations; None: there is none."""
    return space_from_message(command.critic_space) if command.HasField("critic_space") else None


AUTO, CPU = "auto", "cpu"


def parse_devices(text: str) -> list[str]:
    """Parse learners' devices: "auto", "cpu", "cuda:0", "fake:0".

    "fake:0" is the CPU in the role of a GPU, and "fake:4" short for four of these.

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
    """Device memory reserved by this process, used or not; CPU: 0."""
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
