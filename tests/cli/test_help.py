"""What people read before they have run anything."""

from __future__ import annotations

import re

import pytest

from juggler.cli import COMMANDS, main

#: `juggler launch` alone lists its engines.
WITH_OPTIONS = [*(set(COMMANDS) - {"launch"}), "launch ssh", "launch slurm"]


@pytest.mark.parametrize("command", sorted(WITH_OPTIONS))
def test_help_shows_no_words_of_python(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code in (0, None)
    said = capsys.readouterr().out
    assert "None" not in said
    assert "default: ''" not in said
    assert "```" not in said, "lines of a file would run into each other"
    only_asked_for = (
        "--no-(list|insecure|reflection|go-on|once|json|detach|dry-run|plain-gradients)"
    )
    assert re.search(only_asked_for, said) is None
    if command in ("train", "driver"):
        assert f"usage: juggler {command} [-h] [OPTIONS] [CONFIG]" in said
        assert "--stop-steps INT " in said
        assert "--synchronous, --no-synchronous" in said  # a file may say it


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("evaluate", "CHECKPOINT"),
        ("record", "CHECKPOINT"),
        ("status", "DRIVER"),
        ("scale", "RUN"),
        ("league", "RUN"),
        ("certs", "DIRECTORY"),
    ],
)
def test_what_a_command_is_missing_has_a_name(
    command: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([command])
    assert left.value.code == 2
    said = capsys.readouterr().err.replace("│", " ").split()
    assert named in said
    assert "STR" not in said
