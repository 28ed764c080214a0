"""What a LearnerWorker gives out of its weights: which versions, and in how many bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from google.protobuf import any_pb2
from gymnasium import spaces
from support.worker_world import BEGIN, GENERATION, World, overlap_on_cpu
from torch import nn

from juggler.learner.algorithms.registry import build_learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

MakeWorld = Callable[..., World]
VECTOR, TWO = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


@pytest.fixture
def make_world(tmp_path: Path, make_batch: Callable[..., EpisodeBatch]) -> Iterator[MakeWorld]:
    made: list[World] = []

    def make(**config: Any) -> World:
        made.append(World(tmp_path, make_batch, **config))
        return made[-1]

    yield make
    for world in made:
        world.close()


# -- versions -------------------------------------------------------------------------------------


def _published(world: World) -> list[Version]:
    """All versions from here on."""
    versions: list[Version] = []
    publish = world.worker.publisher.publish

    def note(version: Version, tree: Tree, module_id: str) -> None:
        versions.append(version)
        publish(version, tree, module_id)

    world.worker.publisher.publish = note  # type: ignore[method-assign]
    return versions


def _update(world: World, updates: int) -> None:
    for _ in range(updates):
        update = world.module.version.update
        world.send(update, update=update)
        world.update(update)


@pytest.mark.parametrize("overlapped", [False, True])
def test_with_an_interval_its_multiples_are_published_and_the_first_of_a_generation(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    if overlapped:
        overlap_on_cpu(monkeypatch)
    world = make_world(weights_interval=3, max_staleness=6)
    world.weights_of(Version(GENERATION, BEGIN.update))
    versions = _published(world)
    for multiple in (12, 15):
        _update(world, multiple - world.module.version.update)
        world.weights_of(Version(GENERATION, multiple))
    _update(world, 1)
    world.join(GENERATION + 1)
    world.weights_of(Version(GENERATION + 1, 16))
    assert versions == [(GENERATION, 12), (GENERATION, 15), (GENERATION + 1, 16)]


def test_what_a_checkpoint_holds_is_published_too_and_once(make_world: MakeWorld) -> None:
    world = make_world(weights_interval=3, max_staleness=6)
    versions = _published(world)
    for updates in (1, 0, 1):
        _update(world, updates)
        world.driver.ask(training_pb2.Snapshot(module_id="default"), any_pb2.Any())
    assert versions == [(GENERATION, 11), (GENERATION, 12)]


def test_weights_of_a_group_that_never_met_are_not_published(make_world: MakeWorld) -> None:
    world = make_world(weights_interval=3, max_staleness=6)
    versions = _published(world)
    _update(world, 1)
    world.module.membership.lost = "connection closed"
    world.driver.ask(training_pb2.Snapshot(module_id="default"), any_pb2.Any())
    assert versions == []


# -- bits -----------------------------------------------------------------------------------------


class WithBuffers(RLModule):
    """Parameters, one that is not trained, and buffers of float32 and of integers."""

    def __init__(self, *spaces_and_config: Any) -> None:
        super().__init__(*spaces_and_config)
        self.policy, self.value = nn.Linear(4, 2), nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(math.pi), requires_grad=False)  # []
        self.register_buffer("mean", torch.full((4,), math.pi))  # [4]
        self.register_buffer("places", torch.tensor([1, 2**40]))  # [2]

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"action_dist_inputs": self.policy(batch["observations"] - self.mean)}

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        values = self.value(batch["observations"]).squeeze(-1)
        return {**self._forward(batch), "values": values * self.scale}


def test_rounded_weights_come_back_as_float32_and_nothing_else_is_rounded() -> None:
    learner = build_learner({"weights_dtype": "bfloat16"}, WithBuffers, VECTOR, TWO, {}, seed=1)
    header = episodes_pb2.WeightsHeader(version=Version(1, 1).message())
    (chunk,) = encode_frame(header, learner.get_weights())
    frame = FrameReader(episodes_pb2.WeightsHeader).feed(chunk)
    assert frame is not None
    assert isinstance(frame.tree, dict)
    module = WithBuffers(VECTOR, TWO, {})
    Actor(module, rows=1, steps=1, seed=0).load(frame.tree)
    kept = build_learner({}, WithBuffers, VECTOR, TWO, {}, seed=1).get_params()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        exact = kept[name]
        rounded = name.startswith(("policy", "value"))
        assert torch.equal(tensor, exact.bfloat16().float() if rounded else exact), name
        assert tensor.dtype == exact.dtype
    assert not torch.equal(module.policy.weight, kept["policy.weight"])


def test_parameters_of_float64_are_not_rounded() -> None:
    def make(*spaces_and_config: Any) -> RLModule:
        return WithBuffers(*spaces_and_config).double()

    learner = build_learner({"weights_dtype": "bfloat16"}, make, VECTOR, TWO, {})
    assert learner.get_params()["policy.weight"].dtype == torch.float64


@pytest.mark.parametrize("overlapped", [False, True])
def test_half_the_bytes_are_sent_and_all_of_them_saved(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    if overlapped:
        overlap_on_cpu(monkeypatch)
    world = make_world(weights_dtype="bfloat16")
    _update(world, 1)
    sent = world.weights_of(Version(GENERATION, BEGIN.update + 1))
    learner = world.module.learner
    saved, _ = learner.save()
    assert {array.dtype for _, array in flatten(saved)}.isdisjoint({sent.dtype})
    monkeypatch.setattr(learner.config, "weights_dtype", "float32")
    exact = torch.cat([x.reshape(-1) for x in learner.get_params().values()])  # [P]
    assert sent.dtype == ml_dtypes.bfloat16
    assert sent.nbytes == exact.nbytes / 2
    np.testing.assert_array_equal(sent.astype(np.float32), exact.bfloat16().float().numpy())
