"""An algorithm of one's own works wherever one that ships does."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, status_of, summary

EXAMPLES = REPOSITORY / "examples"
PATH = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}", "COLUMNS": "120"}  # one column of options
NAME = "own_algorithm:MyAlgorithm"
SMALL = ("--env", "CartPole-v1", "--num-env-runners", 1, "--algorithm", NAME)


def changed(directory: Path, name: str, old: str, new: str) -> str:
    """A changed copy of the example; its algorithm's name."""
    source = (EXAMPLES / "own_algorithm.py").read_text()
    assert old in source
    (directory / f"{name}.py").write_text(source.replace(old, new))
    return f"{name}:MyAlgorithm"


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        (
            "total",
            "return juggler.Loss(total,",
            "return total; juggler.Loss(total,",
            "MyCore.loss returned a",
        ),
        (
            "column",
            'columns["rewards"]',
            'columns["reward"]',
            "did you mean 'rewards'?\" (column.py",
        ),
        ("spaces", "", "", "choose an algorithm that can act"),
    ],
)
def test_a_mistake_in_it_is_told_before_the_run_has_a_directory(
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    old: str,
    new: str,
    said: str,
) -> None:
    mine = changed(in_a_directory, name, old, new)
    env = ("--env", "Pendulum-v1") if name == "spaces" else ()
    assert status_of("train", *SMALL[:-1], mine, *env, "--run-dir", "run") == 2
    told = "".join(capsys.readouterr())
    assert said in told
    assert not Path("run").exists()


def test_a_file_that_cannot_be_imported_shows_its_own_lines_alone(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = "epsilon: list[float] = []  #"
    named = changed(in_a_directory, "wrong", "epsilon: juggler.Scheduled =", wrong)
    Path("importing.py").write_text("import wrong\n")
    for name in (named, "importing:MyAlgorithm"):
        assert status_of("train", *SMALL[:-1], name, "--run-dir", "run") == 2
        said = "".join(capsys.readouterr())
        files = {line.split('"')[1] for line in said.splitlines() if line.startswith("  File")}
        assert files <= {str(in_a_directory / each) for each in ("wrong.py", "importing.py")}
        assert "cannot be imported: ValueError: mutable default" in said.splitlines()[-1]
        assert "(wrong.py, line" in said.splitlines()[-1]


def test_help_shows_its_keys_with_their_defaults_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", PATH["COLUMNS"])
    monkeypatch.syspath_prepend(EXAMPLES)
    assert status_of("train", "--algorithm", NAME, "--help") == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.replace("│", " ").split())  # lines may end anywhere
    assert "Share of actions that are drawn at random" in words
    assert "(default: 0 1.0 50000 0.05)" in words
    assert "--grad-clip FLOAT" in words
    assert "(default: 10.0)" in words
    assert "--entropy-coefficient" not in words
    assert "--clip " not in words


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*SMALL, "--epsilom", 0.1), "--epsilon FLOAT"),
        ((*SMALL, "--lambda_", 2), "lambda_ = 2.0: must be at least 0"),
        (("wrong.toml",), "unknown key 'epsilom': did you"),
    ],
)
def test_a_wrong_key_is_named_with_the_nearest_right_one(
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.setenv("COLUMNS", PATH["COLUMNS"])
    monkeypatch.syspath_prepend(EXAMPLES)
    Path("wrong.toml").write_text(f'algorithm = "{NAME}"\nepsilom = 0.1\n')
    assert status_of("train", *options) == 2
    told = "".join(capsys.readouterr())
    assert said in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_file_names_it_and_its_run_is_resumed_and_evaluated(place: Place) -> None:
    place.write(
        "mine.toml",
        f'env = "CartPole-v1"\nalgorithm = "{NAME}"\nnum_env_runners = 1\nepsilon = 0.3\n'
        "synchronous = true\nenvs_per_runner = 4\nfragment_steps = 16\nbatch_size = 64\n",
    )
    options = ("--run-dir", "run", "--stop-steps", 2000, "--lambda_", 0.9)
    run = place.run("train", "mine.toml", *options, **PATH)
    assert run.status == 0, run.output
    config = tomllib.loads((place.path / "run" / "config.toml").read_text())
    assert (config["algorithm"], config["epsilon"], config["lambda_"]) == (NAME, 0.3, 0.9)
    assert config["module"] == "own_algorithm:MyModule", "what the algorithm brings"
    resumed = place.run("train", "--resume", "run", "--epsilon", 0.2, "--stop-steps", 4000, **PATH)
    assert resumed.status == 0, resumed.output
    assert summary(place.path / "run")["env_steps_trained"] >= 4000
    assert_books_balance(place.path / "run")
    lines = (place.path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["modules"]["default"]["epsilon"] == pytest.approx(0.2)
    played = place.run("evaluate", "run", "--episodes", 2, **PATH)
    assert played.status == 0, played.output
    place.assert_nothing_is_left()
