"""An algorithm of one's own works wherever one that ships does."""

from __future__ import annotations

import json
import runpy
import tomllib
from pathlib import Path

import pytest
from support.commands import status_of
from support.place import REPOSITORY, Place, assert_books_balance, summary

EXAMPLES = REPOSITORY / "examples"
PATH = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}", "COLUMNS": "120"}  # one column of options
NAME = "own_algorithm:MyAlgorithm"
SMALL = ("--env", "CartPole-v1", "--num-env-runners", 1, "--algorithm", NAME)


def changed(place: Place, name: str, old: str, new: str) -> str:
    """A copy of the example with a change, as a module of its own -> what names its algorithm."""
    source = (EXAMPLES / "own_algorithm.py").read_text()
    assert old in source
    place.write(f"{name}.py", source.replace(old, new))
    return f"{name}:MyAlgorithm"


def refused(place: Place, algorithm: str, *options: object) -> str:
    """What a run with this algorithm says that ends before it has a directory."""
    run = place.run("train", *SMALL[:-1], algorithm, "--run-dir", "refused", *options, **PATH)
    assert run.status == 2, run.output
    assert not (place.path / "refused").exists(), "told before the run starts"
    return run.output


@pytest.mark.long
def test_a_loss_that_returns_the_wrong_thing_is_told_before_the_run_starts(place: Place) -> None:
    plain = changed(
        place, "plain", "return juggler.Loss(total, mean.live_steps,", "return total  #"
    )
    said = refused(place, plain)
    assert "MyCore.loss returned a tensor of shape () and torch.float32: return" in said
    assert "Traceback" not in said
    metric = changed(place, "metric", "mean(chosen.detach())", "0.5")
    said = refused(place, metric)
    assert "MyCore.loss returned a Loss whose metrics['mean_value'] is 0.5" in said
    raises = changed(place, "raises", 'columns["rewards"]', 'columns["reward"]')
    said = refused(place, raises)
    assert "there is no column 'reward': did you mean 'rewards'?\" (raises.py, line" in said


@pytest.mark.long
def test_a_file_that_cannot_be_imported_shows_its_own_lines_alone(place: Place) -> None:
    wrong = changed(place, "wrong", "epsilon: juggler.Scheduled =", "epsilon: list[float] = []  #")
    importing = place.write("importing.py", "import wrong\n").stem
    for name in (wrong, f"{importing}:MyAlgorithm"):
        said = refused(place, name)
        assert "ValueError: mutable default <class 'list'> for field epsilon" in said
        assert "importlib" not in said
        assert {line.split('"')[1] for line in said.splitlines() if line.startswith("  File")} <= {
            str(place.path / "wrong.py"),
            str(place.path / "importing.py"),
        }
        assert "cannot be imported: ValueError: mutable default" in said.splitlines()[-1]
        assert "(wrong.py, line" in said.splitlines()[-1]


@pytest.mark.long
def test_a_key_without_a_type_and_a_core_without_a_name_are_told_at_once(place: Place) -> None:
    untyped = changed(place, "untyped", "lambda_: float = 0.65", "lambda_ = 0.65")
    said = refused(place, untyped)
    assert "MyConfig has lambda_ = 0.65 without a type, so it is no key: write lambda_: fl" in said
    nameless = changed(place, "nameless", 'name = "my algorithm"', "")
    said = refused(place, nameless)
    assert "MyCore needs a name, which its checkpoints carry: write name = " in said
    assert "starting" not in said, "no process was started"


@pytest.mark.long
def test_an_action_space_that_it_cannot_act_in_is_told_with_the_algorithms_that_can(
    place: Place,
) -> None:
    said = refused(place, NAME, "--env", "Pendulum-v1")
    assert "'own_algorithm:MyAlgorithm' needs a Discrete action space, and this environment" in said
    assert "choose an algorithm that can act in it, such as appo or impala or ppo" in said
    assert "Traceback" not in said


def test_help_names_how_to_see_the_options_of_an_algorithm_of_ones_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", PATH["COLUMNS"])
    assert status_of("train", "--help") == 0
    shown = capsys.readouterr().out
    assert "`juggler train --algorithm my_file:MyAlgorithm --help`" in shown


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


