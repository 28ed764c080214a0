from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.place import Place, eventually, workers_in


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.close()


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], list[str], str]]:
    """Two network namespaces with a cable, and the first's address.

    Needs root and the ip command; a machine without them cannot make hosts.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command (Debian: iproute2)")
    tag = uuid.uuid4().hex[:6]
    names = [f"jt-{tag}-a", f"jt-{tag}-b"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = [f"ve{tag}a", f"ve{tag}b"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ("10.77.0.1", "10.77.0.2"), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second, "10.77.0.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def no_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands that end before they need a forkserver."""
    monkeypatch.setattr("juggler.runtime.actors.processes.warm_up", lambda: None)


@pytest.fixture
def in_a_directory(tmp_path: Path, in_tmp_path: None) -> Iterator[Path]:
    """Where this process runs commands, which leave no worker behind."""
    yield tmp_path

    def left() -> list[psutil.Process]:
        """Another test may need the forkserver that began here."""
        servers = workers_in(tmp_path, "forkserver")
        return [each for each in workers_in(tmp_path, "") if each not in servers]

    eventually(lambda: not left(), 10, lambda: f"left behind: {left()}")
