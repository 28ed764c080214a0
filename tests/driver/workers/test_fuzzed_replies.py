"""The short form of benchmarks/fuzz.py: damaged messages are taken or refused, in few words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from fuzz import fuzz


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_from_a_network_is_taken_or_refused(seed: int) -> None:
    counts, _ = fuzz(2.0, seed)
    assert counts["crashes"] == 0
    for reader in ("receipt", "answer", "arrivals", "runner ready", "hello", "batch"):
        assert counts[f"{reader} taken"], "else nothing but the first check was tried"
        assert counts[f"{reader} refused"]
