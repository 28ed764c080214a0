"""CartPole, learned from simulators in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from juggler.driver.config import ConfigError, RunConfig

SIMULATOR = """
import sys
from gymnasium import make
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from juggler.client import GatewayError, connect

env = SyncVectorEnv([lambda: make("CartPole-v1")] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
spaces = env.single_observation_space, env.single_action_space
try:
    with connect(sys.argv[1], *spaces, environments=4) as session:
        observations, _ = env.reset(seed=int(sys.argv[2]))
        actions = session.step(observations)
        while True:
            observations, *rest, infos = env.step(actions)
            actions = session.step(observations, *rest, infos.get("final_obs"))
except GatewayError as error:
    sys.exit(error.code != "ENDED")
"""


@pytest.mark.slow
def test_sixteen_simulators_teach_cartpole(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output, run_dir = tmp_path / "output", tmp_path / "run"
    command = "train cartpole-ppo --gateway 127.0.0.1:0 --stop-return 450 --stop-steps 1500000"
    simulators: list[subprocess.Popen[bytes]] = []
    with output.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "juggler", *command.split(), "--run-dir", str(run_dir)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"takes simulators at (\S+);", output.read_text())):
            assert time.monotonic() < deadline, output.read_text()
            assert run.poll() is None, output.read_text()
            time.sleep(0.1)
        simulators += [
            subprocess.Popen([sys.executable, "-c", SIMULATOR, found[1], str(i)], env=environment)
            for i in range(16)
        ]
        assert run.wait(300) == 0, output.read_text()
        assert [each.wait(20) for each in simulators] == [0] * 16
    finally:
        for process in (run, *simulators):
            process.kill()
            process.wait()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["solved"], output.read_text()
    dropped = sum(summary["env_steps_dropped"].values())
    accounted = summary["env_steps_trained"] + dropped + summary["env_steps_in_flight"]
    assert summary["env_steps_sampled"] == accounted


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gateway": "5005"}, 'gateway must be "HOST:PORT"'),
        ({"gateway": "127.0.0.1:99999"}, 'gateway must be "HOST:PORT"'),
        ({"gateway_max_batch": 0}, "gateway_max_batch must be an integer of at least 1"),
        ({"gateway_max_wait_ms": -1.0}, "gateway_max_wait_ms must be from 0 to 1000"),
        ({"gateway": "127.0.0.1:0", "evaluation_seconds": 5.0}, "set evaluation_seconds = 0"),
    ],
)
def test_settings_that_no_gateway_could_have_are_refused(
    keys: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        RunConfig.from_flat(keys)
