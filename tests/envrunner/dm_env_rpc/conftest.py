"""A simulator in this process, and environments in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.package_simulator import SEEN, Arena, Served, dial


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def served(arena: Arena) -> Iterator[Served]:
    served = Served(arena)
    yield served
    served.close()


@pytest.fixture
def connect(served: Served) -> Iterator[Callable[..., Any]]:
    """Environments in the arena, by their number, deadline and options."""
    made = []

    def connect(count: int = 2, deadline: float = 10.0, where: str = "", **options: Any) -> Any:
        options = {"observations": SEEN, **options}
        made.append(dial(where or served.address, count, deadline, **options))
        return made[-1]

    yield connect
    for env in made:
        env.close()
