"""Where a Learner process can be reached: by EnvRunners, and by the other learners of its group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from juggler.learner.program import LearnerProgram
from juggler.runtime.actors.endpoints import bind


def listen(server: Any, program: LearnerProgram) -> list[str]:
    """For EnvRunners; the addresses to be told to them.

    Raises:
        EndpointError: this process cannot listen there.
    """
    addresses = []
    contact = program.contact
    if contact.socket_dir:
        path = Path(contact.socket_dir) / f"learner-{contact.index}.sock"
        path.unlink(missing_ok=True)  # a predecessor that was killed leaves its own behind
        addresses.append(bind(server, f"unix:{path}"))
    if program.bind:
        bound = bind(server, program.bind, insecure=program.insecure)
        host, _, port = program.advertise.rpartition(":")
        if program.advertise and port == "0":
            addresses.append(f"{host}:{bound.rpartition(':')[2]}")
        else:
            addresses.append(program.advertise or bound)
    return addresses


def peer_host(program: LearnerProgram) -> str:
    """By which other learners can reach this process."""
    if not program.bind:
        return "127.0.0.1"
    host = program.bind.rpartition(":")[0].strip("[]")
    anywhere = host in ("", "0.0.0.0", "::")
    return (program.advertise.rpartition(":")[0].strip("[]") if anywhere else host) or "127.0.0.1"
