from __future__ import annotations

import types

import pytest

from juggler import cli
from juggler.runtime.actors import processes


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command line does, in order."""
    said: list[str] = []

    def run(_: object) -> int:
        said.append("runs")
        raise KeyError("somebody's mistake")

    def imported(_: str) -> types.SimpleNamespace:
        said.append("is imported")
        return types.SimpleNamespace(run=run)

    monkeypatch.setattr(processes, "share_forkserver", lambda: said.append("forkserver starts"))
    monkeypatch.setattr(processes, "let_go_of_forkserver", lambda: said.append("and may end"))
    monkeypatch.setattr(cli.importlib, "import_module", imported)
    return said


@pytest.mark.parametrize("arguments", [["cartpole"], ["--resume", "runs/demo", "--lr", "1e-3"]])
def test_the_forkserver_imports_torch_beside_what_a_run_s_command_imports(
    happened: list[str], arguments: list[str]
) -> None:
    with pytest.raises(KeyError, match="somebody's mistake"):
        cli.main(["train", *arguments])
    assert happened == ["forkserver starts", "is imported", "runs", "and may end"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["train", "cartpole", "--seeds=3"],
        ["train", "--list"],
        ["status", "runs/demo"],
    ],
)
def test_a_command_that_starts_no_workers_starts_no_forkserver(
    happened: list[str], arguments: list[str]
) -> None:
    with pytest.raises(KeyError, match="somebody's mistake"):
        cli.main(arguments)
    assert happened == ["is imported", "runs"]
