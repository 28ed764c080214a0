"""The spaces that simulators tell, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from juggler.gateway.row_layout import Layout, ValueChecks
from juggler.gateway.sessions import Code, SessionError
from juggler.runtime.wire.errors import UnsupportedSpace, WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
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


def difference(one: Space[Any], other: Space[Any], its_name: str, other_name: str) -> str:
    """For people: what is not the same in two spaces whose messages differ.

    Args:
        one: a space.
        other: the space that it should be.
        its_name: what to call the first.
        other_name: what to call the second.
    """
    if type(one) is type(other) and isinstance(one, spaces.Dict | spaces.Tuple):
        its, others = _parts(one), _parts(other)
        if list(its) != list(others):
            return f"{its_name} has the parts {_few(its)}; {other_name} has {_few(others)}"
        for key, part in its.items():
            if space_to_message(part) != space_to_message(others[key]):
                at = f" at {key!r}"
                return difference(part, others[key], its_name + at, other_name + at)
    text, other_text = _one_line(one), _one_line(other)
    if text == other_text and isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        where = np.argwhere((one.low != other.low) | (one.high != other.high))
        for place in [tuple(each) for each in where.tolist()][:1]:
            text += f" with bounds of {one.low[place]} and {one.high[place]} at {list(place)}"
            other_text += f" with {other.low[place]} and {other.high[place]} there"
    elif text == other_text:
        text, other_text = f"{text} of {one.dtype}", f"{text} of {other.dtype}"
    return f"{its_name} is {text}; {other_name} is {other_text}"


def _parts(space: Any) -> dict[str, Space[Any]]:
    named = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
    return {str(key): part for key, part in named}


def _few(parts: Mapping[str, Space[Any]]) -> str:
    return ", ".join(map(repr, parts))[:200]


def _one_line(space: Space[Any]) -> str:
    # NumPy leaves out most of many numbers; the text of a message would have them all.
    return " ".join(str(space).split())[:200]


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
