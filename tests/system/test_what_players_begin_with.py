"""Players of a league begin anew: as they were, and with the flaws of others to find."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import status_of
from support.league_runs import LEAGUE, players
from support.place import REPOSITORY, Place

import juggler
from juggler.envrunner.multi_agent.matrix_game import ROCK_PAPER_SCISSORS
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.checkpoints.frozen import WEIGHTS, playing_tree, read_module

FLAWED = """
from dataclasses import dataclass
from juggler import AddPlayer
from juggler.driver.league.alphastar import AlphaStar

@dataclass(kw_only=True)
class Flawed(AlphaStar):
    def initial(self):
        yield AddPlayer("main-0", "main", learning=False, source="rock")
        yield AddPlayer("main_exploiter-0", "main_exploiter")
"""

MOSTLY_ROCK = {"payoffs": [[1, 1, 1], [0, 0, 0], [0, 0, 0]]}  # by the choice of "row"


@pytest.mark.long
def test_an_exploiter_of_a_player_with_a_flaw_is_copied_and_begins_anew(place: Place) -> None:
    place.write("rock.toml", LEAGUE.partition("[league]")[0])
    rock = ["--env-kwargs", json.dumps(MOSTLY_ROCK), "--run-dir", "rock", "--lr", 0.01]
    run = place.run("train", "rock.toml", *rock, "--stop-steps", 10_000)
    assert run.status == 0, run.output
    chances = juggler.load_policy(place.path / "rock").probabilities(np.ones(1, np.float32))
    assert chances.argmax() == 0
    assert chances.max() > 0.7, "it is the player with a flaw"

    place.write("flawed.py", FLAWED)
    league = LEAGUE.partition("[league]")[0].replace("batch_size = 256", "batch_size = 128")
    league += '[league]\nbuilder = "flawed:Flawed"\nevaluation_probability = 0.0\n'
    league += "options = {min_phase_steps = 500, max_phase_steps = 10_000_000}\n"
    league += '[modules.rock]\ntrain = false\nfrom = "rock"\n'
    place.write("league.toml", league)
    path = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{place.path}"}
    options = ["--run-dir", "run", "--lr", 0.01, "--stop-steps", 10_000]
    run = place.run("train", "league.toml", *options, **path)
    assert run.status == 0, run.output
    exploiter = players(read(place.path / "run"))["main_exploiter-0"]
    assert exploiter["life"] >= 2, "it was reset, found the flaw anew, and was reset again"
    assert exploiter["copies"] == exploiter["life"], "it is copied before each reset"
    for number in (0, 1):
        copy = place.path / f"run/frozen/main_exploiter-0-v{number}"
        answer = juggler.load_policy(copy).probabilities(np.ones(1, np.float32))
        won = answer.reshape(-1) @ np.array(ROCK_PAPER_SCISSORS) @ chances.reshape(-1)
        assert 0.5 + 0.5 * won > 0.6, "it was more than 0.7 over the last matches before its copy"
        assert answer.argmax() == 1, "paper"
    place.assert_nothing_is_left()


@pytest.mark.long
def test_who_is_reset_begins_with_what_the_run_began_with_also_when_it_is_resumed(
    place: Place,
) -> None:
    place.write("first.toml", LEAGUE.partition("[league]")[0])
    run = place.run("train", "first.toml", "--run-dir", "first", "--stop-steps", 2_000)
    assert run.status == 0, run.output
    league, _, _ = LEAGUE.partition("options = ")
    options = "{mains = 1, main_exploiters = 1, min_phase_steps = 1, max_phase_steps = 300, "
    place.write("league.toml", league + "options = " + options + "league_exploiters = 0}\n")
    still = ["--from-checkpoint", "first", "--lr", 1e-12, "--run-dir", "run"]
    run = place.run("train", "league.toml", *still, "--stop-steps", 4_000)
    assert run.status == 0, run.output
    shutil.rmtree(place.path / "first")
    before = players(read(place.path / "run"))
    again = place.run("train", "--resume", "run", "--stop-steps", 16_000)
    assert again.status == 0, again.output
    frozen = place.path / "run/frozen"
    made = [int(path.name.rpartition("-v")[2]) for path in frozen.glob("main_exploiter-0-v*")]
    assert max(made) > before["main_exploiter-0"]["copies"], "it was reset since, and copied again"
    begun, now = (
        juggler.load_policy(frozen / name).probabilities(np.ones(1, np.float32))
        for name in ("main-0-v0", f"main_exploiter-0-v{max(made)}")
    )
    np.testing.assert_allclose(now, begun, atol=1e-4)
    place.assert_nothing_is_left()


HUNTER = """
from dataclasses import dataclass
from juggler import AddPlayer, FreezePlayer, LeagueBuilder, ResetPlayer

@dataclass(kw_only=True)
class Hunt(LeagueBuilder):
    \"\"\"A hunter is copied, then reset to a fixed player and to its first copy.\"\"\"

    def initial(self):
        yield AddPlayer("stone", "fixed", learning=False, source="rock")
        yield AddPlayer("hunter", "main")

    def build(self, results):
        if "hunter" not in results.players():
            return
        hunter = results.player("hunter")
        if hunter.phase_steps < 500:
            return
        if hunter.copies <= hunter.life:
            yield FreezePlayer("hunter")
        elif hunter.life == 0:
            yield ResetPlayer("hunter", "stone")
        elif hunter.life == 1 and "hunter-v0" in results.players():
            yield ResetPlayer("hunter", "hunter-v0")
"""


@pytest.mark.usefixtures("local_workers")
def test_a_player_is_reset_to_another_one_with_a_new_optimizer_and_schedules_that_begin_at_0(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate changes no weights, so that they show where they are from."""
    still = ["--lr", 1e-12, "--stop-steps"]
    Path("rock.toml").write_text(LEAGUE.partition("[league]")[0])
    Path("hunter.py").write_text(HUNTER)
    league = LEAGUE.partition("[league]")[0] + '[league]\nbuilder = "hunter:Hunt"\n'
    Path("league.toml").write_text(league + '[modules.rock]\ntrain = false\nfrom = "rock"\n')
    assert status_of("train", "rock.toml", "--run-dir", "rock", "--seed", 7, *still, 500) == 0
    capsys.readouterr()
    assert status_of("train", "league.toml", "--run-dir", "run", *still, 6_000) == 0
    assert "cannot" not in "".join(capsys.readouterr())

    frozen = in_a_directory / "run/frozen"
    names = ("rock", "hunter-v0", "hunter-v1", "hunter-v2")
    rock, first, second, third = (
        playing_tree(*read_module(str(frozen / name)))[WEIGHTS] for name in names
    )
    assert same(second, rock)
    assert same(third, first)
    assert not same(first, rock)
    saved = read(in_a_directory / "run")
    hunter = players(saved)["hunter"]
    assert hunter["life"] == 2
    assert hunter["copies"] == 3
    steps = int(saved.tree["hunter"]["steps"])
    assert 0 < steps <= hunter["steps"] - hunter["reset_at"]


def same(one: Any, other: Any) -> bool:
    """Whether two players have the same weights."""
    return all(np.allclose(one[name], other[name], atol=1e-6) for name in one.keys() | other.keys())
