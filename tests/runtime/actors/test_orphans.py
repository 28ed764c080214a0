"""Processes that must not outlive another one are watched, and killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from itertools import chain, repeat

import pytest

from juggler.runtime.actors.orphans import children, kill_children, process_descriptor


@pytest.mark.parametrize("has_function", [True, False])
def test_a_descriptor_of_a_process_is_readable_once_it_has_ended(
    has_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_function:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = process_descriptor(process.pid)
    try:
        assert not os.get_inheritable(descriptor)
        assert not select.select([descriptor], [], [], 0)[0]
        process.communicate(b"\n", timeout=60)
        assert select.select([descriptor], [], [], 60)[0]
    finally:
        os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        process_descriptor(process.pid)


def test_a_child_that_is_claimed_a_little_after_it_exists_lives() -> None:
    program = ["sh", "-c", "sleep 60 & echo $!; sleep 60 & echo $!; wait"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        claimed, _ = (int(parent.stdout.readline()) for _ in range(2))
        claims: chain[set[int]] = chain([set()], repeat({claimed}))
        try:
            kill_children(parent.pid, but=lambda: next(claims))
            assert children(parent.pid) == {claimed}
        finally:
            for each in children(parent.pid):
                os.kill(each, signal.SIGKILL)
