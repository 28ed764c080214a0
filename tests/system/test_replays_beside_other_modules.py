"""A module that keeps steps, beside one that does not, while learners are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    eventually,
    metrics,
    summary,
)

MINE = """
import os
from pathlib import Path

import numpy as np
from gymnasium import spaces

from juggler.learner.algorithms.dqn import DqnAlgorithm
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala import ImpalaAlgorithm
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoAlgorithm
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.sac import SacAlgorithm
from juggler.learner.algorithms.sac.core import Sac


class Herd:
    '''Everybody sees who they are, two numbers of the episode, and which step it is.

    Two sheep may not do all that they might, and each of them ends when it likes. A dog stays.
    '''

    possible_agents = ("sheep_0", "sheep_1", "dog")
    sees = spaces.Box(0, 1, (4,), np.float32)

    def observation_space(self, agent):
        mask = spaces.Box(0, 1, (3,), np.int8)
        masked = spaces.Dict({"observation": self.sees, "action_mask": mask})
        return self.sees if agent == "dog" else masked

    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "dog" else 3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.marks = self.random.integers(1, 1 << 24, 2) / (1 << 24)  # exact in float32
        self.ends = {agent: int(self.random.integers(1, 20)) for agent in self.possible_agents}
        self.ends["dog"] = 20
        self.agents, self.steps = list(self.possible_agents), 0
        return self.shown(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        for agent, action in actions.items():
            if agent != "dog" and not self.masks[agent][action]:
                raise ValueError(f"{agent} may not do {action}: {self.masks[agent]}")
        before, self.steps = self.agents, self.steps + 1
        ended = {agent: self.steps == self.ends[agent] for agent in before}
        self.agents = [agent for agent in before if not ended[agent]]
        rewards = dict.fromkeys(before, float(self.marks[0]))
        infos = {agent: {} for agent in before}
        return self.shown(before), rewards, ended, dict.fromkeys(before, False), infos

    def shown(self, agents):
        self.masks, seen = {}, {}
        for agent in agents:
            who = self.possible_agents.index(agent) / 4
            seen[agent] = np.array([who, *self.marks, self.steps / 32], np.float32)
            if agent != "dog":
                bits = int(self.random.integers(1, 8))  # at least one is allowed
                self.masks[agent] = np.array([bits >> i & 1 for i in range(3)], np.int8)
                seen[agent] = {"observation": seen[agent], "action_mask": self.masks[agent]}
        return seen


class Noting:
    '''Writes down each step that arrives, and looks at each sample that is drawn.'''

    def data_source(self, seed=0):
        source = super().data_source(seed)
        add = source.add

        def noted(sample, *sums):
            (columns,) = sample.values()
            steps = plain(columns["observations"])[columns["live"]].tolist()
            with Path(__file__).with_name(f"{os.getpid()}.steps").open("a") as notes:
                notes.writelines(f"{step}\\n" for step in steps)
            for drawn in add(sample, *sums):
                for each in drawn.values():
                    must_be_whole(each)
                yield drawn

        source.add = noted
        return source


def plain(observations):
    return observations["observation"] if isinstance(observations, dict) else observations


def must_be_whole(columns):
    if "discounts" not in columns:
        return
    before = plain(columns["observations"])[:, 0]  # [B, 4]
    after = plain(columns["last_observations"])  # [B, 4]
    goes_on = columns["discounts"][:, 0] > 0  # [B]
    whole = (before[:, 0] < 0.5) & (columns["rewards"][:, 0] == before[:, 1])
    follows = (after[:, :3] == before[:, :3]).all(1) & (after[:, 3] == before[:, 3] + 1 / 32)
    if not (whole & (follows | ~goes_on)).all():
        raise AssertionError("a transition is of two agents or episodes")


class NotedDqn(DqnAlgorithm):
    core = type("NotingDqn", (Noting, Dqn), {})


class NotedSac(SacAlgorithm):
    core = type("NotingSac", (Noting, Sac), {})


class NotedPpo(PpoAlgorithm):
    core = type("NotingPpo", (Noting, Ppo), {})


class NotedImpala(ImpalaAlgorithm):
    core = type("NotingImpala", (Noting, Impala), {})
"""

SETTINGS = """
env = "mine:Herd"
num_env_runners = 2
envs_per_runner = 4
fragment_steps = 8
num_learners = 2
checkpoint_seconds = 1
stop_steps = 1_000_000_000
connectors = {}
model = {hidden_sizes = [16]}

[modules.sheep]
algorithm = "mine:KEEPS"
batch_size = 64
replay_begin = 200
replay_batch_size = 16
replay_ratio = 0.5
n_step = 1

[modules.dog]
algorithm = "mine:USES"
batch_size = 64
"""


def noted(place: Place, program: int) -> list[str]:
    """The steps that a learner got, which may have been killed while it wrote."""
    lines = (place.path / f"{program}.steps").read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("keeps", "uses"),
    [("NotedDqn", "NotedPpo"), pytest.param("NotedSac", "NotedImpala", marks=pytest.mark.long)],
)
def test_no_step_is_learned_from_twice_when_the_learners_of_two_algorithms_are_killed(
    place: Place, keeps: str, uses: str
) -> None:
    directory: Path = place.path / "run"
    place.write("mine.py", MINE)
    place.write("run.toml", SETTINGS.replace("KEEPS", keeps).replace("USES", uses))
    run = place.start("train", "run.toml", "--run-dir", "run")

    def modules() -> dict[str, Any]:
        lines = metrics(directory)
        return lines[-1]["by_module"] if lines else {}

    def kept() -> float:
        lines = metrics(directory)
        return lines[-1]["modules"].get("sheep", {}).get("replay_rows", 0) if lines else 0

    def all_go_on(before: dict[str, Any]) -> bool:
        return all(now["updates"] > before[key]["updates"] + 3 for key, now in modules().items())

    eventually(lambda: kept() >= 200, 90, lambda: run.output)
    for _ in range(2):  # the first of these may have begun before
        written = checkpoints(directory)[-1:]
        eventually(lambda: checkpoints(directory)[-1:] != written, 30, lambda: run.output)  # noqa: B023
    programs: dict[str, list[int]] = {}  # of each module, before and after
    for module_id in ("sheep", "dog"):
        before = modules()
        (learner,) = before[module_id]["learners"]
        title = learner.replace("-", " ")
        killed = place.worker(title)
        killed.kill()
        killed.wait(30)
        eventually(lambda: all_go_on(before), 60, lambda: run.output)  # noqa: B023
        programs[module_id] = [killed.pid, place.worker(title).pid]
    assert run.output.count("killed by SIGKILL. Starting it again") == 2
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert "of two agents or episodes" not in run.output
    assert_books_balance(directory)
    end = summary(directory)
    assert end["restarts"] == 2
    for module_id, (first, second) in programs.items():
        steps = noted(place, first) + noted(place, second)
        assert len(set(steps)) == len(steps), "a step that arrived twice"
        books = end["by_module"][module_id]
        trained, dropped = books["env_steps_trained"], books["env_steps_dropped"]
        unheard = sum(dropped.get(reason, 0) for reason in ("learner_lost", "shutdown"))
        assert trained <= len(steps) <= trained + unheard
    kept_anew = len(noted(place, programs["sheep"][1]))
    assert end["modules"]["sheep"]["replay_rows"] > kept_anew > 0, "none of the checkpoint"
    place.assert_nothing_is_left()
