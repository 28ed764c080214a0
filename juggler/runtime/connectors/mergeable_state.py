"""Moments from EnvRunners that the driver merges, without torch."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.checkpoints.checkpoint import (
    OLD_MODULE,
    Checkpoint,
    CheckpointError,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES, FrameReader, encode_frame
from juggler.runtime.wire.trees import Path, Tree, path_name
from juggler.runtime.wire.v1 import training_pb2

#: The keys of moments in a tree.
KEYS = frozenset({"count", "mean", "m2"})


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """The mean and the variance of samples [...], for each number separately.

    Two of them are merged with the pairwise formula of Chan, Golub & LeVeque 1979, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances". It stays accurate when
    deviations are small compared with the mean; sums of squares do not (Chan, Golub & LeVeque 1983,
    "Algorithms for Computing the Sample Variance: Analysis and Recommendations").
    """

    count: NDArray[np.float64]  # []
    mean: NDArray[np.float64]  # [...]
    m2: NDArray[np.float64]  # [...] sum of squared deviations from the mean

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """Return the moments of no samples."""
        return cls(np.zeros(()), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, samples: NDArray[np.generic]) -> Moments:
        """Compute the moments of samples [B, ...], in two passes."""
        if not len(samples):
            return cls.none(samples.shape[1:])
        x = samples.astype(np.float64)  # [B, ...]
        mean = x.mean(0)  # [...]
        m2 = np.square(x - mean).sum(0)  # [...]
        return cls(np.array(float(len(x))), np.asarray(mean), np.asarray(m2))

    def merged(self, other: Moments) -> Moments:
        """Return the moments of the samples of both."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count  # []
        share = other.count / count  # []
        apart = other.mean - self.mean  # [...]
        return Moments(
            np.asarray(count),
            np.asarray(self.mean + apart * share),
            np.asarray(self.m2 + other.m2 + np.square(apart) * (self.count * share)),
        )

    @property
    def variance(self) -> NDArray[np.float64]:
        """The variance [...] of the samples; 0 without samples."""
        return np.asarray(self.m2 / np.maximum(self.count, 1))

    def to_tree(self) -> dict[str, Tree]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_tree(cls, tree: Tree) -> Moments:
        """Read the moments in a tree from an untrusted source.

        Raises:
            ValueError: the tree does not hold moments, or no samples could have these.
        """
        if not is_moments(tree):
            raise ValueError(f"moments are the arrays {sorted(KEYS)}")
        arrays = {key: np.asarray(array) for key, array in dict(tree).items()}
        for key, array in arrays.items():
            if array.dtype != np.float64:
                raise ValueError(f"{key!r} of moments must be float64, not {array.dtype}")
            if not np.isfinite(array).all():
                raise ValueError(f"{key!r} of moments is not finite")
        # Merging would broadcast shapes that do not belong together.
        moments = cls(**arrays)
        if moments.count.shape or moments.mean.shape != moments.m2.shape:
            raise ValueError(
                f"moments of shapes {moments.count.shape}, {moments.mean.shape} and "
                f"{moments.m2.shape} do not belong together"
            )
        if moments.count < 0 or (moments.m2 < 0).any():
            raise ValueError("moments with a negative count or sum of squares")
        return moments


def is_moments(tree: object) -> TypeGuard[Mapping[str, NDArray[np.generic]]]:
    """Return whether a branch of a tree has the form of `Moments.to_tree`."""
    return (
        isinstance(tree, Mapping)
        and tree.keys() == KEYS
        and all(isinstance(array, np.ndarray) for array in tree.values())
    )


#: Size limit of a state, which has to fit into one message.
MAX_STATE_BYTES = MAX_MESSAGE_BYTES // 2

State = Mapping[str, Tree]


def merge(one: State, other: State) -> State:
    """Merge two states of connectors.

    Raises:
        ValueError: the states belong to different connectors.
    """
    merged = _merge(one, other, ())
    assert isinstance(merged, Mapping)
    return merged


def connector_branch(states: Mapping[str, State]) -> State:
    """Make a checkpoint's branch for connectors, by module id; {}: no state.

    In a run with only the module "default", the branch is its state.
    """
    if set(states) == {OLD_MODULE}:
        return states[OLD_MODULE]
    return {module_id: state for module_id, state in states.items() if state}


def check(state: Tree) -> State:
    """Check all moments of a state from an untrusted source.

    Raises:
        ValueError: it is not a state.
    """
    if not isinstance(state, Mapping) or is_moments(state):
        raise ValueError("a state of connectors is a branch of their names")
    _check(state, ())
    return state


def connector_state(checkpoint: Checkpoint, module_id: str = OLD_MODULE) -> State:
    """Return the state of a module's connectors at a checkpoint, or {}.

    Raises:
        CheckpointError: the checkpoint's data are damaged.
    """
    try:
        return check(checkpoint.learned_of(module_id))
    except ValueError as error:
        where = checkpoint.path or pathlib.Path("in memory")
        raise CheckpointError(where, f"its connectors are damaged: {error}") from error


def to_bytes(state: State) -> bytes:
    """Serialize a state as a chunk, for a message.

    Raises:
        ValueError: the state is too large for one message.
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
    """Read the state in bytes from `to_bytes`.

    Raises:
        ValueError: the bytes hold no state.
    """
    reader = FrameReader(training_pb2.StateHeader, MAX_STATE_BYTES)
    frame = reader.feed(content)
    if frame is None:
        raise ValueError("an incomplete state of connectors")
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
