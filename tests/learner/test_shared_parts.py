"""Parts that modules with learners of their own share, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import any_pb2
from gymnasium import spaces
from support.batches import MakeBatch
from support.worker_world import World
from torch import Tensor, nn

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.config import LearnerConfig
from juggler.learner.core.forward import Forward, Loss
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import LearnerCore
from juggler.learner.data.sources import Columns
from juggler.learner.learner import Learner
from juggler.learner.shared_parts import SharedParts
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

VECTOR = spaces.Box(-10, 10, (4,), np.float64)
SHARED = {"encoder.*": ["left", "right"]}
LRS = {"left": 1e-2, "right": 3e-3}
CLIP = 0.5


class Doubled(RLModule):
    """A head on an encoder with statistics of batches, in float64."""

    def __init__(self, size: int = 8, frozen: bool = False) -> None:
        super().__init__(VECTOR, spaces.Discrete(2), {})
        self.encoder = nn.Sequential(nn.Linear(4, size), nn.BatchNorm1d(size), nn.Tanh()).double()
        self.encoder.requires_grad_(not frozen)
        self.head = nn.Linear(size, 1).double()

    def _forward(self, batch: Batch) -> dict[str, Any]:
        return {"values": self.head(self.encoder(batch["observations"])).squeeze(-1)}  # [B]

    def _forward_train(self, batch: Batch) -> dict[str, Any]:
        return self._forward(batch)


class Fit(GradientCore):
    """Fits values to targets, by their squared distance."""

    name = "fit"

    def loss(self, forward: Forward, columns: Columns, state: Any) -> Loss:
        errors = forward(columns)["values"] - columns["targets"]  # [B]
        return Loss(errors.square().mean(), torch.tensor(len(errors)), {}, {})


def learner(lr: float = 1e-3, seed: int = 0, make: Any = Doubled, **config: Any) -> Learner:
    return Learner(Fit(make, LearnerConfig(lr=lr, **config)), seed=seed)


def together(table: Mapping[str, list[str]] | None = None, **learners: Learner) -> SharedParts:
    """Learners whose modules share their encoders, or what the table says."""
    shared = SharedParts({"encoder.*": list(learners)} if table is None else table)
    for module_id, each in learners.items():
        shared.add(module_id, each)
    return shared


def tensors(learner: Learner) -> dict[str, Tensor]:
    own = learner.state
    return {**learner.core.flat.named(own["parameters"]), **own["buffers"]}


def columns(generator: torch.Generator) -> Columns:
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"observations": draw(16, 4), "targets": draw(16)}


def loaded(tensors: Mapping[str, Tensor], encoder: nn.Module | None = None) -> Doubled:
    """A torch module with these values, perhaps on another one's encoder."""
    module = Doubled()
    module.load_state_dict({name: x.clone() for name, x in tensors.items()})
    module.encoder = encoder or module.encoder
    return module


