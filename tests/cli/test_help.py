"""What people read before they have run anything."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.place import status_of

from juggler import cli
from juggler.cli import ALIASES, COMMANDS, main
from juggler.cli.arguments import parse
from juggler.driver.config import RunConfig
from juggler.runtime.actors import processes

#: `juggler launch` alone lists its engines.
WITH_OPTIONS = [*(set(COMMANDS) - {"launch", "worker"}), *ALIASES, "launch ssh", "launch slurm"]


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


def test_there_are_few_commands_and_the_others_are_part_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(COMMANDS) <= 14
    assert {words[0] for words in ALIASES.values()} <= COMMANDS.keys()
    for role in ("envrunner", "learner", "evaluator"):
        helps = []
        for words in ([role], ["worker", role]):
            with pytest.raises(SystemExit):
                main([*words, "--help"])
            helps.append(capsys.readouterr())
        assert helps[0] == helps[1]
    assert main(["worker", "lerner"]) == 2
    assert "no role 'lerner': did you mean 'learner'?" in capsys.readouterr().err


# What is said of values of options.


def test_a_whole_number_may_have_an_exponent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[RunConfig] = []
    monkeypatch.setattr("juggler.cli.driver.start_run", lambda run, *_, **__: started.append(run))
    assert status_of("train", "cartpole", "--stop-steps", "2.5e5", "--batch-size", "1e3") == 0
    (run,) = started
    assert (run.driver.stop_steps, run.learner.batch_size) == (250_000, 1000)
    assert type(run.driver.stop_steps) is type(run.learner.batch_size) is int


# Help texts of options, in whole paragraphs.


@dataclass
class Options:
    """Of a command."""

    pace: int = 1
    """How many steps go by at once:
    `pace` of them, or
    (rarely) more.

    Ways to say it:
    - in words,
    - in numbers.
    """


def test_lines_of_a_paragraph_are_joined_and_items_of_a_list_stay_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        parse(Options, ["--help"], "walk")
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("--pace"))
    assert lines[at].endswith("How many steps go by at once: `pace` of them, or (rarely) more.")
    assert lines[at + 2 : at + 5] == [
        "Ways to say it:",
        "- in words,",
        "- in numbers. (default: 1)",
    ]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command line does, in order."""
    said: list[str] = []

    def run(_: object) -> int:
        said.append("runs")
        raise KeyError("the caller's mistake")

    def imported(_: str) -> types.SimpleNamespace:
        said.append("is imported")
        return types.SimpleNamespace(run=run)

    monkeypatch.setattr(processes, "share_forkserver", lambda: said.append("forkserver starts"))
    monkeypatch.setattr(processes, "release_forkserver", lambda: said.append("and may end"))
    monkeypatch.setattr(cli.importlib, "import_module", imported)
    return said


STARTED = ["forkserver starts", "is imported", "runs", "and may end"]
NOT_STARTED = ["is imported", "runs"]


@pytest.mark.parametrize(
    ("arguments", "happens"),
    [
        ("train cartpole", STARTED),
        ("train --resume runs/demo --lr 1e-3", STARTED),
        ("train --help", NOT_STARTED),
        ("train cartpole --seeds=3", NOT_STARTED),
        ("train --list", NOT_STARTED),
        ("status runs/demo", NOT_STARTED),
    ],
)
def test_a_command_that_starts_workers_alone_starts_a_forkserver_beside_its_imports(
    happened: list[str], arguments: str, happens: list[str]
) -> None:
    with pytest.raises(KeyError, match="the caller's mistake"):
        cli.main(arguments.split())
    assert happened == happens


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("learner --driver 127.0.0.1:1 --reattach-seconds nan", "--reattach-seconds must be"),
        ("learner --driver 127.0.0.1:1 --advertise foo", "'foo' is not an address"),
        ("healthcheck 127.0.0.1:1 --timeout -1", "--timeout -1"),
        ("launch swarm cartpole --run-dir FILE --dry-run", "is a file"),
        ("certs FILE", "cannot make certificates in"),
    ],
)
def test_wrong_input_is_one_line(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert status_of(*words.replace("FILE", str(file)).split())
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
