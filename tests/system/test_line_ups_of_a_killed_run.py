"""A league that is killed goes on with the line-ups that it would have drawn.

Those of the same number among the same players, if the builder does not look at results: these
come in any order, and after a break the players are back one after the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.league_runs import LEAGUE, players
from support.place import Place, assert_books_balance, checkpoints, eventually, summary

from juggler.runtime.checkpoints.checkpoint import CheckpointError, read

COPIES = {"main-0-v0", "main-0-v1"}

#: The random number decides what is left open of a line-up, and no two matches have the same.
BUILDER = """
import json
from dataclasses import dataclass
from juggler import FreezePlayer, LeagueBuilder

@dataclass(kw_only=True)
class Telling(LeagueBuilder):
    def build(self, results):
        if "main-0" in results.players() and results.player("main-0").copies < 2:
            yield FreezePlayer("main-0")

    def match(self, results):
        able, pairing = results.players(), super().match(results)
        told = [able, pairing.home, list(pairing.opponents), results.random.random()]
        with open("drawn", "a") as file:
            file.write(json.dumps(told) + "\\n")
        return pairing
"""

TABLE = """
builder = "telling:Telling"
evaluation_probability = 0.0
options = {mains = 2}
"""


def drawn(place: Place, file: str = "drawn") -> list[list[Any]]:
    """What the builder has told, by number of the match, as each is drawn once."""
    told = (place.path / file).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in told if line.endswith("\n")]


def with_all_copies(run_dir: Path) -> Path | None:
    """A checkpoint that has all the copies that there will ever be."""
    for path in checkpoints(run_dir):
        try:
            saved = players(read(path))
        except CheckpointError:
            continue  # it is being written
        if {name for name, each in saved.items() if each["ready"]} >= COPIES:
            return path
    return None


@pytest.mark.slow
def test_a_killed_league_goes_on_with_the_line_ups_that_it_would_have_drawn(place: Place) -> None:
    run_dir = place.path / "run"
    place.write("telling.py", BUILDER)
    place.write("league.toml", LEAGUE.partition("builder =")[0] + TABLE)
    options = ["--run-dir", "run", "--stop-steps", 1_000_000, "--num-learners", 2]
    options += ["--checkpoint-seconds", 0.5, "--keep-checkpoints", 1000]
    run = place.start("train", "league.toml", *options)
    path: Path = eventually(lambda: with_all_copies(run_dir), 90, lambda: run.output)
    saved = read(path).counters
    first = saved["league"]["next_match_id"]
    eventually(lambda: len(drawn(place)) >= first + 1000, 60, lambda: run.output)
    run.process.kill()
    run.process.wait()
    eventually(lambda: not place.processes(), 20)
    for newer in checkpoints(run_dir):
        if newer > path:
            newer.rename(place.path / newer.name)
    before = (place.path / "drawn").rename(place.path / "before").name

    again = place.run("train", "--resume", "run", "--stop-steps", saved["trained"] + 8_000)
    assert again.status == 0, again.output
    assert summary(run_dir)["restarts"] == 0
    both = zip(drawn(place, before)[first:], drawn(place), strict=False)
    same_players = [(was, now) for was, now in both if was[0] == now[0]]
    assert len(same_players) >= 100
    assert all(was == now for was, now in same_players)
    homes = {(now[1], *now[2]) for _, now in same_players}
    assert homes == {(f"main-{n}", f"main-{1 - n}", *sorted(COPIES)) for n in (0, 1)}
    assert_books_balance(run_dir)
    place.assert_nothing_is_left()
