"""Processes are watched with Pythons that lack os.pidfd_open, too."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from juggler.runtime.actors.orphans import process_descriptor


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
