"""The state of connectors that EnvRunners gather and the driver merges. No torch here.

It is a tree: name of a connector -> … -> moments. The driver knows nothing else about it, so a
user's connectors need not be importable where the driver runs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from juggler.runtime.checkpoints.checkpoint import (
    OLD_MODULE,
    Checkpoint,
    CheckpointError,
)
from juggler.runtime.connectors.moments import Moments, is_moments
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES, FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Path, Tree, path_name
from juggler.runtime.wire.v1 import training_pb2

#: The largest state, which has to fit into one message.
MAX_STATE_BYTES = MAX_MESSAGE_BYTES // 2

State = Mapping[str, Tree]


def merge(one: State, other: State) -> State:
    """The state after all samples behind both states.

    Raises:
        ValueError: they belong to different connectors.
    """
    merged = _merge(one, other, ())
    assert isinstance(merged, Mapping)
    return merged


def connector_branch(states: Mapping[str, State]) -> State:
    """The branch of a checkpoint's tree for what connectors have learned, by module id; {} where
    they have learned nothing. The module of a run with only one, "default", has it to itself."""
    if set(states) == {OLD_MODULE}:
        return states[OLD_MODULE]
    return {module_id: state for module_id, state in states.items() if state}


def check(state: Tree) -> State:
    """A state from an untrusted source, with all of its moments checked.

    Raises:
        ValueError: it is not a state.
    """
    if not isinstance(state, Mapping) or is_moments(state):
        raise ValueError("a state of connectors is a branch of their names")
    _check(state, ())
    return state


def connector_state(checkpoint: Checkpoint, module_id: str = OLD_MODULE) -> State:
    """What a module's connectors in EnvRunners had learned at the checkpoint; {} for nothing.

    Raises:
        CheckpointError: the checkpoint's data are damaged.
    """
    try:
        return check(checkpoint.learned_of(module_id))
    except ValueError as error:
        where = checkpoint.path or pathlib.Path("in memory")
        raise CheckpointError(where, f"its connectors are damaged: {error}") from error


def to_bytes(state: State) -> bytes:
    """The state as a serialized StateChunk, for a message.

    Raises:
        ValueError: it is too large for one message.
    """
    try:
        chunks = list(encode_frame(training_pb2.StateHeader(), state, chunk_bytes=MAX_STATE_BYTES))
    except WireError as error:
        raise ValueError(f"the state of connectors cannot be sent: {error}") from error
    if len(chunks) > 1:
        raise ValueError(
            f"the state of connectors takes more than {MAX_STATE_BYTES >> 20} MiB, the most that "
            "can be sent: shrink the observations before they are filtered"
        )
    return chunks[0]


def from_bytes(content: bytes) -> State:
    """The state in bytes that should come from `to_bytes`.

    Raises:
        ValueError: they hold no state.
    """
    reader = FrameReader(training_pb2.StateHeader, Limits(payload_bytes=MAX_STATE_BYTES))
    frame = reader.feed(content)
    if frame is None:
        raise ValueError("a state of connectors that ends in the middle")
    return check(frame.tree)


def _merge(one: Tree, other: Tree, path: Path) -> Tree:
    if is_moments(one) and is_moments(other):
        ours, theirs = Moments.from_tree(one), Moments.from_tree(other)
        if ours.mean.shape != theirs.mean.shape:
            raise ValueError(
                f"moments at {path_name(path)} of shapes {ours.mean.shape} and "
                f"{theirs.mean.shape} cannot be merged"
            )
        return ours.merged(theirs).to_tree()
    if not isinstance(one, Mapping) or not isinstance(other, Mapping) or one.keys() != other.keys():
        raise ValueError(f"states of other connectors: they differ at {path_name(path)}")
    return {key: _merge(one[key], other[key], (*path, key)) for key in one}


def _check(tree: Tree, path: Path) -> None:
    if is_moments(tree):
        try:
            Moments.from_tree(tree)
        except ValueError as error:
            raise ValueError(f"at {path_name(path)}: {error}") from None
    elif isinstance(tree, Mapping):
        for key, branch in tree.items():
            _check(branch, (*path, key))
    else:
        raise ValueError(f"{path_name(path)} in a state of connectors belongs to no moments")
