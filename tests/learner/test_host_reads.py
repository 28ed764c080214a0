"""An update reads nothing from its device, with few calls."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import MakeBatch
from support.worker_world import World
from torch.utils._python_dispatch import TorchDispatchMode

import juggler
from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.config import LearnerConfig
from juggler.learner.core import around_core, gradient_core
from juggler.runtime import tracing
from juggler.runtime.episodes.batch import EpisodeBatch

#: Operations whose result, or its shape, the host has to know.
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2")


class Reads(TorchDispatchMode):
    """Notes operations for which a host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype is torch.bool
            for group in args
            if isinstance(group, list | tuple)
            for each in group
        )
        if name in _READS or by_mask:
            self.found.append(name)
        return operation(*args, **(kwargs or {}))


CONFIGS: dict[str, LearnerConfig] = {
    "impala": ImpalaConfig(),
    "appo": AppoConfig(buffer_batches=2, batch_uses=2, target_kl=0.01),
    "ppo": PpoConfig(epochs=2, minibatches=2),
    "impala with rnd": ImpalaConfig(intrinsic={"kind": "rnd"}),
    "ppo with rnd": PpoConfig(epochs=2, minibatches=2, intrinsic={"kind": "rnd"}),
    "ppo with a limit": PpoConfig(epochs=2, minibatches=2, target_kl=0.01),
}


def test_reads_are_seen() -> None:
    x = torch.arange(3.0)
    with Reads() as reads:
        x[x > 1]
        x.max().item()
    assert reads.found == ["index", "_local_scalar_dense"]


@pytest.mark.parametrize("case", CONFIGS)
def test_an_update_reads_nothing_from_its_device(
    make_batch: MakeBatch, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gradient_core, around_core):  # the CPU stands for a device
        monkeypatch.setattr(module, "on_host", lambda x: False)
    learner = build_learner(
        CONFIGS[case],
        None,
        spaces.Box(-10, 10, (4,), np.float32),
        spaces.Discrete(2),
        {"hidden_sizes": [8]},
    )
    sample = learner.collated([make_batch(4, 8)])
    with Reads() as reads:
        learner.step(learner.prepared(sample))
        learner.get_params()
    assert reads.found == []


# Few calls lie between the command for an update and its loss, and docs/architecture.md lists
# them.


PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGE = str(Path(juggler.__file__).parent)


def test_nine_calls_lead_from_the_command_for_an_update_to_a_loss(
    tmp_path: Path, make_batch: Callable[..., EpisodeBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    loss = Impala.loss

    def watched(*arguments: Any) -> Any:
        stack = traceback.extract_stack()
        own = [frame for frame in stack if frame.filename.startswith(PACKAGE)]
        calls.extend(frame.name for frame in own if frame.filename != tracing.__file__)
        return loss(*arguments)

    monkeypatch.setattr(Impala, "loss", watched)
    world = World(tmp_path, make_batch)
    try:
        world.send(1, update=10)
        world.update(1)
    finally:
        world.close()
    listed = re.findall(r"^\| \d \| `\w+\.(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == 9
    assert [*calls[calls.index("_update") :], "loss"] == listed
