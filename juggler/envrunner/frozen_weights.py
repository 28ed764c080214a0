"""Weights that the driver sends for modules that only play.

Weights of untrained modules come before the Setup, weights of a checkpoint before an evaluation.
"""

from __future__ import annotations

from typing import Any

from juggler.runtime.acting.actor import Actor
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.weights import WEIGHTS, tree_digest
from juggler.runtime.connectors.mergeable_state import check
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2


class FrozenWeights:
    """Joins weights that come in parts, and checks that they are expected."""

    def __init__(self) -> None:
        self._reader = FrameReader(training_pb2.StateHeader, digests=True)
        self._trees: dict[str, tuple[Tree, str]] = {}  # with its digest, by module id
        self._due: set[str] = set()  # modules of the run that have not been loaded

    def add(self, part: training_pb2.Restore) -> None:
        """Add the next part of a module.

        Raises:
            WireError: it was damaged, or is too large.
            ValueError: it is the last part, and others are missing.
        """
        frame = self._reader.feed(part.chunk)
        if frame is not None:
            self._trees[frame.header.module_id] = frame.tree, tree_digest(frame.tree)
        elif part.last:
            raise ValueError(f"the weights of module {part.module_id!r} ended in the middle")

    def expect(self, module_id: str) -> None:
        """Keep the weights of a module of the run until `load`."""
        self._due.add(module_id)

    def pop_checkpoint(self) -> dict[str, Tree]:
        """Return the modules of a checkpoint, received since the last call."""
        # At a gateway, the first agent of a module of the run may come after evaluations.
        ids = self._trees.keys() - self._due
        return {module_id: self._trees.pop(module_id)[0] for module_id in ids}

    def load(self, module_id: str, digest: str, policy: Actor) -> None:
        """Load received weights into a module.

        Args:
            policy: receives the weights, and its connectors their learned state.

        Raises:
            ValueError: the weights are missing, have another digest, or do not fit the module.
        """
        tree, found = self._trees.pop(module_id, ({}, "none"))
        self._due.discard(module_id)
        if found != digest:
            raise ValueError(
                f"the weights of module {module_id!r} are not the ones that this run plays with: "
                f"their digest is {found}, and must be {digest}"
            )
        load_tree(module_id, tree, policy)


def load_tree(module_id: str, tree: Any, policy: Actor) -> None:
    """Load a module's part of a checkpoint, with its connectors' state.

    Raises:
        ValueError: weights of the module are missing, or do not fit.
    """
    weights = tree[WEIGHTS]
    if missing := [name for name in policy.names if name not in weights]:
        raise ValueError(
            f"the checkpoint of module {module_id!r} is another module's: it has no "
            f"{', '.join(missing)}"
        )
    policy.load({name: weights[name] for name in policy.names})
    if learned := check(tree[CONNECTORS]):
        policy.connectors.set_state(learned)
