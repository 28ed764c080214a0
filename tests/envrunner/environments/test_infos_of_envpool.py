"""Numbers of EnvPool's infos, with a stand-in; and with EnvPool, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.paced_sampling import Scaled, sampler_of
from support.pools import STONES, TOGETHER_STEPS, Pools

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.info_numbers import InfoNumber, InfoNumbers
from juggler.envrunner.multi_agent.making import make_multi_agent_envs
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.building import build_module
from juggler.runtime.wire.structures import tree_leaves

INSTALLED = importlib.util.find_spec("envpool") is not None


class Alike(Scaled):
    """Gives all actions the same inputs."""

    def _forward(self, batch: Any) -> Any:
        _, seen = next(tree_leaves(batch["observations"]))
        return {
            "action_dist_inputs": torch.zeros(len(seen), self.action_distribution().inputs_size)
        }


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    made = Pools()
    monkeypatch.setitem(sys.modules, "envpool", made)
    return made


def of_one_agent(name: str, num_envs: int, steps: int) -> tuple[InfoNumbers, list[int]]:
    """Numbers and lengths of the episodes of a fragment."""
    env = make_vector_env(EnvRunnerConfig(env=f"envpool:{name}", envs_per_runner=num_envs))
    module = build_module(None, env.single_observation_space, env.single_action_space, {})
    sampler = Sampler(env, Actor(module, num_envs, steps, 0), steps, seed=0)
    sampled = sampler.sample((1, 0))
    env.close()
    return sampled.infos, sampled.episode_lengths


def of_rounds(name: str, num_envs: int, steps: int, **kwargs: Any) -> tuple[InfoNumbers, list[int]]:
    """Numbers and lengths of the episodes of a round."""
    config = EnvRunnerConfig(env=f"envpool:{name}", envs_per_runner=num_envs, env_kwargs=kwargs)
    envs = make_multi_agent_envs(config)
    sampler = sampler_of(envs, dict.fromkeys(envs.agents, "m"), steps, module=Alike)
    played = sampler.sample(["m"], {"m": Version(1, 1)})
    envs.close()
    return played.infos, played.env_lengths


def walked(lengths: list[int]) -> list[InfoNumber]:
    return [InfoNumber((1 + length) / 2, 1.0, float(length)) for length in lengths]


def test_numbers_of_environments_that_are_stepped_together_are_told(pools: Pools) -> None:
    infos, lengths = of_one_agent("Strides-v1", 6, 40)
    assert infos.keys() == {"walked", "even"}
    assert infos["walked"] == walked(lengths)
    assert {*lengths} == {3, 4, 5}


def test_numbers_of_environments_at_their_own_pace_are_told(pools: Pools) -> None:
    infos, lengths = of_rounds("Walks-v1", 6, 120, batch_size=2)
    assert infos.keys() == {"agent/walked", "agent/even"}
    assert infos["agent/walked"] == walked(lengths)
    assert {*infos["agent/even"]} == {InfoNumber(0.0, 0.0, 0.0), InfoNumber(1.0, 1.0, 1.0)}
    assert {*lengths} == {3, 4, 5}


def test_numbers_of_players_and_of_their_games_are_told(pools: Pools) -> None:
    infos, lengths = of_rounds("Together-v1", 3, 2 * TOGETHER_STEPS + 1)
    assert lengths == [TOGETHER_STEPS] * 6
    numbers = ("stones", "place")
    assert infos.keys() == {f"player_{i}/{number}" for i in range(2) for number in numbers}
    last = float(STONES - TOGETHER_STEPS)
    for i in range(2):
        assert infos[f"player_{i}/stones"] == [InfoNumber(last + 1, last, last + 2)] * 6
        places = [float(10 * env + i) for env in range(3)] * 2
        assert infos[f"player_{i}/place"] == [InfoNumber(place, place, place) for place in places]


@pytest.mark.skipif(not INSTALLED, reason="needs juggler[envpool]")
def test_numbers_of_envpool_itself_are_told() -> None:
    infos, _ = of_one_agent("Hopper-v4", 4, 100)
    assert {"x_position", "x_velocity"} <= infos.keys()
    assert not infos.keys() & {"env_id", "elapsed_step"}
    assert all(each.least <= each.mean <= each.most for each in infos["x_velocity"])
    assert {each.least < each.most for each in infos["x_velocity"]} == {True}
    together, _ = of_rounds("Hopper-v4", 4, 200, batch_size=2)
    assert together.keys() == {f"agent/{name}" for name in infos}


@pytest.mark.skipif(not INSTALLED, reason="needs juggler[envpool]")
def test_numbers_of_a_game_of_envpool_are_told() -> None:
    infos, lengths = of_rounds("Go9x9-v1", 2, 400)
    assert infos.keys() >= {f"player_{i}/black_area" for i in range(2)}
    assert not {name for name in infos if name.endswith(("current_player", "/id", "env_id"))}
    assert len(infos["player_0/black_area"]) == len(lengths) > 0
    assert np.isfinite([each.mean for each in infos["player_0/black_area"]]).all()
