"""Learners that meet in groups, in threads or by a LearnerGroup."""

from __future__ import annotations

import time
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
from juggler.learner.group.peers import Peers
from juggler.learner.group.torch_peers import GlooPeers, MeetingPoint
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import ActorCritic

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


SPACES = {
    "observation_space": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "action_space": spaces.Discrete(2),
}
MODEL = {"hidden_sizes": [8]}


def spec(seed: int = 7, **learner: Any) -> dict[str, Any]:
    return {**SPACES, "model": MODEL, "learner": learner, "seed": seed}


PATIENCE = 120.0  # seconds until a test fails; nothing takes as long
LEARNERS: dict[str, dict[str, Any]] = {
    "main": {"algorithm": "impala", "lr": 1e-3},
    "main_slow": {"algorithm": "impala", "lr": 1e-5},
    "target": {"algorithm": "appo", "lr": 3e-3, "batch_uses": 1, "buffer_batches": 1},
    "epochs": {"algorithm": "ppo", "lr": 2e-3, "minibatches": 2, "epochs": 2},
    "short": {"algorithm": "ppo", "gamma": 0.5, "minibatches": 1},
}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


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
    """Continues once `gate` in its model_config exists; announces its wait."""

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
        if not self.gate.exists():
            self.gate.with_suffix(".waiting").touch()
        while not self.gate.exists():
            time.sleep(0.01)
        return super()._forward_train(batch)
