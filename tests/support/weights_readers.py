"""Readers of weights on one host; those in processes of their own can be killed and stopped."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.host_weights import Meeting
from juggler.runtime.streams.weights import WeightsSubscription
from juggler.runtime.wire.layouts import Limits
from support.weights_learner import METADATA, PATIENCE, Learner

SIZE = 50_000  # elements of float32

Join = Callable[..., WeightsSubscription]


def readers_at(server: Learner) -> int:
    return len(server.publisher._subscribers)


def relaying(readers: list[WeightsSubscription]) -> list[WeightsSubscription]:
    return [each for each in readers if each._relay is not None]


class Seen(NamedTuple):
    """What a reader has."""

    version: Version
    value: float  # of every element
    relays: bool
    follows: bool
    notes: list[str]


class ReaderProcess:
    """A subscription in a process of its own."""

    def __init__(self, address: str, *secret: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_read, args=(theirs, address, secret), daemon=True)
        self._process.start()
        theirs.close()

    def see(self, at_least: Version, seconds: float = PATIENCE) -> Seen:
        """What it has as soon as that is at least this version."""
        self._ours.send((tuple(at_least), seconds))
        assert self._ours.poll(seconds + PATIENCE)
        answer = self._ours.recv()
        if isinstance(answer, str):
            raise TimeoutError(answer)
        return Seen(*answer)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == STOP:  # until one of its threads hears of that, the others go on
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """Kill it, even where it is stopped."""
        self._process.kill()
        self._process.join(PATIENCE)


def _read(connection: Connection, address: str, secret: tuple[str, ...]) -> None:
    notes: list[str] = []
    reader = WeightsSubscription(
        address,
        METADATA,
        "envrunner-0",
        Limits(),
        retry_seconds=0.02,
        meeting=Meeting(*secret),
        alone=notes.append,
    )
    while True:
        try:
            at_least, seconds = connection.recv()
        except EOFError:
            return
        try:
            weights: Any = reader.wait_for(Version(*at_least), seconds)
        except TimeoutError as error:
            connection.send(str(error))
            continue
        values = weights.tree["default"]["weight"]
        assert values.min() == values.max()
        relays, follows = reader._relay is not None, reader._relay_connection is not None
        connection.send((weights.version, float(values[0]), relays, follows, notes))


def names_of(meeting: Meeting) -> list[int]:
    """The numbers of its names that some process has bound."""
    bound = Path("/proc/net/unix").read_text()
    return [n for n in range(3) if re.split("[:/]", meeting.address(n))[-1] in bound]


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
