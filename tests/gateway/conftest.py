from __future__ import annotations

import pytest

from juggler.gateway import environments, recorder


@pytest.fixture(autouse=True)
def _nobody_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are handed in short where a test says so, not where the machine is busy."""
    for module in (environments, recorder):
        monkeypatch.setattr(module, "STALL_SECONDS", 60.0)
