"""A LearnerWorker: its books, its weights, its modules, its answers."""

from __future__ import annotations

import math
import multiprocessing
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from google.protobuf import any_pb2
from gymnasium import spaces
from support import dying_learner
from support.batches import MakeBatch
from support.worker_world import BEGIN, GENERATION, MAX_STALENESS, World, overlap_on_cpu
from torch import nn

from juggler.driver.checkpoint.snapshots import restores
from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.process import hosted_module as state_handover
from juggler.learner.process import overlap
from juggler.learner.process.learner_program import LearnerSetup, ModuleSetup
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.worker import from_json
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import Batch, RLModule
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2


@pytest.fixture(params=["in turn", "overlapped"])
def world(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    if request.param == "overlapped":
        overlap_on_cpu(monkeypatch)
    made = World(tmp_path, make_batch)
    yield made
    made.close()


def _version(done: training_pb2.UpdateDone) -> Version:
    return Version.of(done.version)


def _staleness(done: training_pb2.UpdateDone) -> dict[int, tuple[int, str]]:
    """By batch id: updates, and why it was dropped."""
    return {used.batch_id: (used.staleness, used.dropped) for used in done.batches}


def test_an_update_trains_on_its_batches_and_publishes_the_next_version(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    for batch_id in (1, 2):
        assert world.send(batch_id, update=10) == ("", "")
    done = world.update(2, 1)
    assert _staleness(done) == {1: (0, ""), 2: (0, "")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(1, 2), 0)
    assert _version(done) == (GENERATION, 11)
    assert not done.replay, "it has none"
    assert (world.weights_of(Version(GENERATION, 11)) != before).any()


def test_a_batch_of_older_weights_than_allowed_is_dropped_and_counted(world: World) -> None:
    updates = {1: 10, 2: 10 - MAX_STALENESS, 3: 9 - MAX_STALENESS, 4: 0, 5: 12}
    for batch_id, update in updates.items():
        world.send(batch_id, update)
    done = world.update(*updates)
    expected = {1: (0, ""), 2: (2, ""), 3: (3, "stale"), 4: (10, "stale"), 5: (0, "")}
    assert _staleness(done) == expected
    assert done.steps_trained == world.steps(1, 2, 5)
    assert done.steps_dropped == world.steps(3, 4)


def test_staleness_is_measured_when_a_batch_is_used(world: World) -> None:
    world.send(1, update=10)
    for batch_id in (2, 3, 4):
        world.send(batch_id, update=10)
        assert _staleness(world.update(batch_id))[batch_id][1] == ""
    assert _staleness(world.update(1)) == {1: (3, "stale")}


def test_without_a_fresh_batch_there_is_no_update(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    world.send(1, update=7)
    done = world.update(1)
    assert _version(done) == (GENERATION, 10)
    assert (done.steps_trained, done.steps_dropped) == (0, world.steps(1))
    np.testing.assert_array_equal(world.weights_of(Version(GENERATION, 10)), before)


def test_a_batch_that_is_not_here_went_with_a_predecessor(world: World) -> None:
    world.send(2, update=10)
    done = world.update(1, 2, 3)
    assert _staleness(done) == {1: (0, "restart"), 2: (0, ""), 3: (0, "restart")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(2), 0)
    done = world.update(2)
    assert _staleness(done) == {2: (0, "restart")}, "it was trained on already"
    assert _version(done) == (GENERATION, 11)


def test_discarded_batches_are_counted_and_gone(world: World) -> None:
    for batch_id in (1, 2):
        world.send(batch_id, update=10)
    world.driver.ask(training_pb2.Discard(module_id="default", batch_ids=[1, 9]), attach_pb2.Done())
    done = world.update(1, 2)
    assert _staleness(done) == {1: (0, "restart"), 2: (0, "")}
    assert (done.steps_trained, done.steps_dropped) == (world.steps(2), world.steps(1))


def test_a_higher_generation_has_the_same_weights_and_goes_on_counting(world: World) -> None:
    before = world.weights_of(Version(GENERATION, 10))
    world.join(GENERATION + 1)
    np.testing.assert_array_equal(world.weights_of(Version(GENERATION + 1, 10)), before)
    assert world.send(1, update=10) == ("", ""), "it was on its way"
    done = world.update(1)
    assert _staleness(done) == {1: (0, "")}
    assert _version(done) == (GENERATION + 1, 11)


def test_a_batch_for_a_predecessor_is_refused_and_not_counted(world: World) -> None:
    reason, explanation = world.send(1, update=10, generation=GENERATION - 1)
    assert reason == "refused"
    assert f"before {GENERATION}" in explanation
    assert world.driver.arrived == {}
    done = world.update(1)
    assert (done.steps_trained, done.steps_dropped) == (0, 0)


def test_gradients_that_stay_not_finite_are_told_with_the_module_and_the_update(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = iter([math.nan, 1.0, *[math.inf] * 5])
    learner = world.module.learner
    monkeypatch.setattr(learner, "after_gradients", lambda grads, aux: (grads * next(factors), aux))
    monkeypatch.setattr(overlap, "_METRICS_SECONDS", 0.0)
    for update in range(6):
        world.send(update, update=10 + update)
        before = learner.state["parameters"].clone()
        done = world.update(update)
        skipped = update != 1
        assert done.metrics["default"].values["skipped"] == skipped
        assert _version(done).update == 11 + update
        assert (learner.state["parameters"] == before).all() == skipped
        assert done.hopeless == ""
    world.send(6, update=16)
    said = world.update(6).hopeless
    assert re.search(r"module 'default': .* 5 updates in a row.* update 17", said)


def test_metrics_that_no_answer_has_had_are_told_when_the_driver_asks_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "_METRICS_SECONDS", math.inf)
    learner = world.module.learner
    monkeypatch.setattr(learner, "after_gradients", lambda grads, aux: (grads * math.nan, aux))
    for update in range(5):
        world.send(update, update=10 + update)
        done = world.update(update)
        assert not done.metrics
        assert done.hopeless == ""
    last = training_pb2.Update(module_id="default", metrics_only=True)
    done = world.driver.ask(last, training_pb2.UpdateDone())
    assert done.metrics["default"].values["skipped"] == 1.0
    assert re.search(r"5 updates in a row.* update 15", done.hopeless)
    assert _version(done).update == 15
    again = world.driver.ask(last, training_pb2.UpdateDone())
    assert not again.metrics, "they are told once"


# What a LearnerWorker gives out of its weights: which versions, and in how many bits.


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
    """Has trained and frozen parameters, and buffers of two dtypes."""

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


# Several modules in one LearnerWorker: what is each one's own, and whom a failure concerns.


RIVAL = 9  # the rival's generation, with weights of update 0


@pytest.fixture
def pair(make_world: MakeWorld) -> World:
    """Modules "default" and "rival"; failures end nothing."""
    made = make_world(outlives_failures=True)
    made.add("rival", max_staleness=50)
    made.join(RIVAL, "rival")
    return made


def failed(pair: World, command: Any) -> str:
    pair.driver.tell(command)
    return str(pair.driver.heard())


def test_each_module_has_its_versions_weights_and_books(pair: World) -> None:
    ours = pair.weights_of(Version(GENERATION, BEGIN.update))
    theirs = pair.weights_of(Version(RIVAL, 0), "rival")
    np.testing.assert_array_equal(ours, theirs)  # equal specs begin equal, for any id
    assert pair.send(1, BEGIN.update) == pair.send(2, BEGIN.update) == ("", "")
    assert pair.send(3, 0, RIVAL, "rival") == ("", "")
    done = pair.update(3, module_id="rival")
    assert (done.module_id, Version.of(done.version)) == ("rival", (RIVAL, 1))
    assert done.steps_trained == pair.steps(3)
    assert (pair.weights_of(Version(RIVAL, 1), "rival") != theirs).any()
    done = pair.update(1, 2)
    assert (done.module_id, Version.of(done.version)) == ("default", (GENERATION, 11))
    assert done.steps_trained == pair.steps(1, 2)
    pair.join(RIVAL + 1, "rival")
    pair.weights_of(Version(RIVAL + 1, 1), "rival")
    assert pair.module.version == (GENERATION, 11)


def test_a_learner_says_of_each_module_what_its_steps_take_and_why_it_trains_alone(
    make_world: MakeWorld,
) -> None:
    pair = make_world(may_meet=True)
    module = pair.add("replayed", algorithm="dqn", replay_capacity=10_000)
    assert pair.ready["default"].kept_bytes == 0
    assert pair.ready["replayed"].kept_bytes == int(module.learner.kept_bytes) > 10_000
    pair.add("many", algorithm="support.own_algorithms:Many")
    assert pair.ready["default"].why_alone == ""
    told = pair.ready["many"].why_alone
    assert told.endswith("cannot train in a group of learners")
    assert pair.ready["many"].meeting_point, "it does not say so for want of one"


def test_a_batch_is_of_the_module_that_it_was_asked_for(pair: World) -> None:
    reason, explanation = pair.send(1, 0, RIVAL, "stranger")
    assert (reason, explanation) == ("refused", "no module 'stranger' is here")
    assert pair.send(1, 0, RIVAL, "rival") == ("", "")
    done = pair.update(1)
    assert [used.dropped for used in done.batches] == ["restart"], "it is not the default one's"
    assert pair.update(1, module_id="rival").steps_trained == pair.steps(1)


def test_what_one_module_cannot_do_concerns_no_other(
    pair: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = pair.worker.modules["rival"].learner
    monkeypatch.setattr(rival, "step", lambda sample: 1 / 0)
    pair.send(1, 0, RIVAL, "rival")
    pair.ask_for_update(1, module_id="rival")
    assert "division by zero" in str(pair.driver.heard())
    assert "no module 'rivl' is here: did you mean 'rival'" in failed(
        pair, training_pb2.Update(module_id="rivl", batch_ids=[1])
    )
    assert "module 'rival' is here already" in failed(
        pair, training_pb2.AddModule(module_id="rival")
    )
    pair.send(2, BEGIN.update)
    assert Version.of(pair.update(2).version) == (GENERATION, 11)


def test_modules_of_a_process_share_the_memory_of_waiting_batches(pair: World) -> None:
    stores = [module.store for module in pair.worker.modules.values()]
    assert pair.send(1, 0, RIVAL, "rival") == ("", "")
    held = sum(store.held_bytes for store in stores)
    for store in stores:
        store._capacity_bytes = 3 * held // 2
    said = f"{held} bytes of batches are waiting already"
    assert pair.send(2, BEGIN.update) == ("refused", said)
    pair.update(1, module_id="rival")
    assert pair.send(3, BEGIN.update) == ("", "")


def test_an_exact_update_is_made_of_all_its_batches_or_not_at_all(
    pair: World, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch_id in (1, 2, 3):
        pair.send(batch_id, update=0)  # long too old for an update of a run
    done = pair.update(1, exact=True, num_epochs=2)
    assert [used.batch_id for used in done.batches] == [1]
    assert done.metrics["default"].values["skipped"] == 0.0
    assert Version.of(done.version).update == BEGIN.update + 1
    pair.driver.tell(training_pb2.Update(module_id="default", batch_ids=[2, 4], exact=True))
    # Batch 4 comes while the update waits for it, and is not what its header says.
    header = episodes_pb2.BatchHeader(
        batch_id=4, generation=GENERATION, live_steps=1, module_id="default"
    )
    reason = pair.send_as(header, make_batch(4, 8))
    assert reason == ("refused", str(pair.driver.heard()))
    assert reason[1].startswith("header says 1 live steps, found ")
    held = pair.module.store.peek([2, 3])
    assert [batch.batch_id for batch in held] == [3]
    monkeypatch.setattr(
        pair.module.learner, "after_gradients", lambda grads, aux: (grads * math.nan, aux)
    )
    assert "not finite, so this update changed nothing" in failed(
        pair, training_pb2.Update(module_id="default", batch_ids=[3], exact=True)
    )


def test_a_module_that_is_removed_leaves_the_others_and_may_come_back(pair: World) -> None:
    pair.driver.ask(training_pb2.RemoveModule(module_id="rival"), attach_pb2.Done())
    assert pair.send(1, 0, RIVAL, "rival") == ("refused", "no module 'rival' is here")
    assert pair.send(2, BEGIN.update) == ("", "")
    pair.add("rival")
    pair.join(RIVAL + 1, "rival")
    pair.weights_of(Version(RIVAL + 1, 0), "rival")


def test_weights_and_states_go_from_one_module_to_another(pair: World) -> None:
    pair.send(1, BEGIN.update)
    pair.update(1)
    before = pair.weights_of(Version(GENERATION, 11))
    chunk = pair.driver.ask(training_pb2.Snapshot(module_id="default"), any_pb2.Any())
    part = training_pb2.Restore(
        module_id="rival", chunk=chunk.value, last=True, state_bytes=1 << 20
    )
    pair.driver.ask(part, attach_pb2.Done())
    pair.join(RIVAL + 1, "rival")
    np.testing.assert_array_equal(pair.weights_of(Version(RIVAL + 1, 11), "rival"), before)


def test_a_setup_that_lacks_something_or_has_more_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"an invalid LearnerSetup: .*`may_meet`"):
        from_json('{"device": "cpu", "updates_in_flight": 2}', LearnerSetup)
    with pytest.raises(ValueError, match="an invalid ModuleSetup: Expected `object`"):
        from_json('{"learner": {}, "module": 3, "connectors": {}}', ModuleSetup)


def test_a_module_that_was_handed_its_state_takes_the_weights_of_a_later_reset(pair: World) -> None:
    """Without a state, the driver sends none, so the newer one counts."""
    module = pair.module
    chunks = module.handover.chunks("default", module.learner, "run", module.version)
    state_handover.hand_over([chunks])
    module.handover = state_handover.StateHandover(state_handover.receive()["default"])
    command = training_pb2.AddModule(oldest_handover=Version(0, 0).message())
    ready = training_pb2.ModuleReady()
    module.take_over("run", command, ready)
    assert ready.HasField("handed_over")
    pair.join(GENERATION + 1)
    others = pair.worker.modules["rival"].learner
    others.reset(seed=123)
    given = others.get_weights()
    for command in (
        training_pb2.Reset(module_id="default", seed=1),
        *restores("default", {"default": given}, {}, training_pb2.Restore(weights=True)),
    ):
        pair.driver.ask(command, attach_pb2.Done())
    taken = module.learner.get_weights()
    for name, weights in given.items():
        np.testing.assert_array_equal(taken[name], weights)


@pytest.mark.parametrize("selectable", [False, True])
def test_weights_of_another_network_are_refused_and_keys_are_named_where_they_help(
    pair: World, selectable: bool
) -> None:
    source = "from_checkpoint = 'runs/other'"
    weights = {"default": {"encoder.0.weight": np.ones((3, 3), np.float32)}}
    last = training_pb2.Restore(weights=True, whole=True, source=source, selectable=selectable)
    (part,) = restores("rival", weights, {}, last)
    said = failed(pair, part)
    assert said.startswith(f"{source}: weights ")
    assert "of another network" in said
    assert ("name them in from_parameters" in said) == selectable


@pytest.mark.parametrize(
    ("steps", "config"),
    [
        (9, {"algorithm": "dqn", "replay_begin": 0, "replay_batch_size": 2, "replay_ratio": 2.0}),
        (6, {"algorithm": "ppo", "epochs": 3, "minibatches": 2}),
    ],
)
def test_a_learner_makes_progress_with_each_part_of_an_update(
    make_world: MakeWorld, steps: int, config: dict[str, Any]
) -> None:
    """An update of many parts may take longer than `hang_seconds`."""
    pair = make_world(**config)
    assert pair.send(1, BEGIN.update) == ("", "")
    before = pair.driver.progressed
    done = pair.update(1)
    assert not done.peer_lost
    assert pair.driver.progressed - before >= steps


# What a learner says of its replay in each answer to an update.


def test_every_answer_says_what_became_of_all_steps_that_are_trained(
    make_world: MakeWorld,
) -> None:
    replay = {"replay_begin": 60, "replay_capacity": 100, "replay_batch_size": 8}
    world = make_world(algorithm="dqn", replay_ratio=1.0, max_staleness=100, **replay)
    for batch_id in range(1, 9):
        world.send(batch_id, update=BEGIN.update)
        done = world.update(batch_id)
        told = done.replay
        rows = [told[f"replay_rows_{what}"] for what in ("drawn", "waiting", "unused")]
        assert sum(rows) == done.steps_trained == world.steps(*range(1, batch_id + 1))
        assert told["replay_rows"] == min(100, done.steps_trained)
        missing = max(0, 60 - done.steps_trained)
        assert told["replay_steps_missing"] == missing
        assert done.seconds["waiting"] > 0
        if missing:
            assert not done.metrics, "there is nothing to learn from"
            assert rows == [0, done.steps_trained, 0]
    assert rows[0] > 0
    assert rows[2] > 0


# The books of a learner with a replay, when another one of its group is killed in an update.


@pytest.mark.slow
@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize(
    ("dies_at", "saved", "dropped", "kept"),
    [
        ("step", True, "", [1, 2, 3]),
        ("arrival", True, "learner_lost", [1, 3]),
        ("step", False, "learner_lost", [3]),
    ],
)
def test_a_step_is_trained_if_it_is_kept_and_else_lost(
    make_world: MakeWorld, dies_at: str, saved: bool, dropped: str, kept: list[int]
) -> None:
    config = asdict(
        DqnConfig(
            algorithm="dqn",
            replay_begin=1,
            replay_batch_size=8,
            replay_ratio=2.0,
            save_replay=saved,
            max_staleness=2,
        )
    )
    world = make_world(**config)
    point = world.module.membership.meeting_address()
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=dying_learner.main, args=(point, config, dies_at, ready))
    process.start()
    try:
        assert ready.wait(60)
        group = training_pb2.Group(
            module_id="default",
            generation=dying_learner.GENERATION,
            members=["learner-0", "learner-1"],
            meeting_points=[point, ""],
        )
        formed = world.driver.ask(group, training_pb2.GroupFormed())
        assert not formed.peer_lost
        for batch_id, update in ((1, 10), (2, 11)):
            world.send(batch_id, update=update, generation=dying_learner.GENERATION)
        assert not world.update(1).peer_lost
        done = world.update(2)
        assert done.peer_lost
        process.join(30)
        assert process.exitcode == -9
        assert [used.dropped for used in done.batches] == [dropped]
        world.join(dying_learner.GENERATION + 1)
        world.send(3, update=11, generation=dying_learner.GENERATION + 1)
        done = world.update(3)
        trained = [1, 2, 3] if not dropped else [1, 3]
        assert done.steps_trained == world.steps(*trained)
        assert done.steps_dropped == world.steps(1, 2, 3) - done.steps_trained
        told = world.module.learner.data.metrics()
        assert told["replay_rows"] == world.steps(*kept)
    finally:
        process.kill()
        process.join()
