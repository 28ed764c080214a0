"""Gymnasium's environments, wrappers and vectors by what the examples say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gymnasium.vector import AutoresetMode

from juggler.driver.config_files import load_config_and_keys
from juggler.envrunner.environments.vector import make_vector_env, reset_environments

EXAMPLES = Path(__file__).parents[2] / "examples" / "gymnasium"
NEEDS = {"atari": "ale_py", "mujoco": "mujoco", "envpool": "envpool"}
#: By example: of one environment's observations, and when a vector of them begins a new episode.
EXPECTED = {
    "wrappers": ((5,), AutoresetMode.SAME_STEP),
    "processes": ((6,), AutoresetMode.SAME_STEP),
    "atari": ((4, 84, 84), AutoresetMode.NEXT_STEP),
    "mujoco": ((4,), AutoresetMode.SAME_STEP),
    "envpool": ((6,), AutoresetMode.NEXT_STEP),
}


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == set(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_its_environments_are_made_and_stepped(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"needs juggler[{name}]")
    config = load_config_and_keys(EXAMPLES / f"{name}.toml")[0].env_runner
    env = make_vector_env(config)
    try:
        shape, mode = EXPECTED[name]
        assert env.single_observation_space.shape == shape
        assert env.metadata["autoreset_mode"] == mode
        first = reset_environments(env, 3).copy()
        assert first.shape == (config.envs_per_runner, *shape)
        env.action_space.seed(0)
        for _ in range(20):
            env.step(env.action_space.sample())
        assert (reset_environments(env, 3) == first).all(), "the seed decides"
    finally:
        env.close()
