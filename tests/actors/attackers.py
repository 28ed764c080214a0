"""Processes that open calls without the token, and sit there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "attacker.py"


@contextmanager
def attacker(address: str, kind: str, connections: int) -> Iterator[None]:
    """It has made its calls, and makes them again where they end; see `attacker.py`."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), address, kind, str(connections)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "all calls were made\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()
