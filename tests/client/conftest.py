from __future__ import annotations

import pytest
from support.gateway_world import nobody_stalls

__all__ = ["nobody_stalls"]  # for every test here


@pytest.fixture(autouse=True, scope="module")
def _on_both(grpc_api: str) -> None:
    """All tests of the client run on both."""
