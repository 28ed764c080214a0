"""The example that serves Gymnasium over dm_env_rpc, in a run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.package_simulator import dial

from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.certificates import make_certificates

FILE = Path(__file__).parents[2] / "examples" / "simulators" / "serve_gym.py"
CARTPOLE = partial(gymnasium.make, "CartPole-v1")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("serve_gym", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_gym"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(example: Any) -> Iterator[Callable[..., str]]:
    """Serve environments, and return the address."""
    servers = []

    def serve(make: Any, tls: Path | None = None) -> str:
        token = "" if tls is None else (tls / "token").read_text().strip()
        server, address = example.serve(example.GymServer(make, token), "127.0.0.1:0", tls)
        servers.append(server)
        return str(address)

    yield serve
    for server in servers:
        server.stop(None).wait(60)


def test_the_same_seeds_and_actions_give_the_same_numbers(serve: Any) -> None:
    env = dial(serve(CARTPOLE), 2, seed_setting="seed")
    here = [gymnasium.make("CartPole-v1") for _ in range(2)]
    assert env.single_action_space == here[0].action_space
    assert env.single_observation_space == here[0].observation_space
    observations, _ = env.reset(seed=7)
    expected = [each.reset(seed=7 + i)[0] for i, each in enumerate(here)]
    ended = np.zeros(2, np.bool_)
    for step in range(60):
        np.testing.assert_array_equal(observations, expected)
        actions = np.array([step % 2, step % 3 == 0], int)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for i, each in enumerate(here):
            if ended[i]:
                expected[i], ended[i] = each.reset()[0], False
                continue
            expected[i], reward, ends, cut, _ = each.step(actions[i])
            ended[i] = ends or cut
            assert (rewards[i], terminated[i], truncated[i]) == (reward, ends, cut)
    env.close()


def test_a_client_needs_the_token_and_certificates(serve: Any, tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", (), 1.0)
    address = serve(CARTPOLE, tmp_path / "tls")
    env = dial(address, tls=str(tmp_path / "tls"))
    env.reset()
    env.close()
    with pytest.raises(EnvironmentFailed, match=f"{address}"):
        dial(address, connect_seconds=1.0)
    (tmp_path / "other").write_text("another")
    with pytest.raises(EnvironmentFailed, match="UNAUTHENTICATED"):
        dial(address, tls=str(tmp_path / "tls"), token_file=str(tmp_path / "other"))
