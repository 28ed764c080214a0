"""Gives damaged messages to all code that reads from a network, in as many processes as there are
processors, until one raises a wrong error or the time is up.

A message is a valid one, or one of another kind, with bytes flipped, cut out, repeated or inserted,
and with huge lengths, offsets and field numbers. Each must be accepted, or refused with the error
that closes its stream and a message of sensible length. Memory must stay within the limits.

    python benchmarks/fuzz.py --seconds 120
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from gymnasium import spaces

from juggler.driver.workers.worker_events import read
from juggler.learner.data.batch_store import BatchStore
from juggler.learner.data.validation import BatchValidator
from juggler.runtime.actors.endpoints import PROTOCOL_VERSION
from juggler.runtime.actors.hub import ProtocolViolation, read_hello, read_message
from juggler.runtime.connectors.mergeable_state import from_bytes
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, spaces_pb2, training_pb2

MOST_BYTES = 1 << 20
N, T = 2, 4
AGENTS = ("left", "right")
_LONGEST_STORY = 2000  # characters of a refusal
VARINTS = [b"\x00", b"\x7f", b"\xff\x7f", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01"]
BATCH_SPACES = {"default": (spaces.Box(-9, 9, (3,), np.float32), spaces.Discrete(2))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jobs = [(given.seconds, given.seed + number) for number in range(os.cpu_count() or 1)]
    with multiprocessing.Pool(len(jobs)) as pool:
        results = pool.starmap(fuzz, jobs)
    counts: Counter[str] = sum((counts for counts, _ in results), Counter())
    frames = sum(number for key, number in counts.items() if key.endswith((" taken", " refused")))
    print(
        json.dumps(
            {
                "frames": frames,
                "crashes": counts["crashes"],
                "most_resident_megabytes": max(memory for _, memory in results),
                **dict(sorted(counts.items())),
            }
        )
    )


def fuzz(seconds: float, seed: int) -> tuple[Counter[str], float]:
    rng = random.Random(seed)
    readers = _readers()
    for reader in readers.values():
        reader.read(reader.good)
    samples = [reader.good for reader in readers.values()]
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, reader in readers.items():
            for _ in range(50):
                message = _damaged(rng, reader.good, samples)
                try:
                    reader.read(message)
                    counts[f"{name} taken"] += 1
                except reader.refuses as error:
                    counts[f"{name} refused"] += 1
                    if len(str(error)) > _LONGEST_STORY:
                        counts["crashes"] += 1
                        print(f"{name}: {message!r}: a long story: {str(error)[:200]}")
                except BaseException as error:
                    counts["crashes"] += 1
                    print(f"{name}: {message!r}: {error!r}")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return counts, kilobytes / 1024


def _damaged(rng: random.Random, sample: bytes, samples: list[bytes]) -> bytes:
    message = bytearray(sample if rng.random() < 0.95 else rng.choice(samples))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(message) + 1)
        match rng.randrange(6):
            case 0 if at < len(message):
                message[at] ^= 1 << rng.randrange(8)
            case 1:
                del message[at : at + rng.randrange(1, 40)]
            case 2:
                message[at:at] = rng.randbytes(rng.randrange(1, 12))
            case 3:
                message[at : at + 1] = rng.choice(VARINTS)
            case 4:
                message[at:at] = message[at : at + rng.randrange(1, 60)]
            case 5:
                other = rng.choice(samples)
                start = rng.randrange(len(other))
                message[at:at] = other[start : start + rng.randrange(1, 60)]
    return bytes(message)


class Reader(NamedTuple):
    """Code that reads messages.

    Attributes:
        good: a message that it takes.
        read: a message.
        refuses: the errors, and the only ones, with which it refuses others.
    """

    good: bytes
    read: Callable[[bytes], Any]
    refuses: type[Exception] | tuple[type[Exception], ...]


def _readers() -> dict[str, Reader]:
    """The readers, by the kind of message."""
    store = BatchStore(BatchValidator("default", *BATCH_SPACES["default"], {}), lambda _: None)
    version = training_pb2.WeightsVersion(generation=1, update=2)
    header = episodes_pb2.BatchHeader(
        batch_id=1, envrunner="envrunner-0", generation=1, live_steps=N * T, version=version
    )
    tree: Any = {"default": _batch()}
    (whole,) = encode_frame(header, tree)
    part = next(encode_frame(header, tree, chunk_bytes=64))
    moments = {"c": {"count": np.array(3.0), "mean": np.zeros(2), "m2": np.ones(2)}}
    (state,) = encode_frame(training_pb2.StateHeader(), moments, digest=False)
    weights = {"default": {"a.weight": np.ones((3, 2), np.float32)}}
    (published,) = encode_frame(episodes_pb2.WeightsHeader(version=version), weights, digest=True)
    hello = attach_pb2.Hello(
        protocol_version=PROTOCOL_VERSION, role="envrunner", incarnation="i", token="t"
    )
    reply = attach_pb2.Reply(id=1, last=True)
    reply.body.Pack(training_pb2.Receipt(batch_id=1, live_steps=8, version=version))
    several = attach_pb2.FromWorker(replies=[reply] * 3, heartbeat=attach_pb2.Heartbeat())
    space = spaces.Dict({"x": BATCH_SPACES["default"][0], "y": spaces.MultiDiscrete([2, 3])})

    def take(message: bytes) -> None:
        frame = FrameReader(episodes_pb2.BatchHeader, MOST_BYTES).feed(message)
        if frame is not None:
            store.insert(frame)
            store.pop([frame.header.batch_id])

    def read_space(message: bytes) -> None:
        try:
            space = spaces_pb2.Space.FromString(message)
        except DecodeError as error:
            raise WireError("no protobuf") from error
        space_from_message(space)

    return {
        "batch": Reader(whole, take, WireError),
        "first chunk": Reader(
            part, FrameReader(episodes_pb2.BatchHeader, MOST_BYTES).feed, WireError
        ),
        "weights": Reader(
            published,
            lambda m: FrameReader(episodes_pb2.WeightsHeader, MOST_BYTES, digests=True).feed(m),
            WireError,
        ),
        "connectors": Reader(state, from_bytes, ValueError),
        "hello": Reader(
            attach_pb2.FromWorker(hello=hello).SerializeToString(),
            lambda m: read_hello(m, "t", "run", ("envrunner",)),
            ProtocolViolation,
        ),
        "attach": Reader(several.SerializeToString(), read_message, ProtocolViolation),
        "space": Reader(space_to_message(space).SerializeToString(), read_space, WireError),
        **_answers(space_to_message(space)),
    }


def _answers(space: spaces_pb2.Space) -> dict[str, Reader]:
    """The driver's readers of replies and reports."""
    version = training_pb2.WeightsVersion(generation=1, update=2)
    of_agents = [
        training_pb2.AgentReturns(agent=agent, module_id="default", returns=[1.0, 2.0])
        for agent in AGENTS
    ]
    receipt = training_pb2.Receipt(
        batch_id=1,
        learner="learner-0",
        live_steps=8,
        version=version,
        episode_returns=[1.0, 2.0],
        episode_lengths=[3, 4],
        explanation="why",
        seconds={"waiting": 1.0, "inference": 2.0},
        counts={"inferences": 3.0},
        env_returns=[1.0, 2.0],
        env_lengths=[3, 4],
        agent_returns=of_agents,
    )
    used = [training_pb2.UsedBatch(batch_id=batch_id, live_steps=8) for batch_id in (1, 2)]
    done = training_pb2.UpdateDone(
        update_id=1, version=version, batches=used, seconds={"update": 1.0}
    )
    done.metrics["default"].values["loss"] = 1.0
    ready = training_pb2.Ready(
        modules=[
            training_pb2.Ready.Module(
                module_id="default", observation_space=space, action_space=space, rows=2, steps=4
            )
        ]
    )
    added = training_pb2.ModuleReady(
        module_id="default",
        description="cpu",
        meeting_point="host:1",
        handed_over=version,
        last_updates=[done],
    )
    arrived = [training_pb2.Arrival(batch_id=batch_id, live_steps=8) for batch_id in (1, 2)]
    good: dict[str, tuple[Any, dict[str, object]]] = {
        "receipt": (receipt, {"batch_id": 1, "learner": "learner-0"}),
        "answer": (done, {"update_id": 1}),
        "runner ready": (ready, {}),
        "module ready": (added, {"module_id": "default"}),
        "arrivals": (training_pb2.Arrivals(arrivals=arrived), {}),
        "note": (training_pb2.Note(text="some words"), {}),
        "group": (
            training_pb2.GroupFormed(generation=1, update=2, state_hash=3),
            {"generation": 1},
        ),
        "evaluation": (
            training_pb2.Evaluation(
                episode_returns=[1.0, 2.0], episode_lengths=[3, 4], agent_returns=of_agents
            ),
            {},
        ),
    }
    return {name: _answer(message, asked) for name, (message, asked) in good.items()}


