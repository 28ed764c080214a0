"""Finds the distribution for an action space."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.runtime.modules.distributions.base import DistributionSpec
from juggler.runtime.modules.distributions.bernoulli import BernoulliSpec
from juggler.runtime.modules.distributions.categorical import CategoricalSpec
from juggler.runtime.modules.distributions.composite import CompositeSpec
from juggler.runtime.modules.distributions.gaussian import GaussianSpec
from juggler.runtime.modules.distributions.multi_categorical import MultiCategoricalSpec
from juggler.runtime.modules.distributions.squashed_gaussian import SquashedGaussianSpec
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.trees import path_name


def distribution_for(space: gymnasium.Space[Any], squash: bool = False) -> DistributionSpec:
    """The distribution spec for an action space, which may be nested to any depth.

    Args:
        space: Discrete, MultiDiscrete, MultiBinary, Box of a float dtype, or a Dict or Tuple.
        squash: use tanh to keep Box actions between finite bounds. Otherwise actions are not
            bounded, and a connector fits them to the environment's bounds.

    Raises:
        UnsupportedSpace: the space, or one within it, has no distribution.
    """
    for path, leaf in space_leaves(space):
        at = f" at {path_name(path)}" if path else ""
        if isinstance(leaf, spaces.Box) and not np.issubdtype(leaf.dtype, np.floating):
            raise UnsupportedSpace(
                f"no action distribution for {leaf}{at}, a Box of whole numbers: "
                "make it a MultiDiscrete"
            )
        if 0 in (leaf.shape or ()):
            raise UnsupportedSpace(
                f"action space {leaf}{at} has no elements, nothing to choose: leave it out"
            )
    return _distribution_for(space, squash)


def _distribution_for(space: gymnasium.Space[Any], squash: bool) -> DistributionSpec:
    match space:
        case spaces.Dict():
            parts = space.spaces.items()
            return CompositeSpec({key: _distribution_for(part, squash) for key, part in parts})
        case spaces.Tuple():
            inner = enumerate(space.spaces)
            return CompositeSpec({str(i): _distribution_for(part, squash) for i, part in inner})
        case spaces.Discrete():
            return CategoricalSpec(int(space.n), int(space.start))
        case spaces.MultiDiscrete():
            return MultiCategoricalSpec(space.nvec, space.start)
        case spaces.MultiBinary():
            return BernoulliSpec(tuple(space.shape))
        case spaces.Box() if squash and (space.bounded_below & space.bounded_above).any():
            return SquashedGaussianSpec(space.low, space.high)
        case _:
            return GaussianSpec(tuple(space.shape or ()))
