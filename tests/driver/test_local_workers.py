from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from juggler.driver import local_workers

_NO_PROCESS = 1 << 30  # above what any kernel gives


def test_drivers_that_start_together_remove_what_a_dead_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp" if len(str(tmp_path)) > 60 else str(tmp_path))
    place = Path(tempfile.gettempdir())
    left = [place / f"juggler-{_NO_PROCESS}-{number}" for number in range(200)]
    for path in left:
        path.mkdir()
    with ThreadPoolExecutor(8) as starting:
        made = list(starting.map(lambda _: local_workers._make_socket_directory(), range(8)))
    assert not any(path.exists() for path in left)
    for directory in made:
        Path(directory).rmdir()
