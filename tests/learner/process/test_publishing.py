"""What a learner's process publishes, reports and hands over."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import MakeBatch
from support.changes import Changes
from support.fake_streams import PATIENCE, FakeDevice
from support.small_cores import make_core, samples_of
from torch import Tensor

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.group.peers import state_hash
from juggler.learner.learner import Learner
from juggler.learner.process import hosted_module as state_handover
from juggler.learner.process import learner_program as devices
from juggler.learner.process.hosted_module import CLIPPED, ClippedActions, StateHandover
from juggler.learner.process.learner_program import (
    LearnerProgram,
    device_for,
    parse_devices,
    use_threads,
)
from juggler.learner.process.learner_worker import LearnerServer
from juggler.learner.process.overlap import PendingMetrics, Publishing, SideStream
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.memory_socket import connect, memory_path
from juggler.runtime.streams.shared_directory import learner_socket
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2

CPU = torch.device("cpu")


class Publisher:
    """Notes what it gets; busy as long as `free` is not set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.begun: list[Version] = []
        self.published: list[tuple[Version, Any]] = []
        self.changes = Changes()
        self.failure: Exception | None = None

    def publish(self, version: Version, tree: Any) -> None:
        self.begun.append(version)
        self.changes.note()
        assert self.free.wait(PATIENCE)
        if self.failure is not None:
            raise self.failure
        self.published.append((version, tree))
        self.changes.note()

    @property
    def versions(self) -> list[Version]:
        return [version for version, _ in self.published]


def params(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"weight": torch.full((2,), value)}


@pytest.fixture
def publisher() -> Publisher:
    return Publisher()


@pytest.fixture
def publishing(publisher: Publisher) -> Iterator[Publishing]:
    made = Publishing(publisher.publish, SideStream(CPU))
    yield made
    publisher.free.set()
    made.close()


def test_a_publisher_that_is_behind_skips_to_the_newest(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.free.clear()
    publishing.offer(Version(1, 1), params(1.0))
    publisher.changes.wait_for(lambda: publisher.begun)
    for update in range(2, 100):
        publishing.offer(Version(1, update), params(update))
    assert not publisher.published, "offering never waits"
    publisher.free.set()
    publisher.changes.wait_for(lambda: len(publisher.published) == 2)
    assert publisher.versions == [(1, 1), (1, 99)]
    np.testing.assert_array_equal(publisher.published[1][1]["weight"], np.float32([99, 99]))


def test_versions_of_a_new_generation_come_after_those_of_the_old_one(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.free.clear()
    publishing.offer(Version(1, 7), params(1.0))
    publisher.changes.wait_for(lambda: publisher.begun)
    publishing.offer(Version(1, 8), params(2.0))
    publishing.offer(Version(2, 7), params(1.0))
    publisher.free.set()
    publisher.changes.wait_for(lambda: len(publisher.published) == 2)
    assert publisher.versions == [(1, 7), (2, 7)]


def test_a_version_that_cannot_be_published_fails_the_next_one(
    publisher: Publisher, publishing: Publishing
) -> None:
    publisher.failure = ValueError("no room")
    publishing.offer(Version(1, 1), params(1.0))
    publishing._thread.join(PATIENCE)
    with pytest.raises(ValueError, match="no room"):
        publishing.offer(Version(1, 2), params(1.0))


def test_a_thread_that_cannot_use_its_device_fails_the_next_version(
    publisher: Publisher,
) -> None:
    side = SideStream(CPU)

    def lost() -> None:
        raise RuntimeError("no device")

    side.enter_thread = lost  # type: ignore[method-assign]
    made = Publishing(publisher.publish, side)
    made._thread.join(PATIENCE)
    with pytest.raises(RuntimeError, match="no device"):
        made.offer(Version(1, 1), params(1.0))
    made.close()


def test_weights_are_copied_behind_their_update_and_sent_when_they_are_there(
    publisher: Publisher,
) -> None:
    device = FakeDevice()
    device.slow = True
    publishing = Publishing(publisher.publish, SideStream(CPU, device))
    publishing.offer(Version(1, 1), params(1.0))
    device.changes.wait_for(lambda: device.awaited)
    assert "publishing" in device.threads, "pinned memory is its own"
    made, copied = device.events
    assert made.stream is device.main
    assert copied.stream.waited_for == [made], "the copy waits for the update"
    assert device.awaited == [copied], "a thread waits for the copy alone"
    assert not publisher.begun
    copied.finish()
    publisher.changes.wait_for(lambda: publisher.published)
    publishing.close()


# Metrics of updates on their way to the driver: what is averaged, and what ends a run.


def of_update(**numbers: float) -> dict[str, Tensor]:
    return {name: torch.tensor(x) for name, x in {"skipped": 0.0, **numbers}.items()}  # [] each


def test_means_are_of_all_updates_since_the_last_ones() -> None:
    metrics = PendingMetrics("default")
    for update, values in enumerate([(1.0, 5.0, 6.0), (10.0, 30.0)]):
        for value in values:
            metrics.add(of_update(loss=value))
        assert metrics.collect_all(update) == {"loss": [4.0, 20.0][update], "skipped": 0.0}
        assert metrics.collect_all(update) == {}


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_a_mean_is_of_the_updates_that_have_the_metric(order: list[int]) -> None:
    updates = [
        of_update(value_loss=1.0),
        of_update(value_loss=3.0, policy_loss=7.0),
        of_update(value_loss=5.0, policy_loss=8.0),
    ]
    metrics = PendingMetrics("default")
    for place in order:
        metrics.add(updates[place])
    assert metrics.collect(3) == {"value_loss": 3.0, "policy_loss": 7.5, "skipped": 0.0}


def test_a_core_need_not_say_whether_it_skips_steps() -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 7):
        metrics.add({"loss": torch.tensor(float(update))})  # []
        assert metrics.collect_all(update) == {"loss": float(update)}


def test_synchronous_runs_have_the_metrics_of_every_update() -> None:
    metrics = PendingMetrics("default", every_update=True)
    for update in range(1, 30):
        metrics.add(of_update(loss=float(update)))
        assert metrics.collect(update)["loss"] == update


def test_a_core_may_have_no_metrics_at_all() -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 7):
        metrics.add({})
        assert metrics.collect_all(update) == {}
    metrics.add({"loss": torch.tensor(2.0)})  # []
    assert metrics.collect_all(7) == {"loss": 2.0}
    assert fetch_metrics({}) == {}, "an update was made"
    assert fetch_metrics({}) == {}