@pytest.mark.long
def test_a_wrong_key_or_name_is_named_with_the_nearest_right_one(place: Place) -> None:
    for options, said in (
        ((*SMALL, "--epsilom", 0.1), "--epsilon FLOAT"),
        ((*SMALL, "--lambda_", 2), "lambda_ = 2.0: must be at least 0 and at most 1"),
        (("--algorithm", "own_algorithm:MyAlgoritm"), "did you mean 'MyAlgorithm'?"),
        (("--algorithm", "own_algoritm:Mine"), "there is no Python module 'own_algoritm' here"),
        (("--algorithm", "own_algorithm:MyCore"), "must be a class derived from juggler.Algorithm"),
        (("--algorithm", "pppo"), "did you mean 'ppo'?"),
    ):
        run = place.run("train", *options, **PATH)
        assert run.status == 2, run.output
        assert said in run.output
        assert "Traceback" not in run.output
    place.write("wrong.toml", f'algorithm = "{NAME}"\nepsilom = 0.1\n')
    run = place.run("train", "wrong.toml", **PATH)
    assert run.status == 2
    assert "unknown key 'epsilom': did you mean 'epsilon'?" in run.output


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


@pytest.mark.long
def test_a_module_that_has_changed_is_told_with_the_two_ways_to_go_on(place: Place) -> None:
    run = place.run(
        "train",
        *SMALL[:-1],
        changed(place, "mine", "units", "units"),
        "--run-dir",
        "run",
        "--stop-steps",
        1000,
        **PATH,
    )
    assert run.status == 0, run.output
    changed(place, "mine", '"units", 128', '"units", 64')
    resumed = place.run("train", "--resume", "run", "--stop-steps", 2000, **PATH)
    assert resumed.status == 2, resumed.output
    assert "weights 'layers.0.bias' have shape (128,); " in resumed.output
    assert "expected (64,). Restore the files and the settings that it was" in resumed.output
    fitting = ("--from", "run", "--from-parameters", "layers.6.bias")
    new = place.run(
        "train",
        *SMALL[:-1],
        "mine:MyAlgorithm",
        *fitting,
        "--run-dir",
        "new",
        "--stop-steps",
        1000,
        **PATH,
    )
    assert new.status == 0, new.output
    changed(place, "mine", "units", "units")
    restored = place.run("train", "--resume", "run", "--stop-steps", 2000, **PATH)
    assert restored.status == 0, restored.output


@pytest.mark.long
def test_several_learners_that_dial_in_train_with_it(place: Place) -> None:
    options = ["--bind", "127.0.0.1:0", "--run-dir", "run", "--stop-steps", 4000]
    driver = place.start("driver", *SMALL, *options, "--num-learners", 2, **PATH)
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers" in line)
    dial = ["--driver", line.split()[-1]]
    roles = ("learner", "learner", "envrunner", "envrunner")
    workers = [place.start(role, *dial, **PATH) for role in roles]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    assert summary(place.path / "run")["env_steps_trained"] >= 4000
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.usefixtures("local_workers")
def test_that_of_a_script_trains_is_asked_for_again_and_its_run_needs_it_not_to_act(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (EXAMPLES / "own_algorithm.py").read_text().partition("if __name__")[0]
    script = in_a_directory / "script.py"
    script.write_text(
        f"{source}\n"
        "if __name__ == '__main__':\n"
        "    run = dict(run_dir='run', progress='off')\n"
        "    juggler.train(env='CartPole-v1', algorithm=MyAlgorithm, stop_steps=2000, **run)\n"
        "    try:\n"
        "        juggler.resume('run', stop_steps=4000)\n"
        "    except juggler.ConfigError as error:\n"
        "        print(error)\n"
        "    juggler.resume('run', stop_steps=4000, algorithm=MyAlgorithm)\n"
        "    print(len(juggler.evaluate('run', 2, module=MyModule).returns), 'played')\n"
        "    try:\n"
        "        juggler.train(algorithm=MyCore)\n"
        "    except juggler.ConfigError as error:\n"
        "        print(error)\n",
    )
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "this run's algorithm is MyAlgorithm, of a script: pass algorithm=" in said
    assert "2 played" in said
    assert "'__main__:MyCore' must be a class derived from juggler.Algorithm" in said
    assert summary(in_a_directory / "run")["env_steps_trained"] >= 4000
