"""Whole runs with several agents and several modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import juggler
from juggler.runtime.checkpoints.checkpoint import read

# A run with several agents and two algorithms: training, resuming, evaluating, acting.


RUN: dict[str, Any] = {
    "env": "support.small_games:Tag",
    "modules": {"runner": {"algorithm": "ppo", "batch_size": 64, "minibatches": 1}},
    "num_env_runners": 1,
    "progress": "off",
}


@pytest.fixture(scope="module")
def trained(workers_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> juggler.Result:
    run_dir = tmp_path_factory.mktemp("runs") / "tag"
    return juggler.train(**RUN, stop_steps=2000, run_dir=str(run_dir))


@pytest.mark.slow
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
def test_whole_episodes_of_all_agents_are_evaluated(trained: juggler.Result) -> None:
    played = juggler.evaluate(trained.run_dir, 3)
    assert played.returns == [15.0] * 3, "the sum over three agents, each of which gets 1 a step"
    assert played.lengths == [5] * 3