def test_large_numbers_arrive_exactly() -> None:
    rows = torch.tensor(2.0**24 + 1, dtype=torch.float64)  # [] more than 32 bits can say
    metrics = PendingMetrics("default")
    for _ in range(2):
        metrics.add({**of_update(), "replay_rows": rows})
    assert metrics.collect(2)["replay_rows"] == 2.0**24 + 1


def test_td3_tells_of_its_policy_though_not_every_update_moves_it(make_batch: MakeBatch) -> None:
    learner = Learner(make_core("td3", replay_batch_size=32, replay_ratio=1.0), seed=1)
    found = [learner.step(sample) for sample in samples_of(make_batch, 8)]
    updates = [numbers for numbers in found if numbers]
    moves = ["policy_loss" in numbers for numbers in updates]
    assert moves == [False, True, False, True, False, True], "a step of the optimizer in each"
    for count in (2, 3):
        metrics = PendingMetrics("default")
        for numbers in updates[:count]:
            metrics.add(numbers)
        assert metrics.collect(count)["policy_loss"] == updates[1]["policy_loss"]


@pytest.mark.parametrize("share", [0.0, 1 / 32, 31 / 32])
def test_updates_in_which_some_step_is_finite_do_not_end_a_run(share: float) -> None:
    metrics = PendingMetrics("default")
    for update in range(1, 20):
        metrics.add(of_update(skipped=1.0 if update % 5 else share))
        metrics.collect_all(update)
        assert metrics.hopeless == ""


def test_five_updates_in_a_row_without_a_finite_step_end_a_run() -> None:
    metrics = PendingMetrics("default")
    for update, share in enumerate([1.0, 0.5, 1.0, 1.0, 1.0, 1.0], start=1):
        metrics.add(of_update(skipped=share))
        assert metrics.collect_all(update) == {"skipped": share}
        assert metrics.hopeless == ""
    metrics.add(of_update(skipped=1.0))
    metrics.collect_all(7)
    assert re.search("in any step of 5 updates in a row.* update 7", metrics.hopeless)


# A learner that lost its driver hands its state over to the program that replaces it.


AT = Version(3, 1)


def make_learner(seed: int) -> Learner:
    box = spaces.Box(-10, 10, (4,), np.float32)
    return build_learner(
        ImpalaConfig(), None, box, spaces.Discrete(2), {"hidden_sizes": [8]}, seed=seed
    )


@pytest.fixture
def trained(make_batch: Callable[..., Any]) -> Iterator[Learner]:
    learner = make_learner(seed=0)
    learner.update_from_episodes([make_batch()])
    yield learner
    if (number := os.environ.pop("JUGGLER_STATE_HANDOVER", "")) != "":
        os.close(int(number))


def handed_over(learner: Learner, updates: int = 0) -> StateHandover:
    """Of run "here"; what the next program finds."""
    handover = StateHandover()
    for number in range(updates):
        done = training_pb2.UpdateDone(update_id=number, version=AT.message())
        handover.updated(done, most_in_flight=2)
    state_handover.hand_over([handover.chunks("main", learner, "here", AT)])
    return found()


