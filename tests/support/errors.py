"""Errors, asserted by type and key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_key(kind: type[Exception], key: str) -> Iterator[None]:
    """An error that names a key of the configuration, as `key: why` or `key = value: why`."""
    with pytest.raises(kind, match=rf"(?<![\w.]){re.escape(key)}( =|:)"):
        yield
