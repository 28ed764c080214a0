"""Learners that make updates together, each in a thread of its own, over real process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

import torch

from juggler.learner.group.peers import Peers
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.learner import Learner

T = TypeVar("T")
_GENERATIONS = count(1)


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


def join(learners: Sequence[Learner]) -> list[int]:
    """Make a group of them; the hashes of their states."""
    pairs = zip(learners, meet(len(learners)), strict=True)
    return at_once([lambda x=x, peers=peers: x.join(peers) for x, peers in pairs])  # type: ignore[misc]


def update(learners: Sequence[Learner], shards: Sequence[Any], **passes: int) -> None:
    """One update together, each on its own episodes."""
    pairs = zip(learners, shards, strict=True)
    at_once([lambda x=x, own=own: x.update_from_episodes(own, **passes) for x, own in pairs])  # type: ignore[misc]
