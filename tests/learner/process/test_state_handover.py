"""A learner that lost its driver hands its state over to the program that replaces it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.group.state_sync import state_hash
from juggler.learner.learner import Learner
from juggler.learner.process import state_handover
from juggler.learner.process.state_handover import StateHandover
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import training_pb2

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
