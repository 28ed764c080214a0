"""Numbers that environments with several agents put into infos, in the metrics of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import status_of
from support.place import metrics, summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

GAMES = """
import numpy as np
from gymnasium import spaces

import juggler

SEES, ACTS = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)


class Told:
    possible_agents = ("left", "right")

    def observation_space(self, agent):
        return SEES

    def action_space(self, agent):
        return ACTS

    def reset(self, seed=None, options=None):
        self.agents, self.at = list(self.possible_agents), 0
        return self.seen(), {agent: {"step": 1000.0} for agent in self.agents}

    def step(self, actions):
        self.at += 1
        if self.at == 4:
            self.agents = []
        odd = {"text": "x", "nan": float("nan"), "endless": 10**400, "far": {"x": 1.0}}
        infos = {
            "left": {"step": self.at, **odd},
            "right": {"step": 10.0 * self.at, **({} if self.agents else {"won": True})},
            "common": {"step": 1e6},
        }
        both = self.possible_agents
        ends = dict.fromkeys(both, not self.agents), dict.fromkeys(both, False)
        return self.seen(), dict.fromkeys(both, 1.0), *ends, infos

    def seen(self):
        return {agent: np.zeros(3, np.float32) for agent in self.possible_agents}


class ToldArrays(juggler.MultiAgentVectorEnv):
    agents = ("left", "right")
    observation_space, action_space = SEES, ACTS

    def __init__(self, num_envs):
        self.num_envs, self.at = num_envs, 0

    def reset(self, seed, which):
        self.at = 0
        return self.zeros(3), np.ones((self.num_envs, 2), bool)

    def step(self, actions):
        self.at += 1
        over = np.full((self.num_envs, 2), self.at == 4)
        step = np.broadcast_to(self.at * np.array([1.0, 10.0]), over.shape)
        won = np.broadcast_to([False, True], over.shape)
        infos = {"step": step, "won": won * 1.0, "_won": over & won, "nan": step * np.nan}
        ends = over, np.zeros_like(over), ~over
        return juggler.VectorStep(self.zeros(3), np.ones(over.shape), *ends, infos)

    def zeros(self, *shape):
        return np.zeros((self.num_envs, 2, *shape), np.float32)
"""
EXPECTED = {
    "left/step": {"mean": 2.5, "least": 1.0, "most": 4.0},
    "right/step": {"mean": 25.0, "least": 10.0, "most": 40.0},
    "right/won": {"mean": 1.0, "least": 1.0, "most": 1.0},
}


@pytest.mark.usefixtures("local_workers")
def test_numbers_of_each_agent_are_in_metrics_and_the_summary(in_a_directory: Path) -> None:
    Path("told.py").write_text(GAMES)
    games = ("Told", "ToldArrays")
    options = ["--agents", '{"left": "one", "right": "two"}', "--stop-steps", 3000]
    options += ["--num-env-runners", 2]
    for game in games:
        assert status_of("train", "--env", f"told:{game}", "--run-dir", game, *options) == 0
        lines = [*metrics(Path(game)), summary(Path(game))]
        assert lines[-1]["info"] == EXPECTED, game
        assert all(line["info"] == EXPECTED for line in lines if line["episodes"])
        events = EventAccumulator(str(next(Path(game).rglob("*tfevents*")).parent))
        events.Reload()
        tags = {f"info/{name}/{key}" for name, means in EXPECTED.items() for key in means}
        assert tags <= set(events.Tags()["scalars"])
