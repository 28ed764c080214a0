"""A pass over many observations in parts, whose memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.gradient_core import Forward
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.rl_module import Batch
from juggler.runtime.wire.structures import tree_map

#: Observations in one part.
CHUNK = 2048


class InChunks(Forward):
    """A training pass, for outputs that need no gradient."""

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[str, Any]:
        leaf = _first_leaf(batch[c.OBSERVATIONS])  # [B, ...], or [B, T, ...] beside states
        size = max(1, CHUNK // leaf.shape[1]) if c.STATES in batch else CHUNK
        if len(leaf) <= size:
            return super().__call__(batch)
        outputs = [
            super(InChunks, self).__call__(tree_map(lambda x, at=at: x[at : at + size], batch))
            for at in range(0, len(leaf), size)
        ]
        joined: dict[str, Any] = tree_map(lambda *parts: torch.cat(parts), *outputs)
        return joined


def _first_leaf(tree: Any) -> Tensor:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    leaf: Tensor = tree
    return leaf
