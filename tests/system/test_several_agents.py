"""Whole runs with several agents and several modules."""

from __future__ import annotations

import os
import signal
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import status_of
from support.place import Place, assert_books_balance, eventually, metrics, summary

import juggler

MATRIX = "juggler:MatrixGame"
POLES = "juggler:CartPoles"

TWO_MODULES = f"""
env = "{POLES}"
env_kwargs = {{num_agents = 2, max_episode_steps = 20}}
num_env_runners = 2
envs_per_runner = 4
stop_return = 1001
stop_steps = 60000
devices = "fake:2"

[agents]
"*_0" = "left"
"*_1" = "right"

[modules.right]
algorithm = "ppo"
"""


@pytest.mark.slow
def test_agents_with_equal_spaces_share_a_module_that_learns_from_all_of_them(
    place: Place,
) -> None:
    options = ["--env", POLES, "--env-kwargs", '{"num_agents": 4}', "--run-dir", "run"]
    options += ["--stop-steps", 100_000, "--stop-return", 2001]
    run = place.run("train", *options)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    first = next(
        line["episode_return_mean"] for line in metrics(place.path / "run") if line["episodes"]
    )
    end = summary(place.path / "run")
    assert end["env_steps_trained"] >= 100_000
    assert "by_module" not in end, "there is one module alone"
    assert end["episode_return_mean"] > 2 * first
    place.assert_nothing_is_left()


@pytest.mark.long
def test_modules_with_algorithms_of_their_own_learn_side_by_side(place: Place) -> None:
    place.write("two.toml", TWO_MODULES)
    run = place.run("train", "two.toml", "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    end = summary(place.path / "run")
    assert set(end["by_module"]) == {"left", "right"}
    for module in end["by_module"].values():
        # Episodes are short: an agent whose pole falls would wait long for one that has learned.
        assert module["updates"] > 2
        assert module["env_steps_trained"] > 10_000
    config = tomllib.loads((place.path / "run" / "config.toml").read_text())
    assert sorted(config["agents"].values()) == ["left", "right"]
    again = place.run("train", "--resume", "run", "--stop-steps", 90_000)
    assert again.status == 0, again.output
    assert_books_balance(place.path / "run")
    resumed = summary(place.path / "run")
    for module_id, module in resumed["by_module"].items():
        assert module["updates"] > end["by_module"][module_id]["updates"]
    place.assert_nothing_is_left()


@pytest.mark.long
def test_a_module_goes_on_while_the_learner_of_another_one_is_killed(place: Place) -> None:
    place.write("two.toml", TWO_MODULES)
    running = place.start("train", "two.toml", "--run-dir", "run", "--stop-steps", 10**9)

    def modules() -> dict[str, Any] | None:
        lines = metrics(place.path / "run") if (place.path / "run").exists() else []
        return lines[-1].get("by_module") if lines else None

    def both_have_updated() -> bool:
        now = modules()
        return bool(now) and all(module["updates"] > 3 for module in now.values())

    eventually(both_have_updated, 60.0, "both modules make updates")
    before = modules()
    assert before is not None
    (learner,) = before["right"]["learners"]
    assert before["left"]["learners"] != [learner]
    killed: psutil.Process = place.worker(learner.replace("-", " "))
    os.kill(killed.pid, signal.SIGSTOP)  # it dies, and cannot come back for a while
    killed.kill()

    def left_goes_on() -> bool:
        now = modules()
        assert now is not None
        return now["left"]["updates"] > before["left"]["updates"] + 20

    def right_is_back() -> bool:
        now = modules()
        assert now is not None
        return now["right"]["weights_version"] > before["right"]["weights_version"] and bool(
            now["right"]["learners"]
        )

    eventually(left_goes_on, 30.0, "the other module goes on")
    eventually(right_is_back, 60.0, "the module of the killed learner comes back")
    running.process.send_signal(signal.SIGINT)
    running.wait(60)
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_module_of_two_learners_goes_on_while_one_of_them_is_killed(place: Place) -> None:
    place.write("two.toml", f"{TWO_MODULES}num_learners = 2\n".replace("fake:2", "fake:3"))
    running = place.start("train", "two.toml", "--run-dir", "run", "--stop-steps", 10**9)

    def modules() -> dict[str, Any]:
        lines = metrics(place.path / "run") if (place.path / "run").exists() else []
        return lines[-1].get("by_module", {}) if lines else {}

    def all_make_updates_beyond(left: int, right: int) -> bool:
        now = modules()
        if [len(now.get(each, {}).get("learners", [])) for each in ("left", "right")] != [1, 2]:
            return False
        return now["left"]["updates"] > left and now["right"]["updates"] > right

    eventually(lambda: all_make_updates_beyond(3, 3), 100.0, lambda: running.output)
    before = modules()["right"]
    killed: psutil.Process = place.worker(before["learners"][-1].replace("-", " "))
    os.kill(killed.pid, signal.SIGSTOP)
    killed.kill()

    def right_goes_on_alone() -> bool:
        now = modules()["right"]
        lost = "learner_lost" in now["env_steps_dropped"]
        return lost and now["weights_version"][1] > before["weights_version"][1]

    eventually(right_goes_on_alone, 100.0, lambda: running.output)
    then = {module_id: module["updates"] for module_id, module in modules().items()}
    eventually(lambda: all_make_updates_beyond(**then), 100.0, lambda: running.output)
    running.process.send_signal(signal.SIGINT)
    running.wait(60)
    assert_books_balance(place.path / "run")
    assert "another state than" not in running.output
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("local_workers")
def test_an_agent_that_no_pattern_fits_is_named_before_the_run_has_a_directory(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("two.toml").write_text(TWO_MODULES.replace('"*_1"', '"*_7"'))
    assert status_of("train", "two.toml", "--run-dir", "run") == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "_1" in said.splitlines()[-1]
    assert not Path("run").exists()


@pytest.mark.long
def test_modules_of_a_run_play_matches_against_each_other_and_random_play(place: Place) -> None:
    dominated = '{"payoffs": [[1, 1], [-1, -1]]}'  # the first row is better whatever column does
    options = ["--env", MATRIX, "--env-kwargs", dominated, "--algorithm", "ppo"]
    options += ["--agents", '{"row": "row", "column": "column"}', "--stop-steps", 20_000]
    run = place.run("train", *options, "--run-dir", "run")
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    assert abs(summary(place.path / "run")["episode_return_mean"]) < 1e-6, "it is a zero-sum game"

    played = place.run("evaluate", "run", "--play", "column=random", "--episodes", 50)
    assert played.status == 0, played.output
    assert "row (row): return 1.00 (standard error 0.00); 50 won, 0 drawn, 0 lost" in played.output
    assert (
        "column (random): return -1.00 (standard error 0.00); 0 won, 0 drawn, 50 lost"
        in played.output
    )
    drawn = juggler.play_matches(place.path / "run", {"*": "random"}, 400, seed=3)
    assert 0.4 < drawn.records["row"].score < 0.6
    policy = juggler.load_policy(place.path / "run", module_id="row")
    again = juggler.play_matches(place.path / "run", {"row": policy, "column": "random"}, 20)
    assert again.records["row"].wins == 20
    for said, words in (
        ("rwo=random", "no agent is called 'rwo': did you mean 'row'?"),
        ("row=cloumn", "'cloumn' is neither a module of this run nor the path of a checkpoint"),
        ("row", "--play row: expected AGENT=PLAYER, such as player_0=random"),
    ):
        wrong = place.run("evaluate", "run", "--play", said)
        assert wrong.status != 0
        assert words in wrong.output
        assert "Traceback" not in wrong.output
