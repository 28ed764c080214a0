"""Runs with a league: players train at once, are copied, and play."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    eventually,
    metrics,
    status_of,
    summary,
    trained_steps,
)

from juggler.driver.config_files import read_shipped
from juggler.envrunner.environments.simulator_extras import check_extra
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read
from juggler.runtime.checkpoints.weights import playing_tree, read_module, tree_digest

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


@pytest.mark.usefixtures("local_workers")
def test_players_are_copied_reset_and_go_on_when_the_run_is_resumed(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = in_a_directory / "run"
    Path("league.toml").write_text(LEAGUE)
    assert status_of("train", "league.toml", "--run-dir", "run", "--stop-steps", 8_000) == 0
    assert_books_balance(run_dir)
    before = read(run_dir)
    was = players(before)
    assert {"main-0", "main_exploiter-0", "league_exploiter-0"} <= was.keys()
    assert was["main_exploiter-0"]["life"] > 0, "it was reset"
    exploiter = was["main_exploiter-0"]
    since = exploiter["steps"] - exploiter["reset_at"]
    assert int(before.tree["main_exploiter-0"]["steps"]) <= since, "its schedules began again"
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

    matches = ["--play", "row=main-0", "--play", f"column=run/frozen/{present[-1]}"]
    assert status_of("train", "--resume", "run", "--stop-steps", 11_000) == 0
    capsys.readouterr()
    assert status_of("league", "run", "--picture", "league.png") == 0
    shown = capsys.readouterr().out
    assert status_of("evaluate", "run", *matches, "--episodes", 4, "--explore") == 0
    now = players(read(run_dir))
    assert now["main-0"]["steps"] > was["main-0"]["steps"]
    assert {name: digest(run_dir, name) for name in digests} == digests
    assert now.keys() > was.keys()
    assert (
        read(run_dir).counters["league"]["next_match_id"]
        > before.counters["league"]["next_match_id"]
    )

    assert re.search(r" at \d+ steps", shown), "copies say where they come from"
    assert "wins of" in shown
    assert Path("league.png").stat().st_size > 10_000


OWN = """
from dataclasses import dataclass
from juggler import FreezePlayer, LeagueBuilder, Pairing

@dataclass(kw_only=True)
class Mine(LeagueBuilder):
    every: int = 1_000

    def build(self, results):
        for player in results.players("main"):
            if results.player(player).phase_steps >= self.every:
                yield FreezePlayer(player)

    def match(self, results):
        home = results.random.choice(results.players("main"))
        past = results.players(learning=False)
        return Pairing(home, dict.fromkeys(past or [home], 1.0), "past")
"""


@pytest.mark.usefixtures("local_workers")
def test_a_builder_of_ones_own_is_needed_to_train_and_not_to_look(
    in_a_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = in_a_directory / "own"
    own.mkdir()
    (own / "builder_of_mine.py").write_text(OWN)
    league = json.dumps({"builder": "builder_of_mine:Mine", "options": {"every": 500}})
    options = ["--env", "juggler:MatrixGame", "--algorithm", "ppo", "--league", league]
    options += ["--num-env-runners", 1, "--envs-per-runner", 16, "--fragment-steps", 16]
    options += ["--batch-size", 256, "--stop-steps", 2_500, "--run-dir", "run"]
    with monkeypatch.context() as path:
        path.syspath_prepend(own)
        assert status_of("train", *options) == 0
    del sys.modules["builder_of_mine"]
    assert metrics(in_a_directory / "run")[-1]["league"]["historical"] >= 2
    assert status_of("league", "run", "--tournament", 4) == 0
    capsys.readouterr()
    assert status_of("train", "--resume", "run", "--stop-steps", 3_000) == 2
    assert "there is no Python module 'builder_of_mine' here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rock-paper-scissors-league", marks=pytest.mark.long),
        pytest.param("kuhn-league", marks=pytest.mark.slow),
        pytest.param("connect-four-league", marks=pytest.mark.long),
    ],
)
def test_a_league_that_ships_trains_all_its_players(place: Place, name: str) -> None:
    config = read_shipped(name).config
    try:
        check_extra(config.env_runner.env)
    except ValueError as error:
        pytest.skip(str(error))
    steps = 20 * config.learner.batch_size
    run = place.run("train", name, "--run-dir", "run", "--stop-steps", steps)
    assert run.status == 0, run.output
    line = metrics(place.path / "run")[-1]
    assert line["league"]["players"] > len(line["league"]["learning"]), "there are copies"
    assert all(player["steps"] for player in line["league"]["learning"].values())
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


RLLIB = """
builder = "rllib"
max_learning = 5
min_games = 1
options = {random_players = 1, main_exploiters = 1, league_exploiters = 1, snapshot_at = 0.4, \
min_matches = 30, keep_training_probability = 1.0}
"""


@pytest.mark.slow
def test_a_league_adds_players_that_learn_and_has_them_when_it_is_killed_and_resumed(
    place: Place,
) -> None:
    run_dir = place.path / "run"
    small = LEAGUE.replace("batch_size = 256", "batch_size = 64")
    place.write("league.toml", small.partition("builder =")[0] + RLLIB)
    options = ["--run-dir", "run", "--stop-steps", 1_000_000, "--checkpoint-seconds", 1]
    run = place.start("train", "league.toml", *options, "--num-learners", 2)
    at_first = {"main-0", "main_exploiter-0", "league_exploiter-0"}

    def added(least: int) -> dict[str, int]:
        """Steps trained on by added players, in the last checkpoint."""
        try:
            saved = read(run_dir)
        except CheckpointError:
            return {}
        steps = {name: saved.counters_of(name)["trained"] for name in saved.modules}
        return {each: n for each, n in steps.items() if each not in at_first and n >= least}

    eventually(lambda: len(added(1)) == 2, 60, lambda: run.output)
    run.wait_for("all places are taken")
    run.process.kill()
    run.process.wait()
    was = added(0)
    assert run.output.count("all places are taken") == 1
    config = (run_dir / "config.toml").read_text()
    assert not any(name in config for name in was), "it tells the run as it was started"

    goal = read(run_dir).counters["trained"] + 20_000
    again = place.run("train", "--resume", "run", "--stop-steps", goal)
    assert again.status == 0, again.output
    now = added(0)
    assert now.keys() == was.keys()
    assert all(now[name] > was[name] for name in was), "they are trained on"
    assert_books_balance(run_dir)
    end = summary(run_dir)
    learned = {name: end["by_module"][name]["env_steps_trained"] for name in (*at_first, *now)}
    assert sum(learned.values()) == end["env_steps_trained"]
    hosts = {tuple(end["by_module"][name]["learners"]) for name in now}
    assert hosts == {("learner-0",), ("learner-1",)}, "each where the fewest are"
    assert end["restarts"] == 0

    seats = ["--play", f"row={next(iter(now))}", "--play", "column=main-0"]
    played = place.run("evaluate", "run", *seats, "--episodes", 2, "--explore")
    assert played.status == 0, played.output
    place.assert_nothing_is_left()


@pytest.mark.usefixtures("local_workers")
def test_what_does_not_go_with_a_league_is_told(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    league = json.dumps({"builder": "self_play"})
    for options, says in (
        (("--env", "CartPole-v1"), "has one agent, and no opponent"),
        (("--env", "juggler:MatrixGame", "--synchronous"), "synchronous = true with a league"),
    ):
        assert status_of("train", *options, "--league", league, "--run-dir", "run") == 2
        assert says in capsys.readouterr().err


# A league played by simulators, at gateways that may die.


LEAGUE_OF_SIMULATORS = """
gateway = "unix:{socket}"
env = "duel"
algorithm = "ppo"
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 16
batch_size = 128
epochs = 2
stop_steps = 10_000
evaluation_seconds = 2
evaluation_episodes = 4

