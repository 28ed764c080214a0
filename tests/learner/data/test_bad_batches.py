"""Batches that no honest EnvRunner sends: each is answered with a reason, its stream ends, and an
honest EnvRunner beside it notices nothing."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.runtime.actors.credentials import CallMetadata, call_metadata, why_refused
from juggler.runtime.actors.endpoints import bind, dial, make_server
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.streams.episodes import PUSH_METHOD, EpisodeReceiver, EpisodeSender
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2
from juggler.runtime.wire.v1.tensors_pb2 import ArrayInfo, DType, TreeInfo

MakeBatch = Callable[..., EpisodeBatch]
BATCH_BYTES = 1 << 20
STREAMS = 4
METADATA = call_metadata("secret", "run", "i")


class World:
    """A learner's store at the end of a real stream, and an honest EnvRunner."""

    def __init__(self, directory: Path, make_batch: MakeBatch) -> None:
        self.address = f"unix:{directory / 'l'}"
        self.make_batch = make_batch
        self.arrived: list[HeldBatch] = []
        module = (spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2))
        self.store = BatchStore(
            {"default": module}, self.arrived.append, capacity=8, capacity_bytes=BATCH_BYTES
        )
        self.store.serve(joined=3)
        self._server = make_server(max_streams=STREAMS)
        receiver = EpisodeReceiver(
            self.store.take,
            lambda metadata: why_refused(metadata, "secret", "run"),
            Limits(payload_bytes=BATCH_BYTES),
        )
        self._server.add_generic_rpc_handlers((receiver.handler(),))
        bind(self._server, self.address)
        self._server.start()
        self._settled: SimpleQueue[tuple[int, str, str]] = SimpleQueue()
        self._honest = EpisodeSender(self.address, METADATA, lambda *a: self._settled.put(a))
        self._next_id = 1000

    def honest(self) -> tuple[str, str]:
        """What becomes of an honest EnvRunner's next batch."""
        self._next_id += 1
        batch = self.make_batch(seed=self._next_id)
        self._honest.send(header(self._next_id, batch), {"default": batch.to_tree()})
        batch_id, *settled = self._settled.get(timeout=30)
        assert batch_id == self._next_id
        self.store.pop([batch_id])
        return settled[0], settled[1]

    def push(
        self, messages: Iterator[bytes] | list[bytes], metadata: CallMetadata = METADATA
    ) -> tuple[list[str], grpc.StatusCode, str]:
        """(what was refused, how the stream ended, why)."""
        refused: list[str] = []
        with dial(self.address) as channel:
            push = channel.stream_stream(
                PUSH_METHOD, response_deserializer=episodes_pb2.Acknowledgement.FromString
            )
            call = push(iter(messages), metadata=metadata, timeout=30)
            try:
                refused += [ack.refused for ack in call if ack.refused]
            except grpc.RpcError as error:
                return refused, error.code(), str(error.details())
        return refused, grpc.StatusCode.OK, ""

    def frame(
        self,
        batch_id: int = 1,
        *,
        batch: EpisodeBatch | None = None,
        tree: Any = None,
        **columns: Any,
    ) -> list[bytes]:
        """A batch as it goes on the wire: good, but for what is said here."""
        fields = {key: columns.pop(key) for key in ("generation", "live_steps") if key in columns}
        batch = batch or self.make_batch(seed=batch_id)
        head = header(batch_id, batch, **fields)
        return list(
            encode_frame(head, {"default": replace(batch, **columns).to_tree() | (tree or {})})
        )

    def close(self) -> None:
        self._honest.close()
        self._server.stop(0).wait(10)


def header(batch_id: int, batch: EpisodeBatch, **fields: Any) -> episodes_pb2.BatchHeader:
    known = {"generation": 3, "live_steps": batch.live_steps}
    return episodes_pb2.BatchHeader(
        batch_id=batch_id,
        envrunner="envrunner-0",
        version=training_pb2.WeightsVersion(generation=3, update=1),
        **known | fields,
    )


@pytest.fixture
def world(tmp_path: Path, make_batch: MakeBatch) -> Iterator[World]:
    made = World(tmp_path, make_batch)
    yield made
    made.close()


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("a-pickle-was-loaded",)


def _declares(size: int, **array: Any) -> list[bytes]:
    """A first chunk that says it has an array of so many bytes."""
    info = ArrayInfo(
        **{"path": ["default", "x"], "dtype": DType.DTYPE_UINT8, "shape": [size]} | array
    )
    head = episodes_pb2.BatchHeader(batch_id=1, generation=3)
    tree = TreeInfo(arrays=[info], payload_size=size)
    chunk = episodes_pb2.EpisodeChunk(header=head, tree=tree, payload=b"x")
    return [chunk.SerializeToString()]


