"""Runs with a league: players are trained at the same time, copied, and played against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.place import Place, assert_books_balance, eventually, metrics, summary

from juggler.runtime.checkpoints.checkpoint import Checkpoint, read
from juggler.runtime.checkpoints.frozen import playing_tree, read_module, tree_digest

LEAGUE = """
env = "juggler:MatrixGame"
algorithm = "ppo"
num_env_runners = 1
envs_per_runner = 16
fragment_steps = 16
batch_size = 256
epochs = 2

[connectors]
learner = []

[league]
builder = "alphastar"
max_historical = 3
min_games = 1
options = {mains = 1, main_exploiters = 1, league_exploiters = 1, min_phase_steps = 500, \
max_phase_steps = 1_000}
"""


def players(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    return {each["player_id"]: each for each in checkpoint.counters["league"]["players"]}


def digest(run: Path, copy_id: str) -> str:
    return tree_digest(playing_tree(*read_module(str(run / "frozen" / copy_id))))


def test_players_are_copied_reset_and_go_on_when_the_run_is_resumed(place: Place) -> None:
    run_dir = place.path / "run"
    place.write("league.toml", LEAGUE)
    run = place.run("train", "league.toml", "--run-dir", "run", "--stop-steps", 8_000)
    assert run.status == 0, run.output
    assert_books_balance(run_dir)
    before = read(run_dir)
    was = players(before)
    assert {"main-0", "main_exploiter-0", "league_exploiter-0"} <= was.keys()
    assert was["main_exploiter-0"]["life"] > 0, "it was reset"
    copies = [name for name, each in was.items() if each["parent"]]
    assert len(copies) > 3
    present = [name for name in copies if not was[name]["retired"]]
    assert len(present) <= 3, "max_historical"
    digests = {name: digest(run_dir, name) for name in present}
    assert set(before.module_ids) == {"main-0", "main_exploiter-0", "league_exploiter-0"}, (
        "copies are kept once, and not in checkpoints"
    )
    line = metrics(run_dir)[-1]["league"]
    assert line["learning"]["main-0"]["copies"] == was["main-0"]["copies"]
    assert line["players"] == 3 + line["historical"]

    again = place.run("train", "--resume", "run", "--stop-steps", 11_000)
    assert again.status == 0, again.output
    now = players(read(run_dir))
    assert now["main-0"]["steps"] > was["main-0"]["steps"]
    assert {name: digest(run_dir, name) for name in digests} == digests
    assert now.keys() > was.keys()
    assert (
        read(run_dir).counters["league"]["next_match_id"]
        > before.counters["league"]["next_match_id"]
    )

    shown = place.run("league", "run", "--picture", "league.png")
    assert shown.status == 0, shown.output
    assert " steps\n" in shown.output, "copies say where they come from"
    assert "wins of" in shown.output
    assert (place.path / "league.png").stat().st_size > 10_000
    matches = ["--play", "row=main-0", "--play", f"column=run/frozen/{present[-1]}"]
    played = place.run("evaluate", "run", *matches, "--episodes", 4, "--explore")
    assert played.status == 0, played.output
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_league_goes_on_while_workers_are_killed(place: Place) -> None:
    run_dir = place.path / "run"
    place.write("league.toml", LEAGUE)
    options = ["--run-dir", "run", "--stop-steps", 1_000_000, "--num-env-runners", 2]
    run = place.start("train", "league.toml", *options, "--checkpoint-seconds", 2)

    def league() -> dict[str, Any]:
        lines = metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
        return dict(lines[-1].get("league", {})) if lines else {}

    def copies() -> int:
        return sum(each["copies"] for each in league().get("learning", {}).values())

    eventually(lambda: copies() >= 3, 90, lambda: run.output)
    for role in ("envrunner 0", "learner 0", "envrunner 1"):
        had = copies()
        place.worker(role).kill()
        eventually(lambda had=had: copies() >= had + 3, 90, lambda: run.output)
    assert "league: there is no copy" not in run.output
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(run_dir)
    assert summary(run_dir)["restarts"] == 3
    place.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('builder = "alphasatr"', "builder = 'alphasatr' is not known: did you mean 'alphastar'?"),
        ('bulider = "none"', "league has no key 'bulider': did you mean 'builder'?"),
        ("options = {main = 2}", "options has no key 'main': did you mean 'mains'?"),
        ('builder = "rllib"', "players that learn while it trains"),
        ('teams = [["red"]]', "no agent is called 'red'"),
    ],
)
def test_a_wrong_table_is_one_sentence(place: Place, line: str, says: str) -> None:
    place.write("league.toml", f'env = "juggler:MatrixGame"\nalgorithm = "ppo"\n[league]\n{line}\n')
    run = place.run("train", "league.toml", "--run-dir", "run")
    assert run.status == 2
    assert says in run.output
    assert "Traceback" not in run.output
    assert not (place.path / "run").exists()


def test_what_does_not_go_with_a_league_is_told(place: Place) -> None:
    league = json.dumps({"builder": "self_play"})
    for options, says in (
        (("--env", "CartPole-v1"), "has one agent, and nobody to play against"),
        (("--env", "juggler:MatrixGame", "--synchronous"), "synchronous = true with a league"),
        (("--env", "juggler:MatrixGame", "--gateway", "127.0.0.1:0"), "league with gateway"),
    ):
        run = place.run("train", *options, "--league", league, "--run-dir", "run")
        assert run.status == 2, run.output
        assert says in run.output, run.output
