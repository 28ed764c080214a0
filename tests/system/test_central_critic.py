"""Runs whose value functions see the game's state, or all observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import juggler
from juggler.driver.config import ConfigError
from juggler.runtime.checkpoints.checkpoint import read

pytestmark = pytest.mark.usefixtures("local_workers")

RUN: dict[str, Any] = {
    "env": "support.small_games:HiddenBits",
    "algorithm": "ppo",
    "batch_size": 192,
    "minibatches": 1,
    "envs_per_runner": 4,
    "fragment_steps": 8,
    "num_env_runners": 1,
    "progress": "off",
    "synchronous": True,
    "checkpoint_updates": 2,
    "stop_steps": 800,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> juggler.Result:
    run_dir = tmp_path_factory.mktemp("runs") / "bits"
    return juggler.train(**RUN, critic_sees="state", run_dir=str(run_dir))


def critics_inputs(state: Any) -> int:
    """The numbers that the value function of a saved module takes."""
    first = min(
        name for name in state["parameters"] if "value_encoder" in name and name.endswith("weight")
    )
    return int(state["parameters"][first].shape[1])


@pytest.mark.slow
def test_its_policy_acts_with_what_its_agent_sees(trained: juggler.Result, tmp_path: Path) -> None:
    policy = juggler.load_policy(trained.run_dir)
    action, _ = policy.act(np.ones(1, np.float32))
    assert policy.action_space.contains(action)
    played = juggler.evaluate(trained.run_dir, 4)
    assert played.lengths == [3] * 4
    assert critics_inputs(read(trained.run_dir).tree["default"]) == 3, "its own bit, and both"


def test_modules_of_a_run_have_critics_of_their_own(tmp_path: Path) -> None:
    result = juggler.train(
        **{**RUN, "batch_size": 96},
        agents={"left": "one", "right": "other"},
        modules={"other": {"critic_sees": "all_observations", "algorithm": "impala"}},
        run_dir=str(tmp_path / "run"),
    )
    tree = read(result.run_dir).tree
    assert critics_inputs(tree["one"]) == 1
    assert critics_inputs(tree["other"]) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"env": "CartPole-v1"}, "has one agent, whose value function sees its observation"),
        ({"env": "support.small_games:Tag"}, r"the environment Tag has no state\(\)"),
        ({"algorithm": "pqn"}, "the values of QNetwork come only from observations"),
        ({"gateway": "127.0.0.1:0"}, "simulators send what an agent observes"),
        ({"critic_sees": "stat"}, "'stat' is not known: did you mean 'state'"),
    ],
)
def test_where_there_is_no_more_to_see_is_told_before_the_run_begins(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run = {**RUN, "critic_sees": "state", "run_dir": str(tmp_path / "run"), **keys}
    if keys.get("algorithm") == "pqn":
        del run["minibatches"]
    with pytest.raises(ConfigError, match=said):
        juggler.train(**run)
    assert not (tmp_path / "run").exists()