def _answer(message: Any, asked: dict[str, object]) -> Reader:
    kind = f"type.googleapis.com/{message.DESCRIPTOR.full_name}"
    return Reader(
        message.SerializeToString(),
        lambda content: read(any_pb2.Any(type_url=kind, value=content), type(message)(), **asked),
        (TypeError, ValueError),
    )


def _batch() -> dict[str, Any]:
    """The columns of a valid batch: each row is a part of an unfinished episode."""
    rows = np.arange(N, dtype=np.int32)  # [S]; S is N
    numbers = rows.astype(np.uint64)  # [S]
    ends = np.zeros((N, T), np.bool_)  # [N, T]
    return {
        "observations": np.ones((N, T, 3), np.float32),
        "actions": np.ones((N, T), np.int64),
        "rewards": np.ones((N, T), np.float32),
        "terminated": ends,
        "truncated": ends,
        "live": ~ends,
        "action_logp": -np.ones((N, T), np.float32),
        "last_observations": np.ones((N, 3), np.float32),
        "states": {},
        "final_observations": np.ones((0, 3), np.float32),
        "final_rows": rows[:0],
        "final_steps": rows[:0],
        "segment_episodes": numbers,
        "segment_rows": rows,
        "segment_starts": 0 * rows,
        "segment_lengths": np.full(N, T, np.int32),
        "segment_offsets": 0 * rows,
        "segment_generations": numbers,
        "segment_updates": numbers,
    }


if __name__ == "__main__":
    main()