BAD: dict[str, Callable[[World], list[bytes]]] = {
    "no number at byte 0": lambda w: [b"\xff\xff\xff"],
    "the first chunk of a frame must have": lambda w: [b""],
    "the chunk is not protobuf": lambda w: [pickle.dumps(_Bomb())],
    "payload of 1099511627776 bytes is over the limit, 1048576": lambda w: _declares(1 << 40),
    "number 77 is not known": lambda w: _declares(8, dtype=77),
    "huge shape": lambda w: _declares(8, shape=[0, 2**63, 2**63]),
    "unknown modules ['other']": lambda w: list(
        encode_frame(header(1, w.make_batch()), {"other": w.make_batch().to_tree()})
    ),
    "a batch must be a branch of modules": lambda w: list(
        encode_frame(header(1, w.make_batch()), np.zeros(3))
    ),
    "column 'rewards' must be float32": lambda w: w.frame(tree={"rewards": np.zeros((3, 6))}),
    "'live' has shape (3, 7), expected": lambda w: w.frame(tree={"live": np.ones((3, 7), bool)}),
    "observations of shape [N, T, *(5,)]": lambda w: w.frame(
        batch=w.make_batch(observation_size=5)
    ),
    "must be float64, not float32": lambda w: w.frame(observations=np.zeros((3, 6, 4))),
    "actions hold a number outside 0..1": lambda w: w.frame(actions=np.full((3, 6), 9)),
    "header says 7777 live steps": lambda w: w.frame(live_steps=7777),
    "batch 1 came before": lambda w: [*w.frame(1), *w.frame(1)],
    "8 batches wait here already": lambda w: [
        chunk for batch_id in range(1, 10) for chunk in w.frame(batch_id)
    ],
    "bytes of batches wait here already": lambda w: [
        chunk
        for batch_id in (1, 2)
        for chunk in w.frame(batch_id, batch=w.make_batch(rows=50, steps=300, seed=batch_id))
    ],
}


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_batch_is_answered_with_a_reason_and_ends_its_stream(
    world: World, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert world.honest() == ("", "")
    good = iter(world.frame(500))  # what comes behind it is not read any more
    refused, code, details = world.push([*BAD[answer](world), *good])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer in details
    assert all(answer in each for each in refused)
    assert len(details) < 1000
    assert 500 not in [batch.batch_id for batch in world.arrived]
    world.store.pop(range(1, 10))
    assert world.honest() == ("", "")
    assert not (tmp_path / "a-pickle-was-loaded").exists()


def test_a_batch_for_a_predecessor_is_refused_and_its_stream_goes_on(world: World) -> None:
    refused, code, _ = world.push([*world.frame(1, generation=2), *world.frame(2)])
    assert refused == ["batch 1 is for generation 2, before 3"]
    assert code is grpc.StatusCode.OK
    assert [batch.batch_id for batch in world.arrived] == [2]


@pytest.mark.parametrize(
    ("metadata", "answer"),
    [
        ((), "the token is missing or wrong"),
        (call_metadata("guess", "run", "i"), "the token is missing or wrong"),
        (call_metadata("secret", "another", "i"), "this is run run, not 'another'"),
        ((("authorization", "Bearer secret"),), "this is run run, not ''"),
    ],
)
def test_a_stream_without_the_runs_token_and_id_is_refused(
    world: World, metadata: CallMetadata, answer: str
) -> None:
    refused, code, details = world.push(world.frame(1), metadata)
    assert (refused, code, details) == ([], grpc.StatusCode.UNAUTHENTICATED, answer)
    assert world.arrived == []
    assert world.honest() == ("", "")


def test_a_stream_too_many_is_told_so_at_once(world: World) -> None:
    waiting: SimpleQueue[None] = SimpleQueue()
    with dial(world.address) as channel:
        push = channel.stream_stream(PUSH_METHOD)
        streams = [push(iter(waiting.get, None), metadata=METADATA) for _ in range(STREAMS - 1)]
        assert world.honest() == ("", "")  # has the last one
        _, code, details = world.push(world.frame(1))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details
        assert world.honest() == ("", "")
        for stream in streams:
            waiting.put(None)
            stream.cancel()


@pytest.mark.parametrize("examples", [60, pytest.param(6_000, marks=[pytest.mark.long])])
def test_a_stream_of_damaged_batches_ends_or_goes_on_and_the_honest_one_stays(
    world: World, examples: int
) -> None:
    messages = world.frame(1)

    damage = st.lists(st.tuples(st.integers(0), st.binary(max_size=8)), max_size=3)

    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.lists(damage, min_size=1, max_size=8))
    def stream(damages: list[list[tuple[int, bytes]]]) -> None:
        damaged = []
        for each in damages:
            message = bytearray(messages[0])
            for at, content in each:
                at %= len(message)
                message[at : at + len(content)] = content
            damaged.append(bytes(message))
        refused, code, details = world.push(damaged)
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
        assert bool(details) == (code is grpc.StatusCode.INVALID_ARGUMENT)
        assert all(refused)
        world.store.pop([batch.batch_id for batch in world.arrived])
        world.arrived.clear()

    stream()
    assert world.honest() == ("", "")