[connectors]
learner = []

[league]
builder = "self_play_window"
teams = [["row"], ["column"]]
decay = 1.0
options = {{save_steps = 2_000}}
"""

#: Of rock, paper and scissors in three rounds: tells how many matches it has begun.
GAME = """
import json, os, sys
import numpy as np
from juggler.client import GatewayError, connect_agents, play_agents
from juggler.envrunner.multi_agent.matrix_game import MatrixGame

class Thrice(MatrixGame):
    begun = 0

    def reset(self, *given, **named):
        self.rounds, Thrice.begun = 3, self.begun + 1
        return super().reset(*given, **named)

    def step(self, actions):
        shown, rewards, ended, *rest = super().step(actions)
        self.rounds -= 1
        if self.rounds:
            self.agents, ended = [*self.possible_agents], dict.fromkeys(ended, False)
        return shown, rewards, ended, *rest

address, does = sys.argv[1:]
game = Thrice()
try:
    if does == "play":
        play_agents(game, address)
    else:
        play_agents(game, address, episodes=40)
        spaces = {name: (game.observation_space(name), game.action_space(name))
                  for name in game.possible_agents}
        session = connect_agents(address, spaces)
        session.step(game.reset()[0])
        if does == "die":
            print(json.dumps(Thrice.begun), flush=True)
            os._exit(0)
        nonsense = {name: np.full(1, np.nan, np.float32) for name in spaces}
        session.step(nonsense, {"row": 1.0, "column": -1.0})
except GatewayError as error:
    assert does == "err" and error.code == "NOT_FINITE", error
print(json.dumps(Thrice.begun))
"""


@pytest.mark.slow
def test_a_league_of_simulators_hears_of_each_match_once(place: Place) -> None:
    socket, run_dir = place.path / "at", place.path / "run"
    place.write("league.toml", LEAGUE_OF_SIMULATORS.format(socket=socket))
    place.write("game.py", GAME)
    run = place.start("train", "league.toml", "--run-dir", "run")
    run.wait_for("takes simulators at", 150)

    def simulator(gateway: int, does: str) -> Command:
        address = f"unix:{socket}-{gateway}" if gateway else f"unix:{socket}"
        return place.start_program([sys.executable, "game.py", address, does])

    here = [simulator(0, "play"), simulator(0, "err"), simulator(0, "die"), simulator(1, "play")]
    eventually(lambda: trained_steps(run_dir) > 3_000, 200, lambda: run.output)
    place.worker("envrunner 1").kill()
    assert run.wait(300) == 0, run.output
    begun = 0
    for each in here:
        assert each.wait(60) == 0, each.output
        begun += json.loads(each.output.splitlines()[-1])

    assert_books_balance(run_dir)
    assert summary(run_dir)["restarts"] == 1
    last = metrics(run_dir)[-1]
    assert last["league"]["historical"] >= 3, "copies play"
    assert set(last["by_agent"]) == {"row", "column"}
    assert last["evaluation_return_mean"] == 0, (
        "main plays both agents, and one gets what one loses"
    )
    state = read(run_dir).counters["league"]
    finished, odd = divmod(sum(each["matches"] for each in state["means"]), 2)
    assert not odd
    # The others are assigned, to gateways with at most this many, or were the lost gateway's.
    assert 0 <= state["next_match_id"] - finished <= 3 * (4 + 64)
    assert 1_000 < finished <= begun, "none twice"
    assert re.search(r"no longer has the simulator .*NOT_FINITE", run.output)
