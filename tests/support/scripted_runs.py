"""`juggler train` as a script that trains nothing, and is over at once: what surrounds many runs
can be tried without a learner.

A run has ten lines of metrics. Its return grows by `lr` with each, up to 10 * lr. Keys that it has
no other use for say what befalls it:

- `gamma = 0.5`: it is killed after half of them;
- `gamma = 0.25`: it says why it fails, and does;
- `gamma = 0.75`: it has two agents, of which one gets what the other loses;
- `value_coefficient` above 0: it waits after half of them until it is told to stop, or its file
  `heard` is there, for which the test sees;
- `reward_scale = 2.0`: it waits after half of them, until it is told to stop, and goes on with the
  others when it is resumed.
"""

from __future__ import annotations

from typing import Any

import pytest

from juggler.experiments import run_process

PROGRAM = """
import json, os, pathlib, signal, sys, time, tomllib

stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
_, train, first, second, *_ = sys.argv[1:]
resumed = first == "--resume"
directory = pathlib.Path(second if resumed else sys.argv[5])
config = tomllib.loads(pathlib.Path(directory / "config.toml" if resumed else first).read_text())
(directory / "checkpoints").mkdir(parents=True, exist_ok=True)
if not resumed:
    (directory / "config.toml").write_bytes(pathlib.Path(first).read_bytes())
file = (directory / "metrics.jsonl").open("a+")
file.seek(0)
begun = len(file.readlines())
if config.get("gamma") == 0.25:
    print("juggler train: the mast is broken", flush=True)
    sys.exit(1)
line = {}
for i in range(begun + 1, 11):
    line = {"env_steps_sampled": 100 * i, "env_steps_trained": 100 * i, "wall_time": i / 10,
            "training_time": i / 10, "episode_return_mean": config["lr"] * i}
    if config.get("gamma") == 0.75:
        sides = {"a": config["lr"] * i, "b": -config["lr"] * i}
        by_agent = {name: {"episode_return_mean": of_it} for name, of_it in sides.items()}
        line.update(by_agent=by_agent, episode_return_mean=sum(sides.values()) + 1e-12)
    print(json.dumps(line), file=file, flush=True)
    if i == 5 and config.get("gamma") == 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    while i == 5 and config.get("reward_scale") == 2.0 and not stopped:
        time.sleep(0.01)
    while i == 5 and config.get("value_coefficient", 0.0) and not stopped:
        if (directory / "heard").exists():
            break
        time.sleep(0.01)
    if stopped:
        break
checkpoint = directory / "checkpoints" / f"{i:09}"
checkpoint.mkdir(exist_ok=True)
summary = {**line, "solved": False, "reason_for_stop": "interrupted" if stopped else "stop_steps"}
(directory / "summary.json").write_text(json.dumps(summary))
sys.exit(130 if stopped else 0)
"""


@pytest.fixture
def scripted_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs are scripted."""
    monkeypatch.setattr(run_process, "_PROGRAM", PROGRAM)
