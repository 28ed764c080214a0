"""Whole runs with several agents and several modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.place import metrics, status_of, summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import juggler
from juggler.runtime.checkpoints.checkpoint import read

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


# A run with several agents and two algorithms: training, resuming, evaluating, acting.


RUN: dict[str, Any] = {
    "env": "support.small_games:Tag",
    "modules": {"runner": {"algorithm": "ppo", "batch_size": 64, "minibatches": 1}},
    "num_env_runners": 1,
    "progress": "off",
}
SEEN = {"adversary": np.zeros(3, np.float32), "runner": np.zeros(2, np.float32)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> juggler.Result:
    run_dir = tmp_path_factory.mktemp("runs") / "tag"
    return juggler.train(**RUN, stop_steps=2000, run_dir=str(run_dir))


@pytest.mark.usefixtures("local_workers")
def test_modules_with_different_algorithms_learn_side_by_side(trained: juggler.Result) -> None:
    assert trained.checkpoint is not None
    saved = read(trained.checkpoint)
    assert saved.module_ids == ("adversary", "runner")
    algorithms = {name: saved.modules[name]["extra"]["algorithm"] for name in saved.modules}
    assert algorithms == {"adversary": "impala", "runner": "ppo"}
    steps = {name: saved.counters_of(name)["trained"] for name in saved.modules}
    assert min(steps.values()) > 0
    assert sum(steps.values()) == saved.counters["trained"] >= 2000
    assert saved.config["agents"] == {
        "adversary_0": "adversary",
        "adversary_1": "adversary",
        "runner_0": "runner",
    }


@pytest.mark.usefixtures("local_workers")
def test_such_a_run_is_resumed_with_every_module_at_its_version(
    trained: juggler.Result, tmp_path: Path
) -> None:
    assert trained.checkpoint is not None
    before = read(trained.checkpoint)
    later = juggler.resume(trained.run_dir, stop_steps=3000)
    assert later.checkpoint is not None
    after = read(later.checkpoint)
    for module_id in before.module_ids:
        (generation, update), newer = before.version_of(module_id), after.version_of(module_id)
        assert newer[0] == generation + 1
        assert newer[1] > update
    assert later.summary["env_steps_trained"] >= 3000


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize("module_id", SEEN)
def test_each_module_becomes_a_policy(trained: juggler.Result, module_id: str) -> None:
    policy = juggler.load_policy(trained.run_dir, module_id=module_id)
    action, _ = policy.act(SEEN[module_id])
    assert policy.action_space.contains(action)


@pytest.mark.usefixtures("local_workers")
def test_whole_episodes_of_all_agents_are_evaluated(trained: juggler.Result) -> None:
    played = juggler.evaluate(trained.run_dir, 3)
    assert played.returns == [15.0] * 3, "the sum over three agents, each of which gets 1 a step"
    assert played.lengths == [5] * 3


# Numbers that environments with several agents put into infos, in the metrics of whole runs.


GAME = """
import numpy as np
from gymnasium import spaces

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
"""
EXPECTED = {
    "left/step": {"mean": 2.5, "least": 1.0, "most": 4.0},
    "right/step": {"mean": 25.0, "least": 10.0, "most": 40.0},
    "right/won": {"mean": 1.0, "least": 1.0, "most": 1.0},
}


@pytest.mark.usefixtures("local_workers")
def test_numbers_of_each_agent_are_in_metrics_and_the_summary(in_a_directory: Path) -> None:
    Path("told.py").write_text(GAME)
    options = ["--agents", '{"left": "one", "right": "two"}', "--stop-steps", 3000]
    options += ["--num-env-runners", 2, "--run-dir", "run"]
    assert status_of("train", "--env", "told:Told", *options) == 0
    lines = [*metrics(Path("run")), summary(Path("run"))]
    assert lines[-1]["info"] == EXPECTED
    assert all(line["info"] == EXPECTED for line in lines if line["episodes"])
    events = EventAccumulator(str(next(Path("run").rglob("*tfevents*")).parent))
    events.Reload()
    tags = {f"info/{name}/{key}" for name, means in EXPECTED.items() for key in means}
    assert tags <= set(events.Tags()["scalars"])
