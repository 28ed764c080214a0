from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.place import Place


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()
