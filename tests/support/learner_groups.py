"""Learners that meet in groups, in threads or by a LearnerGroup."""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group.peers import PeerLost, Peers
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import ActorCritic

T = TypeVar("T")
_GENERATIONS = count(1)
PATIENCE = 120.0  # seconds until a test fails; nothing takes as long


def never() -> bool:
    return False


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """What these return, each called in a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.result(timeout=60) for future in futures]


def meet(size: int, device: torch.device | None = None) -> list[Peers]:
    """Peers by rank."""
    point, generation = MeetingPoint("127.0.0.1"), next(_GENERATIONS)

    def peers(rank: int) -> Peers:
        return GlooPeers(point.address, generation, rank, size, "127.0.0.1", never, device)

    return at_once([lambda rank=rank: peers(rank) for rank in range(size)])  # type: ignore[misc]


class ThreadPeers(Peers):
    """Peers in threads of one process, summing in order of ranks."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(parts))
        self._parts, self._barrier = parts, barrier

    def _sum_on_host(self, x: torch.Tensor) -> torch.Tensor:
        self._parts[self.rank] = x
        try:
            self._barrier.wait(PATIENCE)  # all parts are there
            total = sum(self._parts[1:], start=self._parts[0])
            self._barrier.wait(PATIENCE)  # and may change again
        except threading.BrokenBarrierError:
            raise PeerLost("a peer has left") from None
        return total

    def close(self) -> None:
        self._barrier.abort()


def meet_in_threads(size: int) -> list[Peers]:
    """Peers by rank."""
    parts, barrier = [torch.zeros(0)] * size, threading.Barrier(size)
    return [ThreadPeers(rank, parts, barrier) for rank in range(size)]


def join(
    learners: Sequence[Learner], meet: Callable[[int], list[Peers]] = meet_in_threads
) -> list[int]:
    """Make a group of them; the hashes of their states."""
    pairs = zip(learners, meet(len(learners)), strict=True)
    return at_once([lambda x=x, peers=peers: x.join(peers) for x, peers in pairs])  # type: ignore[misc]


def update(learners: Sequence[Learner], shards: Sequence[Any], **passes: int) -> None:
    """One update together, each on its own episodes."""
    pairs = zip(learners, shards, strict=True)
    at_once([lambda x=x, own=own: x.update_from_episodes(own, **passes) for x, own in pairs])  # type: ignore[misc]


SPACES = {
    "observation_space": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "action_space": spaces.Discrete(2),
}
MODEL = {"hidden_sizes": [8]}


def spec(seed: int = 7, **learner: Any) -> dict[str, Any]:
    return {**SPACES, "model": MODEL, "learner": learner, "seed": seed}


LEARNERS: dict[str, dict[str, Any]] = {
    "main": {"algorithm": "impala", "lr": 1e-3},
    "main_slow": {"algorithm": "impala", "lr": 1e-5},
    "target": {"algorithm": "appo", "lr": 3e-3, "batch_uses": 1, "buffer_batches": 1},
    "epochs": {"algorithm": "ppo", "lr": 2e-3, "minibatches": 2, "epochs": 2},
    "short": {"algorithm": "ppo", "gamma": 0.5, "minibatches": 1},
}


class Gate:
    """Keeps learners waiting, also those of other processes, until it is opened.

    Args:
        path: of a file on which it has a lock. A pipe beside it has a byte for each of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path.with_suffix(".waiting"))
        self._waiting = os.open(path.with_suffix(".waiting"), os.O_RDWR)
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def wait_for_one(self) -> None:
        assert select.select([self._waiting], [], [], PATIENCE)[0], "no module waits"
        os.read(self._waiting, 1)

    def open(self) -> None:
        self._file.close()

    def close(self) -> None:
        self.open()
        os.close(self._waiting)


def alone(name: str, seed: int = 7) -> Any:
    """The same learner in this process."""
    return build_learner(
        LEARNERS[name], None, SPACES["observation_space"], SPACES["action_space"], MODEL, seed=seed
    )


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


class Gated(ActorCritic):
    """Continues once the `Gate` at `gate` in its model_config is open."""

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        rest = dict(model_config)
        self.gate = Path(rest.pop("gate"))
        super().__init__(observation_space, action_space, rest)

    def _forward_train(self, batch: Any) -> Any:
        with self.gate.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with self.gate.with_suffix(".waiting").open("r+b", buffering=0) as waiting:
                    waiting.write(b"!")
                fcntl.flock(file, fcntl.LOCK_SH)
        return super()._forward_train(batch)
