"""A league played by simulators, at gateways that may die."""

from __future__ import annotations

import json
import re
import sys

import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    eventually,
    metrics,
    summary,
    trained_steps,
)

from juggler.runtime.checkpoints.checkpoint import read

LEAGUE = """
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
    place.write("league.toml", LEAGUE.format(socket=socket))
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
    # The others are assigned, to gateways with at most this many.
    assert 0 <= state["next_match_id"] - finished <= 2 * (4 + 64)
    assert 1_000 < finished <= begun, "none twice"
    assert re.search(r"no longer has the simulator .*NOT_FINITE", run.output)
