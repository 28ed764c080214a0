from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest

from juggler import cli


def test_a_command_that_is_interrupted_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    module = types.SimpleNamespace(run=interrupted)
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: module)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.main(["evaluate", "runs/demo"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "juggler evaluate: interrupted, left at once\n"


@pytest.mark.long
@pytest.mark.parametrize("arguments", [["--help"], ["status", "--help"], ["train", "--list"]])
def test_a_command_whose_reader_has_left_ends_in_silence(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "juggler", *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert done.stderr == b""
    assert done.returncode in (1, 128 + signal.SIGPIPE), "1 where rich has noticed"
