"""What tests of several rooms share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

_PATIENCE = 30.0  # seconds until a test fails; nothing takes as long


@pytest.fixture
def every_thread_ends() -> Iterator[None]:
    """Whatever threads a test starts are over soon after it."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(_PATIENCE)
        assert not thread.is_alive(), f"{thread.name} goes on"
