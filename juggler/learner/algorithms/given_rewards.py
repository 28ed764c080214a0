"""Rewards that a core gives to the one it is around: which cores can learn from them."""

from __future__ import annotations

from typing import Any

from juggler.learner.algorithms.off_policy.core import OffPolicyCore
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import LearnerCore


def must_take_rewards(inner: LearnerCore[Any], table: str, instead: str) -> None:
    """Check that a core can learn from rewards that another one gives each step.

    Args:
        inner: the core.
        table: the keys of the core around it.
        instead: what to do where rewards make no difference.

    Raises:
        ValueError: it does not learn from rewards, or what it keeps does not tell its steps, or
            their ends, apart.
    """
    if not isinstance(inner, GradientCore):
        raise ValueError(
            f"{table} is for a GradientCore, and {inner.name} ({type(inner).__name__}) is none"
        )
    if not inner.learns_from_rewards:
        raise ValueError(
            f"{table} makes no difference to {inner.name}, which learns nothing from rewards: "
            f"{instead}"
        )
    if isinstance(inner, OffPolicyCore):
        inner.must_keep_each_step(table)
