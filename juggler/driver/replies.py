"""What workers say, held against what they were asked, before anybody believes it.

Everything here raises ValueError or TypeError where a worker says what cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message

from juggler.driver.core import events
from juggler.runtime.actors.hub_events import Left
from juggler.runtime.actors.requests import Completed
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

M = TypeVar("M", bound=Message)

_LONGEST_NOTE = 1000
_MOST_STALE_STEPS = 1 << 32  # beside one batch; a run's sum of them has to fit 63 bits


def unpack(packed: any_pb2.Any, message: M) -> M:
    """
    Raises:
        TypeError: it is another message.
        ValueError: it is none.
    """
    kind: Any = message.DESCRIPTOR
    try:
        if not packed.Unpack(message):
            raise TypeError(f"{packed.TypeName() or 'nothing'} in place of {kind.full_name}")
    except DecodeError as error:
        raise ValueError(f"bytes that are no {kind.full_name}") from error
    return message


def read_ready(body: any_pb2.Any) -> training_pb2.Ready:
    return unpack(body, training_pb2.Ready())


def read_receipt(request: training_pb2.SampleRequest, body: any_pb2.Any) -> training_pb2.Receipt:
    receipt = unpack(body, training_pb2.Receipt())
    if receipt.batch_id != request.batch_id:
        raise ValueError(f"a receipt for batch {receipt.batch_id}, not {request.batch_id}")
    if len(receipt.episode_returns) != len(receipt.episode_lengths):
        raise ValueError("a receipt with another number of returns than of lengths")
    if receipt.stale_steps > _MOST_STALE_STEPS:
        raise ValueError(f"{receipt.stale_steps} steps too old for a batch")
    return receipt


def read_arrivals(body: any_pb2.Any) -> training_pb2.Arrivals:
    return unpack(body, training_pb2.Arrivals())


def read_note(body: any_pb2.Any) -> str | None:
    """What a worker has to say to people; None: it is another report."""
    if body.TypeName() != training_pb2.Note.DESCRIPTOR.full_name:
        return None
    return " ".join(unpack(body, training_pb2.Note()).text[:_LONGEST_NOTE].split())


def read_not_begun(left: Left, unanswered: Iterable[Completed]) -> frozenset[int]:
    """Batches that an EnvRunner was asked for and made no step of, if it says what it began."""
    return frozenset(
        each.request.batch_id
        for each in unanswered
        if isinstance(each.request, training_pb2.SampleRequest)
        and left.farewell
        and each.command_id not in left.unanswered
    )


def read_update_done(
    update: training_pb2.Update, body: any_pb2.Any, newest: Version
) -> training_pb2.UpdateDone:
    """`newest`: the version that nothing before this update can exceed."""
    done = unpack(body, training_pb2.UpdateDone())
    if done.update_id != update.update_id:
        raise ValueError(f"an answer to update {done.update_id}, not {update.update_id}")
    _check_version(Version.of(done.version), newest)
    return done


def read_update_kept(
    learner: str, done: training_pb2.UpdateDone, newest: Version
) -> events.UpdateKept:
    """`newest`: as of `read_update_done`."""
    version = Version.of(done.version)
    _check_version(version, newest)
    return events.UpdateKept(learner, version, used_batches(done))


def used_batches(done: training_pb2.UpdateDone) -> tuple[events.UsedBatch, ...]:
    return tuple(
        events.UsedBatch(batch.batch_id, batch.live_steps, batch.staleness, batch.dropped)
        for batch in done.batches
    )


def read_group_formed(
    group: training_pb2.Group, body: any_pb2.Any, newest: Version
) -> training_pb2.GroupFormed:
    """`newest`: the version that nothing before this group can exceed by more than one update."""
    formed = unpack(body, training_pb2.GroupFormed())
    if formed.generation != group.generation:
        raise ValueError(f"an answer to generation {formed.generation}, not {group.generation}")
    if formed.update > newest.update + 1:
        raise ValueError(f"weights of update {formed.update}, where the newest is {newest.update}")
    return formed


def read_evaluation(body: any_pb2.Any) -> training_pb2.Evaluation:
    evaluation = unpack(body, training_pb2.Evaluation())
    if not evaluation.episode_returns:
        raise ValueError("an evaluation without an episode")
    return evaluation


def _check_version(version: Version, newest: Version) -> None:
    # Runners would wait for such weights, and in vain.
    if version.generation > newest.generation or version.update > newest.update + 1:
        raise ValueError(f"weights of {version}, where the newest can be one after {newest}")
