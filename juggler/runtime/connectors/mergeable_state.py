"""Moments from EnvRunners that the driver merges, without torch."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.checkpoints.checkpoint import (
    OLD_MODULE,
    Checkpoint,
    CheckpointError,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES, FrameReader, encode_frame
from juggler.runtime.wire.trees import Path, Tree, flatten, nest, path_name
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
        arrays: Any = tree
        if (
            not isinstance(tree, Mapping)
            or tree.keys() != KEYS
            or not all(isinstance(array, np.ndarray) for array in tree.values())
        ):
            raise ValueError(f"moments are the arrays {sorted(KEYS)}")
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


#: Size limit of a state, which has to fit into one message.
MAX_STATE_BYTES = MAX_MESSAGE_BYTES // 2

State = Mapping[str, Tree]


def merge(one: State, other: State) -> State:
    """Merge two states of connectors.

    Raises:
        ValueError: the states belong to different connectors.
    """
    ours, theirs = moments_in(one), moments_in(other)
    if odd := ours.keys() ^ theirs.keys():
        raise ValueError(f"states of other connectors: they differ at {path_name(min(odd))}")
    merged = []
    for path, mine in ours.items():
        shapes = mine.mean.shape, theirs[path].mean.shape
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"moments at {path_name(path)} of shapes {shapes[0]} and {shapes[1]} cannot be "
                "merged"
            )
        tree = mine.merged(theirs[path]).to_tree()
        merged += [((*path, key), array) for key, array in tree.items()]
    # A connector without moments has an empty branch.
    return dict(nest(merged, [(name,) for name in one if not one[name]]))


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
    moments_in(state)
    return dict(state)


def moments_in(state: Tree) -> dict[Path, Moments]:
    """Read the moments of a state from an untrusted source, by path.

    Raises:
        ValueError: it is not a state.
    """
    branches: dict[Path, dict[str, Tree]] = {}
    for path, array in flatten(state):
        branches.setdefault(path[:-1], {})[path[-1] if path else ""] = array
    if () in branches:
        raise ValueError("a state of connectors is a branch of their names")
    found: dict[Path, Moments] = {}
    for path, branch in branches.items():
        try:
            found[path] = Moments.from_tree(branch)
        except ValueError as error:
            raise ValueError(f"at {path_name(path)}: {error}") from None
    return found


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
