from __future__ import annotations

import signal
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
