"""Wrong input, surroundings or algorithms: one clear message, and an exit status."""

from __future__ import annotations

import importlib.util
import json
import socket
import tomllib
from pathlib import Path

import gymnasium
import pytest
from support.place import REPOSITORY, Place, assert_books_balance, status_of, summary


@pytest.mark.usefixtures("no_forkserver")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--env", "ALE/Pong-v5"), "Nearest: ale_py:ALE/Pong-v5"),
        (("--env", "envpool:Pong-v5"), "needs the package envpool: "),
    ],
)
def test_a_name_that_leads_nowhere_is_told_before_anything_starts(
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    if "envpool" in words and importlib.util.find_spec("envpool"):
        pytest.skip("envpool is here")
    for name in [each for each in gymnasium.registry if each.startswith("ALE/")]:
        monkeypatch.delitem(gymnasium.registry, name)  # another test may have imported ale_py
    assert status_of("train", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said, said
    assert "Traceback" not in said
    assert list(in_a_directory.iterdir()) == []


@pytest.mark.usefixtures("no_forkserver")
@pytest.mark.usefixtures("local_workers")
def test_what_cannot_be_made_is_told_before_there_is_a_run_directory(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("oops\n")
    Path("of_text.py").write_text(
        "import gymnasium\n"
        "class Talk(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Text(10)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'hello', {}\n"
        "    def step(self, action):\n"
        "        return 'bye', 0.0, True, False, {}\n"
    )
    told = {
        ("--env", "Acrobot-v1", "--env-kwargs", '{"x": 1}'): "unexpected keyword argument 'x'",
        ("cartpole", "--devices", "cuda:99"): "devices = 'cuda:99': this host has ",
        ("cartpole", "--module", "json:Policy"): "the Python module 'json' has no 'Policy'",
        ("--env", "broken:Env"): "module 'broken' failed in import: NameError: name 'oops'",
        ("--env", "broken"): "no environment is registered as 'broken'",
        ("--env", "of_text:Talk", "--envs-per-runner", "2"): "Text(",
    }
    for arguments, words in told.items():
        status = status_of("train", *arguments)
        said = "".join(capsys.readouterr())
        assert status == 2, (arguments, said)
        assert words in said.splitlines()[-1], arguments
    assert "Traceback" not in said, "of the last one, which nothing raised"
    assert not (in_a_directory / "runs").exists()


@pytest.mark.usefixtures("local_workers")
def test_an_address_for_metrics_that_is_taken_ends_the_command_and_leaves_nothing(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert status_of("train", "cartpole", "--run-dir", "run", "--metrics-bind", address) == 1
    said = capsys.readouterr().err
    assert f"cannot serve metrics on {address}: Address already in use" in said
    assert not Path("run").exists()


# An algorithm of one's own works wherever one that ships does.


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