def found() -> StateHandover:
    """What the next program finds of the module "main"."""
    return StateHandover(state_handover.receive().get("main"))


def take_over(
    handover: StateHandover, learner: Learner, run_id: str = "here", oldest: Version | None = AT
):
    command, ready = training_pb2.AddModule(), training_pb2.ModuleReady()
    if oldest is not None:
        command.oldest_handover.CopyFrom(oldest.message())
    version = handover.take_over(learner, run_id, command, ready)
    assert (version is not None) == ready.HasField("handed_over") == handover.weights_known
    return version, ready


def test_the_next_program_takes_the_state_over_to_the_bit(trained: Learner) -> None:
    handover, learner = handed_over(trained, updates=5), make_learner(seed=1)
    version, ready = take_over(handover, learner)
    assert version == Version.of(ready.handed_over) == AT
    assert [done.update_id for done in ready.last_updates] == [3, 4], "as many as were in flight"
    assert (state_hash(learner), learner.updates) == (state_hash(trained), 1)


def test_it_still_has_the_updates_to_tell_when_it_is_cut_off_before_it_could(
    trained: Learner,
) -> None:
    handover, learner = handed_over(trained, updates=2), make_learner(seed=1)
    take_over(handover, learner)
    state_handover.hand_over([handover.chunks("main", learner, "here", AT)])
    _, ready = take_over(found(), make_learner(seed=2))
    assert [done.update_id for done in ready.last_updates] == [0, 1]


@pytest.mark.parametrize(
    ("run_id", "oldest"), [("another", AT), ("here", None), ("here", Version(4, 0))]
)
def test_a_driver_that_has_no_use_for_it_is_told_nothing(
    trained: Learner, run_id: str, oldest: Version | None
) -> None:
    handover, learner = handed_over(trained), make_learner(seed=1)
    before = state_hash(learner)
    version, ready = take_over(handover, learner, run_id, oldest)
    assert version is None
    assert ready == training_pb2.ModuleReady()
    assert (state_hash(learner), learner.updates) == (before, 0)


def test_it_is_there_once_and_its_file_is_closed(trained: Learner) -> None:
    files = os.listdir("/proc/self/fd")
    handed_over(trained)
    assert os.listdir("/proc/self/fd") == files
    version, _ = take_over(found(), make_learner(seed=1))
    assert version is None


def test_a_python_without_files_in_memory_hands_over_in_one_on_disk(
    trained: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    state_handover.hand_over([StateHandover().chunks("main", trained, "here", AT)])
    assert os.get_inheritable(int(os.environ["JUGGLER_STATE_HANDOVER"]))
    learner = make_learner(seed=1)
    version, _ = take_over(found(), learner)
    assert version == AT
    assert state_hash(learner) == state_hash(trained)


def test_every_module_of_a_process_goes_on_from_its_own(
    trained: Learner, make_batch: Callable[..., Any]
) -> None:
    other = make_learner(seed=5)
    for _ in range(2):
        other.update_from_episodes([make_batch(seed=3)])
    states = {"main": (trained, Version(3, 1)), "rival": (other, Version(7, 2))}
    state_handover.hand_over(
        StateHandover().chunks(module_id, learner, "here", version)
        for module_id, (learner, version) in states.items()
    )
    received = state_handover.receive()
    assert received.keys() == states.keys()
    for module_id, (learner, version) in states.items():
        successor = make_learner(seed=1)
        went_on, ready = take_over(StateHandover(received[module_id]), successor)
        assert went_on == Version.of(ready.handed_over) == version
        assert state_hash(successor) == state_hash(learner)


def test_a_state_that_ends_in_the_middle_is_said_and_not_used() -> None:
    large = {"weight": np.zeros(2 << 20, np.float32)}
    *chunks, _ = encode_frame(training_pb2.HandoverHeader(module_id="main"), large, digest=True)
    padding = encode_frame(training_pb2.HandoverHeader(module_id="rival"), large, digest=True)
    state_handover.hand_over([padding, iter(chunks)])
    with pytest.raises(ValueError, match="ends in the middle"):
        state_handover.receive()


# The share of actions outside of their bounds, and what is said of it.


def batch(actions: Any, live: Any = ((True, True),)) -> Any:
    """N = 1, T = 2."""
    return SimpleNamespace(actions=actions, live=np.array(live))


def test_the_share_is_of_live_numbers_with_a_bound() -> None:
    clipped = ClippedActions("default", spaces.Box(5, 9, (2,), np.float32), print)
    actions = np.array([[[4, 7], [1, 1]]], np.float32)  # [1, 2, 2]
    assert clipped.metrics([batch(actions)]) == {CLIPPED: 0.75}
    assert clipped.metrics([batch(actions, [[True, False]])]) == {CLIPPED: 0.5}
    assert clipped.metrics([batch(actions), batch(actions + 4)]) == {CLIPPED: 0.5}
    assert clipped.metrics([]) == {}
    rounded = np.full((1, 2, 2), np.nextafter(np.float32(9), np.float32(10)))
    assert clipped.metrics([batch(rounded)]) == {CLIPPED: 0}
    box = spaces.Box(0, np.inf, (), np.float32)
    both = spaces.Dict({"push": box, "turn": spaces.Discrete(2)})
    within = ClippedActions("default", both, print)
    actions = {"push": np.array([[-1, 1e9]]), "turn": np.ones((1, 2))}
    assert within.metrics([batch(actions)]) == {CLIPPED: 0.5}


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (1,), np.float32)]
)
def test_without_bounds_nothing_is_clipped(space: spaces.Space[Any]) -> None:
    assert ClippedActions("default", space, print).metrics([batch(np.zeros((1, 2, 1)))]) == {}


