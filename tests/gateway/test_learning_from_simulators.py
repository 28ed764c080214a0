"""CartPole, learned from simulators in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import juggler
from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.datasets.dataset import Dataset

#: Of four environments, which acts by itself.
LOCAL = """
import sys
from gymnasium import make
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from juggler.client import GatewayError, connect

env = SyncVectorEnv([lambda: make("CartPole-v1")] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
spaces = env.single_observation_space, env.single_action_space
try:
    with connect(sys.argv[1], *spaces, environments=4, mode="local") as session:
        observations, _ = env.reset(seed=int(sys.argv[2]))
        actions = session.step(observations)
        while True:
            observations, *rest, infos = env.step(actions)
            actions = session.step(observations, *rest, infos.get("final_obs"))
except GatewayError as error:
    sys.exit(error.code != "ENDED")
"""


#: Hands in what a random policy does.
LOGGED = """
import sys
import numpy as np
from gymnasium import make
from juggler.client import GatewayError, connect

env, generator = make("CartPole-v1"), np.random.default_rng(int(sys.argv[2]))
try:
    with connect(sys.argv[1], env.observation_space, env.action_space, mode="logged") as session:
        env.reset(seed=int(sys.argv[2]))
        while True:
            observations, actions, over = [env.reset()[0]], [], False
            while not over:
                actions.append(int(generator.integers(2)))
                observation, _, terminated, truncated, _ = env.step(actions[-1])
                observations.append(observation)
                over = terminated or truncated
            ones = np.ones(len(actions))
            session.record(
                np.array(observations), actions, ones, ones * np.log(0.5),
                terminated=terminated, truncated=truncated,
            )
except GatewayError as error:
    sys.exit(error.code != "ENDED")
"""


@pytest.mark.slow
def test_simulators_that_act_by_themselves_teach_cartpole(tmp_path: Path) -> None:
    run = "cartpole-ppo --stop-return 450 --stop-steps 1500000"
    assert learned_from(tmp_path, run, LOCAL, 4)["solved"]
    assert not any(inferences(tmp_path))


def inferences(tmp_path: Path) -> list[Any]:
    """What each line of a run's metrics tells of its gateway's inferences."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["inference"] for line in lines]


@pytest.mark.slow
def test_simulators_evaluate_checkpoints_and_confirm_that_a_run_is_solved(tmp_path: Path) -> None:
    run = "cartpole-ppo --stop-return 50 --evaluation-seconds 1 --evaluation-episodes 5"
    summary = learned_from(tmp_path, run, LOCAL.replace(', mode="local"', ""), 4)
    assert summary["solved"]
    assert summary["confirmation"]["confirmed"]
    assert summary["confirmation"]["episodes"] >= 100
    assert summary["confirmation"]["return_mean"] >= 50
    assert summary["best"]["episodes"] == 5
    assert (tmp_path / "run" / "best").is_dir()
    rows = [each["rows"] for each in inferences(tmp_path) if each]
    assert rows
    assert all(1 <= each <= 4 * 4 for each in rows)


@pytest.mark.long
def test_what_a_random_policy_did_teaches_impala_and_is_recorded(tmp_path: Path) -> None:
    sampled = tmp_path / "sampled"
    options = f"cartpole --stop-steps 100000 --record {sampled}"
    summary = learned_from(tmp_path, options, LOGGED, 2)
    assert not summary["solved"]  # returns of another policy are none of this one
    played = juggler.evaluate(tmp_path / "run", episodes=20)
    assert sum(played.returns) / 20 > 60  # of 22 where actions are random
    recorded = Dataset(str(sampled))
    steps = sum(len(recorded.episode(index)) for index in range(len(recorded)))
    assert steps > 95_000


def learned_from(tmp_path: Path, run_of: str, simulator: str, count: int) -> dict[str, Any]:
    """Train with simulators in processes; return the checked summary."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output, run_dir = tmp_path / "output", tmp_path / "run"
    command = f"train {run_of} --gateway 127.0.0.1:0"
    simulators: list[subprocess.Popen[bytes]] = []
    with output.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "juggler", *command.split(), "--run-dir", str(run_dir)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 150
        while not (found := re.search(r"takes simulators at (\S+);", output.read_text())):
            assert time.monotonic() < deadline, output.read_text()
            assert run.poll() is None, output.read_text()
            time.sleep(0.1)
        simulators += [
            subprocess.Popen([sys.executable, "-c", simulator, found[1], str(i)], env=environment)
            for i in range(count)
        ]
        assert run.wait(300) == 0, output.read_text()
        assert [each.wait(60) for each in simulators] == [0] * count
    finally:
        for process in (run, *simulators):
            process.kill()
            process.wait()
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    dropped = sum(summary["env_steps_dropped"].values())
    accounted = summary["env_steps_trained"] + dropped + summary["env_steps_in_flight"]
    assert summary["env_steps_sampled"] == accounted
    return summary


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gateway": "5005"}, 'gateway must be "HOST:PORT"'),
        ({"gateway": "127.0.0.1:99999"}, 'gateway must be "HOST:PORT"'),
        ({"gateway_max_batch": 0}, "gateway_max_batch must be an integer of at least 1"),
        ({"gateway_max_wait_ms": -1.0}, "gateway_max_wait_ms must be from 0 to 1000"),
        (
            {"gateway": "127.0.0.1:0", "evaluation_seconds": 5.0, "evaluation_video": 1},
            "evaluation_video = 1",
        ),
        ({"simulator": "./game"}, "put {address} where the command takes the address"),
        ({"simulator": "./game '{address}"}, "No closing quotation"),
        (
            {"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": [[5, 1], [2, 3]]}},
            r"simulator_parameters.wind = .*: expected a number, or \[step, value\] pairs",
        ),
        (
            {"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": float("nan")}},
            "simulator_parameters.wind = nan: expected a number",
        ),
        ({"gateway": "127.0.0.1:0", "simulator_parameters": {"wind": "a"}}, "expected a table of"),
        ({"simulator_parameters": {"wind": 1}}, "environments in Python have env_kwargs"),
        ({"simulators_per_runner": 0}, "simulators_per_runner must be an integer of at least 1"),
    ],
)
def test_settings_that_no_gateway_could_have_are_refused(
    keys: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_flat(keys)
