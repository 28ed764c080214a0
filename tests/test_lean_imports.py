"""What works without torch, and what is imported late."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import worlds

#: By what is tried: a program, and the packages that it must not import.
PROGRAMS = {
    "the package": ("import juggler", "torch numpy gymnasium grpc"),
    "connectors and training": (
        "import juggler; juggler.ObservationConnector, juggler.LearnerConnector, juggler.train",
        "torch",
    ),
    "the client": ("import juggler.client", "torch gymnasium ml_dtypes cloudpickle"),
    "configs": (
        "from juggler.learner.algorithms.registry import find_algorithm\n"
        "find_algorithm('impala').config()",
        "torch",
    ),
    "connectors": (
        "import juggler.runtime.connectors.config as c\n"
        "import juggler.runtime.connectors.mergeable_state\n"
        "c.ConnectorsConfig(env_to_module=['frame_stack'], learner=['clip_rewards']).validate()",
        "torch",
    ),
    "several agents": (
        "from juggler.envrunner.config import EnvRunnerConfig\n"
        "from juggler.envrunner.multi_agent.make_envs import has_several_agents\n"
        "from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs\n"
        "for env in ('juggler:CartPoles', 'juggler:MatrixGame'):\n"
        "    config = EnvRunnerConfig(env=env)\n"
        "    assert has_several_agents(config)\n"
        "    make_multi_agent_envs(config, critics_see=['all_observations']).reset(0)",
        "torch",
    ),
    "checkpoints": ("import juggler.runtime.checkpoints.checkpoint", "torch"),
    "progress": (
        "from juggler.driver.reporting.progress import make_progress\n"
        "make_progress('plain').start({})",
        "rich torch numpy",
    ),
    "a run directory": (
        "from contextlib import closing\n"
        "from pathlib import Path\n"
        "from juggler.driver.reporting.run_directory import RunDirectory\n"
        "assert not any(name.startswith('tensorboard') for name in sys.modules), 'too early'\n"
        "with closing(RunDirectory.create(Path('run'), {}, 'run')) as run:\n"
        "    run.append({'env_steps_sampled': 1, 'env_steps_trained': 1})",
        "torch tensorflow",
    ),
    "pictures": (
        "from pathlib import Path\n"
        "from juggler.cli.plot import save\n"
        "from juggler.cli.plot import tick\n"
        "assert 'matplotlib' not in sys.modules\n"
        "save([Path('drawn')])",
        "torch matplotlib.pyplot",
    ),
    "a policy": (
        "import numpy as np, juggler\n"
        "policy = juggler.load_policy('checkpoint')\n"
        "action, state = policy.act(np.zeros(4, np.float32))\n"
        "policy.act(np.zeros(4, np.float32), state, explore=True, reward=1.0)",
        "grpc juggler.driver juggler.learner",
    ),
}


@pytest.mark.slow
def test_what_is_not_needed_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").touch()  # is found, and is not to be imported
    before = {"env_to_module": ["previous_actions_and_rewards"]}
    model = {"recurrent": "gru"}
    path = worlds.written(tmp_path / "made", worlds.motors, model=model, connectors=before)
    (tmp_path / "checkpoint").symlink_to(path)
    (tmp_path / "drawn").mkdir()
    keys = ["env_steps_sampled", "wall_time", "steps_per_second", "staleness_mean", "staleness_max"]
    line = {**dict.fromkeys(keys, 1), "episode_return_mean": 1.0, "evaluation_return_mean": None}
    (tmp_path / "drawn" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    started = {}
    for name, (program, absent) in PROGRAMS.items():
        check = f"found = {set(absent.split())} & sys.modules.keys()\nassert not found, found"
        code = f"import sys\n{program}\n{check}"
        started[name] = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True
        )
    said = {name: each.communicate()[1] for name, each in started.items()}
    assert {name: text for name, text in said.items() if text} == {}