def test_updates_in_turns_are_those_of_torch_with_one_encoder_and_one_optimizer_of_it() -> None:
    ours = {
        name: learner(lr, seed=seed, grad_clip=CLIP) for seed, (name, lr) in enumerate(LRS.items())
    }
    before = tensors(ours["right"])["encoder.0.weight"]
    shared = together(**ours)
    assert not torch.equal(before, tensors(ours["right"])["encoder.0.weight"]), "drawn twice"
    left = loaded(tensors(ours["left"]))
    theirs = {"left": left, "right": loaded(tensors(ours["right"]), left.encoder)}
    adam = partial(torch.optim.Adam, eps=1e-5)
    of_heads = {name: adam(theirs[name].head.parameters(), lr=lr) for name, lr in LRS.items()}
    of_encoder = adam(left.encoder.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    for name in ("left", "right", "right", "left", "right", "left", "left", "left") * 5:
        sample, module = columns(generator), theirs[name]
        ours[name].step(sample)
        shared.broadcast(name)

        module.zero_grad()
        errors = module(sample)["values"] - sample["targets"]  # [B]
        errors.square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        of_encoder.param_groups[0]["lr"] = LRS[name]
        of_encoder.step()
        of_heads[name].step()
        for module_id, each in ours.items():
            expected = theirs[module_id].state_dict()
            torch.testing.assert_close(tensors(each), dict(expected), rtol=1e-10, atol=1e-12)
    for name, x in tensors(ours["left"]).items():
        assert torch.equal(x, tensors(ours["right"])[name]) == name.startswith("encoder"), name


def test_an_update_that_is_not_finite_changes_nothing_for_those_who_share() -> None:
    ours = {"left": learner(), "right": learner(seed=1)}
    shared = together(**ours)
    before = {name: tensors(each) for name, each in ours.items()}
    sample = columns(torch.Generator().manual_seed(0))
    ours["left"].step({**sample, "targets": sample["targets"] * torch.inf})
    shared.broadcast("left")
    for name, each in ours.items():
        torch.testing.assert_close(tensors(each), before[name], rtol=0, atol=0)


def test_a_state_that_is_saved_goes_on_as_if_it_had_not_been() -> None:
    ours = {"left": learner(), "right": learner(seed=1)}
    shared = together(**ours)
    generator = torch.Generator().manual_seed(0)
    ours["right"].step(columns(generator))
    shared.broadcast("right")
    again = {"left": learner(seed=2), "right": learner(seed=3)}
    shared_again = together(**again)
    for name, each in again.items():
        each.restore(*ours[name].save())
        shared_again.broadcast(name)
    for name in ("left", "right", "left"):
        sample = columns(generator)
        for learners, parts in ((ours, shared), (again, shared_again)):
            learners[name].step(sample)
            parts.broadcast(name)
    for name, each in again.items():
        np.testing.assert_equal(each.save(), ours[name].save())


def test_weights_that_are_set_become_those_of_all_who_share_them() -> None:
    ours = {"left": learner(), "right": learner(seed=1), "third": learner(seed=2)}
    shared = together(**ours)
    weights = {"encoder.0.bias": np.arange(8.0)}
    ours["right"].set_weights(weights)
    shared.broadcast("right")
    shared.remove("third")
    for each in ours.values():
        np.testing.assert_array_equal(tensors(each)["encoder.0.bias"], weights["encoder.0.bias"])
    ours["left"].step(columns(torch.Generator().manual_seed(0)))
    shared.broadcast("left")
    for name, equal in (("right", True), ("third", False)):
        same = torch.equal(
            tensors(ours[name])["encoder.0.bias"], tensors(ours["left"])["encoder.0.bias"]
        )
        assert same == equal, name


def test_partners_are_those_with_whom_parts_are_shared_directly_or_through_others() -> None:
    table = {"encoder.0.*": ["one", "two"], "encoder.1.*": ["two", "three"]}
    shared = together(table, one=learner(), two=learner(), three=learner(), four=learner())
    assert shared.partners("one") == {"two", "three"}
    assert shared.partners("two") == {"one", "three"}
    assert shared.partners("four") == shared.partners("five") == set()


@pytest.mark.parametrize(
    ("shared", "right", "error"),
    [
        ({"encodr.*": ["left", "right"]}, learner, r"'encodr\.\*' matches no parameter"),
        (
            {"encoder.*": ["left", "right"], "*.bias": ["left", "right"]},
            learner,
            r"'encoder\.\*' and '\*\.bias' both",
        ),
        (
            SHARED,
            partial(learner, make=partial(Doubled, size=9)),
            r"'encoder\.0\.weight' of modules",
        ),
        (
            SHARED,
            partial(learner, make=partial(Doubled, frozen=True)),
            r"'encoder\.0\.weight' .* is",
        ),
        (SHARED, partial(learner, adam_betas=(0.8, 0.9)), r"'encoder\.0\.weight' .* has one"),
        (
            {"*": ["left", "right"]},
            lambda: build_learner(
                ImpalaConfig(), None, VECTOR, spaces.Discrete(2), {"hidden_sizes": [8]}
            ),
            r"'\*' matches 'encoder\.1\.weight'",
        ),
    ],
)
def test_parts_that_cannot_be_shared_are_an_error_in_one_sentence(
    shared: dict[str, list[str]], right: Callable[[], Learner], error: str
) -> None:
    with pytest.raises(ValueError, match=error) as wrong:
        together(shared, left=learner(), right=right())
    assert str(wrong.value).startswith("shared: ")
    assert "\n" not in str(wrong.value)


def test_a_core_that_is_no_gradient_core_cannot_share_parts() -> None:
    class Own(LearnerCore[Any]):
        name = "own"

    wrapped: Any = Own()
    left = learner()
    left.core = wrapped
    with pytest.raises(ValueError, match="its algorithm 'own' is not a GradientCore"):
        together(left=left)


# -- in a learner process -------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, make_batch: MakeBatch) -> Iterator[World]:
    """Modules "default" and "rival" with one encoder."""
    made = World(tmp_path, make_batch, shared={"encoder.*": ["default", "rival"]})
    made.add("rival")
    made.join(9, "rival")
    yield made
    made.close()


def trees(world: World) -> list[dict[str, Any]]:
    modules = (world.worker.modules[each] for each in ("default", "rival"))
    saved: list[Any] = [module.learner.save()[0]["default"] for module in modules]
    return saved


def encoders(world: World) -> list[dict[str, Any]]:
    kinds = ("parameters", ("moments", "mean"), ("moments", "updates"))
    found = []
    for tree in trees(world):
        branches = [tree[at] if isinstance(at, str) else tree[at[0]][at[1]] for at in kinds]
        found.append(
            {
                f"{number} {name}": array
                for number, branch in enumerate(branches)
                for name, array in branch.items()
                if name.startswith("encoder.")
            }
        )
    return found


def test_an_update_of_one_module_is_one_of_the_parts_of_both(world: World) -> None:
    begun, _ = encoders(world)
    world.send(1, 10)
    world.update(1)
    one, other = encoders(world)
    np.testing.assert_equal(one, other)
    assert any((one[name] != begun[name]).any() for name in one)
    world.send(2, 0, 9, "rival")
    done = world.update(2, module_id="rival")
    assert Version.of(done.version) == (9, 1), "updates of the other module do not count as its own"
    later, other = encoders(world)
    np.testing.assert_equal(later, other)
    assert {float(later[name].max()) for name in later if name.startswith("2 ")} == {2.0}
    heads = [tree["moments"]["updates"]["policy_head.bias"].max() for tree in trees(world)]
    assert heads == [1.0, 1.0]
    world.weights_of(Version(9, 1), "rival")


def test_in_a_synchronous_run_who_share_parts_are_published_behind_the_updates_of_all(
    tmp_path: Path, make_batch: MakeBatch
) -> None:
    three = {"encoder.*": ["default", "rival"], "value_*": ["rival", "third"]}
    world = World(tmp_path, make_batch, shared=three, synchronous=True)
    try:
        for module_id in ("rival", "third"):
            world.add(module_id)
            world.join(9, module_id)
        for turn in (1, 2):
            for number, module_id in enumerate(("default", "rival", "third")):
                mine = (10, 5) if module_id == "default" else (0, 9)
                batch_id = 10 * turn + number
                world.send(batch_id, mine[0] + turn - 1, mine[1], module_id)
                world.update(batch_id, module_id=module_id)
            encoder = world.worker.modules["default"].learner.get_weights()
            published = world.weights_of(Version(5, 10 + turn))
            np.testing.assert_array_equal(
                published, np.concatenate([array.ravel() for array in encoder.values()])
            )
            for module_id in ("rival", "third"):
                world.weights_of(Version(9, turn), module_id)
    finally:
        world.close()


def test_a_state_of_one_module_is_restored_for_all_who_share_parts_with_it(world: World) -> None:
    world.send(1, 10)
    world.update(1)
    chunk = world.driver.ask(training_pb2.Snapshot(module_id="default"), any_pb2.Any()).value
    kept, _ = encoders(world)
    world.send(2, 11)
    world.update(2)
    restore = training_pb2.Restore(module_id="default", chunk=chunk, last=True, state_bytes=1 << 20)
    world.driver.ask(restore, attach_pb2.Done())
    for found in encoders(world):
        np.testing.assert_equal(found, kept)


def test_a_reset_and_another_learners_state_reach_all_who_share_parts(world: World) -> None:
    world.send(1, 10)
    world.update(1)
    trained, _ = encoders(world)
    world.driver.ask(training_pb2.Reset(module_id="default", seed=5), attach_pb2.Done())
    one, other = encoders(world)
    np.testing.assert_equal(one, other)
    assert any((one[name] != trained[name]).any() for name in one)
    # As a learner that has come back takes over the state of another one of its group.
    bias = np.arange(8, dtype=np.float32)
    world.worker.modules["default"].learner.set_weights({"encoder.0.bias": bias})
    world.join(11)
    for found in encoders(world):
        np.testing.assert_array_equal(found["0 encoder.0.bias"], bias)