def test_one_warning_says_that_nearly_all_is_clipped_and_what_to_do() -> None:
    notes: list[str] = []
    clipped = ClippedActions("walker", spaces.Box(5, 9, (50,), np.float32), notes.append)
    few, many = np.full((1, 2, 50), 7.0), np.full((1, 2, 50), 1.5)
    many[0, 0, :2] = 7.0
    for actions in (few, many, many):
        clipped.metrics([batch(actions)])
    (note,) = notes
    assert "98% of the numbers in actions of module 'walker'" in note
    assert "rescale_actions" in note
    suiting = ClippedActions("walker", spaces.Box(-1, 1, (50,), np.float32), notes.append)
    assert suiting.metrics([batch(many)]) == {CLIPPED: 1.0}
    assert notes == [note], "once is enough, and it was learned to choose bounds of 1"


# What the key `devices` says.


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ["auto"]),
        ("cpu", ["cpu"]),
        ("cuda:0, cuda:1", ["cuda:0", "cuda:1"]),
        ("fake:3", ["fake:0", "fake:1", "fake:2"]),
        ("cuda:1,cpu,cuda:1", ["cuda:1", "cpu", "cuda:1"]),
    ],
)
def test_devices_are_named_one_after_the_other(text: str, names: list[str]) -> None:
    assert parse_devices(text) == names


@pytest.mark.parametrize("text", ["", "gpu", "cuda", "cuda:x", "fake:0", "cpu,", "tpu:1,cpu"])
def test_what_is_no_device_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices = .* is not a device"):
        parse_devices(text)


def test_learners_take_turns_on_the_devices_of_their_host() -> None:
    here = ["cuda:0", "cuda:1"]
    assert [device_for("auto", index, here) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_for("auto", 5, ["cpu"]) == "cpu"
    assert device_for("fake:3", 0, here) == "cpu"
    assert device_for("cuda:1", 0, here) == "cuda:1"


def test_a_gpu_that_a_host_has_not_got_is_told_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="devices = 'cuda:2': this host has"):
        device_for("cuda:2", 0, ["cuda:0", "cuda:1"])
    with pytest.raises(ValueError, match="'cuda:0'") as refused:
        device_for("cuda:0", 0, ["cpu"])
    assert str(refused.value) == (
        "devices = 'cuda:0': this host has cpu: name cpu, or leave devices out; for a GPU, install "
        "a PyTorch that finds it"
    )


def test_more_threads_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2.5)
    before = torch.get_num_threads()
    try:
        assert use_threads(2) == ""
        assert torch.get_num_threads() == 2
        assert use_threads(3) == (
            "computes in 3 threads (learner_threads), and its host has 2.5 cores: the threads wait "
            "for each other, so updates take longer"
        )
    finally:
        torch.set_num_threads(before)


# A learner beside the directory in which containers of its host share memory.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LearnerServer]:
    server = LearnerServer(LearnerProgram(Contact("", socket_dir=str(tmp_path))))
    yield server
    server.close()


def test_envrunners_find_it_beside_its_own_socket_and_in_the_directory(
    server: LearnerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared := tmp_path / "shared").mkdir(mode=0o700)
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(shared))
    assert server.share_memory("run", "one") == ""
    assert server.memory is not None
    for address in (*server.addresses, learner_socket("", "run", "one")):
        server.memory.expect("token", lambda connection: connection.close())
        connect(memory_path(address), "token").close()


def test_where_the_directory_is_gone_it_says_so_and_shares_memory_beside_its_own_socket(
    server: LearnerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(tmp_path / "gone"))
    why = server.share_memory("run", "one")
    assert why.startswith(
        f"shares no memory with other containers: JUGGLER_SHARED_DIR={tmp_path}/gone: No such file"
    )
    assert server.memory is not None
    server.memory.expect("token", lambda connection: connection.close())
    (address,) = server.addresses
    connect(memory_path(address), "token").close()
