"""States of cores, to be compared with what later steps make of them."""

from __future__ import annotations

from typing import Any

import torch

from juggler.runtime.wire.structures import tree_map


def copied(state: Any) -> Any:
    """The same state in tensors of its own: a step may change those that it is given."""
    return tree_map(torch.clone, state)
