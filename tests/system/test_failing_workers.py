"""Workers that cannot work end, and the run says why."""

from __future__ import annotations

import pytest
from support.place import Place, assert_books_balance, summary

#: For every process of a run: one of this title gets no thread of this name; "": none at all.
_NO_THREADS = """
import setproctitle, threading

start = threading.Thread.start

def start_or_fail(self):
    if NAME in self.name and setproctitle.getproctitle() == "juggler: TITLE":
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = start_or_fail
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("learner 0", ""),  # it cannot even listen
        ("learner 0", "attach-receive"),
        ("envrunner 0", "attach-heartbeat"),
        ("envrunner 0", "weights"),
    ],
)
def test_a_worker_that_gets_no_threads_ends_the_run_with_its_reason(
    place: Place, title: str, name: str
) -> None:
    """As where memory or the number of threads is limited."""
    text = _NO_THREADS.replace("TITLE", title).replace("NAME", repr(name))
    place.write("sitecustomize.py", text)
    options = ["--num-env-runners", 1, "--run-dir", "run", "--worker-timeout-seconds", 250]
    run = place.run("train", "cartpole", "--stop-steps", 2000, *options, seconds=110)
    assert run.status == 1, run.output
    assert "can't start new thread" in run.output.splitlines()[-1], run.output
    assert "can't start new thread" in summary(place.path / "run")["failure"]
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()


BREAKS_A_RULE = """
import numpy as np
from gymnasium import spaces

class Game:
    possible_agents = ["ann", "bob"]

    def observation_space(self, agent):
        return spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def seen(self):
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return self.seen(), {}

    def step(self, actions):
        self.steps += 1
        rewards = dict.fromkeys(self.possible_agents, 1.0)
        over = {agent: agent == "bob" and self.steps == 40 for agent in self.agents}
        if self.steps >= 40:
            self.agents = ["ann"]
        return self.seen(), rewards, over, dict.fromkeys(over, False), {}
"""


@pytest.mark.slow
def test_an_environment_that_breaks_a_rule_in_every_life_ends_the_run_soon(place: Place) -> None:
    """Bob gets a reward after his end, in every life of every EnvRunner."""
    place.write("games.py", BREAKS_A_RULE)
    options = ["--num-env-runners", 2, "--envs-per-runner", 2, "--run-dir", "run"]
    run = place.run("train", "--env", "games:Game", "--stop-steps", 100_000, *options)
    assert run.status == 1, run.output
    said = next(line for line in run.output.splitlines() if line.startswith("juggler train: "))
    assert "no EnvRunner is left to step games:Game" in said, run.output
    assert "agent 'bob' got a reward after its episode ended" in said
    end = summary(place.path / "run")
    assert end["restarts"] <= 3, "once for each EnvRunner, or while one is being started"
    assert_books_balance(place.path / "run")
    place.assert_nothing_is_left()
