"""Cases of learning tests: the first one is a slow test, the others are long ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrization, of which all but the first one are left to the long tests.

    A case that is a tuple has the values of several arguments.
    """
    first, *others = cases
    return [first, *(left_to_long(case) for case in others)]


def left_to_long(case: Any) -> Any:
    """A case of a parametrization that only the long tests try."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)


#: Of a learning test whose seeds differ in nothing else.
seeds = pytest.mark.parametrize("seed", first_of(range(3)))
