from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.vectors import environments_in_threads


@pytest.fixture(autouse=True)
def _no_processes_of_environments(request: pytest.FixtureRequest) -> Iterator[None]:
    """Environments of asynchronous vectors have threads, and in slow tests processes."""
    if any(request.node.get_closest_marker(tier) for tier in ("slow", "long")):
        yield
        return
    with environments_in_threads():
        yield
