"""The spaces that simulators tell, read and checked."""

from __future__ import annotations

import math
from typing import Any

from gymnasium import Space, spaces

from juggler.gateway.row_layout import Layout, ValueChecks
from juggler.gateway.sessions import Code, SessionError
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_MOST_ROW_BYTES = 256 << 20
#: In an observation or an action, with choices encoded one-hot.
_MOST_NUMBERS = 1 << 22


def must_fit(observation_space: Space[Any], action_space: Space[Any], steps: int) -> None:
    """Check that masks fit the actions, and that memory has room for policies and rows.

    Raises:
        SessionError: they do not, or it has not.
    """
    for name, space in (("observation", observation_space), ("action", action_space)):
        if (numbers := _numbers(space)) > _MOST_NUMBERS:
            text = f"an {name} is {numbers} numbers, with one for each value of what is counted"
            raise SessionError(Code.WRONG_SPACES, f"{text}: at most {_MOST_NUMBERS}")
    try:
        ValueChecks(observation_space, action_space)
    except ValueError as error:
        raise SessionError(Code.WRONG_SPACES, str(error)) from error
    row_bytes = steps * sum(leaf.row_bytes for leaf in Layout(observation_space).leaves)
    if row_bytes > _MOST_ROW_BYTES:
        text = f"{steps} observations take {row_bytes} bytes: at most {_MOST_ROW_BYTES}"
        raise SessionError(Code.WRONG_SPACES, text)


def read_space(agent: pb.Agent, name: str) -> Space[Any]:
    """One of the spaces of an agent.

    Raises:
        SessionError: it is none.
    """
    try:
        return space_from_message(getattr(agent, name))
    except (WireError, UnsupportedSpace) as error:
        raise SessionError(Code.WRONG_SPACES, f"{whose(agent)}{name}: {error}") from error


def _numbers(space: Space[Any]) -> int:
    """How many numbers a policy sees in a value of a space: choices are encoded one-hot."""
    numbers = 0
    for _, leaf in space_leaves(space):
        if isinstance(leaf, spaces.Discrete):
            numbers += int(leaf.n)
        elif isinstance(leaf, spaces.MultiDiscrete):
            numbers += int(leaf.nvec.sum(dtype=object))  # of any size
        else:
            numbers += math.prod(leaf.shape or ())
    return numbers


def whose(agent: pb.Agent) -> str:
    """For people: how an error about an agent begins."""
    return f"agent {agent.id!r}: " if agent.id else ""
