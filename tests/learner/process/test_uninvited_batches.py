"""Batches that the driver has not asked for, from somebody who has the run's token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from support.worker_world import BEGIN, GENERATION, PATIENCE, World

from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.streams.episodes import PUSH_METHOD, EpisodeSender
from juggler.runtime.streams.permits import Permits
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.v1 import episodes_pb2

MakeBatch = Callable[..., EpisodeBatch]
METADATA = call_metadata("", "run", "attacker")
UNINVITED = "has no permit of the driver's"


@pytest.fixture
def world(tmp_path: Path, make_batch: MakeBatch) -> Iterator[World]:
    made = World(tmp_path, make_batch)
    yield made
    made.close()


def _header(batch_id: int, batch: EpisodeBatch, permit: bytes = b"") -> episodes_pb2.BatchHeader:
    return episodes_pb2.BatchHeader(
        module_id="default",
        batch_id=batch_id,
        envrunner="envrunner-0",
        generation=GENERATION,
        live_steps=batch.live_steps,
        version=Version(GENERATION, BEGIN.update).message(),
        permit=permit,
    )


def test_thousands_of_batches_with_ids_to_come_keep_no_honest_one_out(
    world: World, make_batch: MakeBatch
) -> None:
    batch = make_batch(4, 8)
    settled: SimpleQueue[tuple[int, str, str]] = SimpleQueue()
    (address,) = world.addresses
    attacker = EpisodeSender(address, METADATA, lambda *each: settled.put(each))
    for batch_id in range(3000):
        attacker.send(_header(batch_id, batch), {"default": batch.to_tree()})
    became = [settled.get(timeout=PATIENCE) for _ in range(3000)]
    attacker.close()
    assert {reason for _, reason, _ in became} == {"learner_lost"}
    assert any(UNINVITED in why for _, _, why in became)
    for batch_id in (1, 2, 2999):
        assert world.send(batch_id, BEGIN.update) == ("", ""), "an honest one"
    assert sorted(world.driver.arrived) == [1, 2, 2999], "nothing else is here"
    done = world.update(1, 2, 2999)
    assert [used.dropped for used in done.batches] == ["", "", ""]
    assert done.steps_trained == world.steps(1, 2, 2999)


@pytest.mark.parametrize(
    "permit",
    [b"", b"\0" * 16, Permits.new().of(7, "default"), b"x" * 5000],
    ids=lambda each: str(len(each)),
)
def test_what_is_no_permit_ends_the_stream_before_memory_is_taken(
    world: World, make_batch: MakeBatch, permit: bytes
) -> None:
    batch = make_batch(4, 8)
    chunks = list(encode_frame(_header(7, batch, permit), {"default": batch.to_tree()}))
    # It says that a gigabyte follows, none of which comes.
    first = episodes_pb2.EpisodeChunk.FromString(chunks[0])
    first.tree.payload_size = 1 << 30
    (address,) = world.addresses
    with dial(address) as channel:
        push = channel.stream_stream(PUSH_METHOD)
        with pytest.raises(grpc.RpcError, match=UNINVITED):
            list(push(iter([first.SerializeToString()]), metadata=METADATA, timeout=PATIENCE))
    assert world.send(7, BEGIN.update) == ("", "")


def test_a_permit_is_for_one_batch_of_one_module_and_of_one_key() -> None:
    ours, others = Permits.new(), Permits.new()
    header = episodes_pb2.BatchHeader(
        module_id="main", batch_id=2**64 - 1, permit=ours.of(2**64 - 1, "main")
    )
    ours.check(header)
    Permits(ours.key).check(header)
    for permits, batch_id in ((others, 2**64 - 1), (ours, 2**64 - 2)):
        header.batch_id = batch_id
        with pytest.raises(WireError, match=UNINVITED):
            permits.check(header)
    header.batch_id, header.module_id = 2**64 - 1, "rival"
    with pytest.raises(WireError, match=UNINVITED):
        ours.check(header)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="a key for permits of 0 bytes: it has 32"):
        Permits(b"")
