"""A sampler over a data set: its batches hold whole episodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.episode_views import Episode, episodes_of
from support.random_episodes import CHOICES, VECTOR, random_episodes, write

from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.connector import ActionConnector
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.datasets.dataset import Dataset, RecordedEpisode
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module

pytest.importorskip("minari", reason="needs juggler[datasets]")

ROWS, STEPS = 3, 5
LENGTHS = [1, 4, 7, 12, 2, 5]


def sampler_of(
    place: Path,
    connectors: dict[str, Any] | None = None,
    module: Any = None,
    seed: int = 0,
    own: dict[str, Any] | None = None,
) -> Sampler:
    envs = RecordedEnvs(Dataset(str(place)), ROWS)
    both = envs.single_observation_space, envs.single_action_space
    env_to_module, module_to_env = build_runner_pipelines(
        ConnectorsConfig.parse(connectors or {}), *both, own
    )
    seen = env_to_module.module_observation_space, module_to_env.action_space
    built = module(*seen) if module else build_module(None, *seen, {"hidden_sizes": [4]})
    policy = Actor(built, envs.num_envs, STEPS, seed, module_to_env, env_to_module)
    return Sampler(envs, policy, STEPS, seed)


def test_recorded_environments_can_be_closed_with_gymnasiums_options(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes([2]))
    RecordedEnvs(Dataset(str(place)), ROWS).close(timeout=1.0, terminate=True)


def stretches(batches: list[EpisodeBatch]) -> dict[int, list[Episode]]:
    """The parts of each episode, by its id, in their order."""
    found: dict[int, list[Episode]] = {}
    for batch in batches:
        for part in episodes_of(batch):
            found.setdefault(part.episode_id, []).append(part)
    return {key: sorted(parts, key=lambda part: part.offset) for key, parts in found.items()}


def whole(parts: list[Episode]) -> bool:
    return parts[0].offset == 0 and (parts[-1].terminated or parts[-1].truncated)


def joined(parts: list[Episode], column: str) -> np.ndarray:
    return np.concatenate([getattr(part, column) for part in parts])


def matching(parts: list[Episode], episodes: list[RecordedEpisode]) -> int:
    """Which of the recorded episodes these are the parts of."""
    rewards = joined(parts, "rewards")
    (index,) = (i for i, each in enumerate(episodes) if np.array_equal(each.rewards, rewards))
    return index


def test_batches_hold_every_episode_once_in_each_pass(tmp_path: Path) -> None:
    written = random_episodes(LENGTHS)
    sampler = sampler_of(write(tmp_path / "mine", written))
    batches = [sampler.sample((0, 0)).batch for _ in range(20)]
    for batch in batches:
        EpisodeBatch.from_tree(batch.to_tree())
        assert batch.live.all()
        assert not batch.action_logp.any()
    times: Counter[int] = Counter()
    for parts in stretches(batches).values():
        if not whole(parts):
            continue
        index = matching(parts, written)
        times[index] += 1
        episode = written[index]
        observations = joined(parts, "observations")
        np.testing.assert_array_equal(observations, episode.observations[:-1])
        np.testing.assert_array_equal(joined(parts, "actions"), episode.actions)
        assert parts[-1].terminated == episode.terminated
        assert parts[-1].truncated == (not episode.terminated)
        if not episode.terminated:
            np.testing.assert_array_equal(parts[-1].last_observation, episode.observations[-1])
    assert times.keys() == set(range(len(LENGTHS)))
    # Three run at once, and may be of two passes.
    assert max(times.values()) - min(times.values()) <= 2
    assert min(times.values()) >= 8


def test_the_order_follows_the_seed(tmp_path: Path) -> None:
    place = write(tmp_path / "mine", random_episodes(LENGTHS))
    orders = []
    for seed in (1, 1, 2):
        sampler = sampler_of(place, seed=seed)
        orders.append(np.concatenate([sampler.sample((0, 0)).batch.rewards for _ in range(6)], 1))
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_actions_are_what_the_policy_would_have_chosen(tmp_path: Path) -> None:
    space = spaces.Tuple([spaces.Box(-2, 6, (2,), np.float64), CHOICES])
    written = random_episodes([4, 4, 4], action_space=space)
    place = write(tmp_path / "mine", written, action_space=space)
    sampler = sampler_of(place, {"module_to_env": ["rescale_actions"]})
    batch = sampler.sample((0, 0)).batch
    for parts in stretches([batch]).values():
        (part,) = parts
        (index,) = (i for i, each in enumerate(written) if each.rewards[0] == part.rewards[0])
        of_env, count = written[index].actions, len(part)
        numbers = np.asarray(part.actions["0"], np.float64) * 4 + 2
        np.testing.assert_allclose(numbers, of_env["0"][:count], rtol=1e-6, atol=1e-6)
        assert part.actions["0"].dtype == np.float32
        np.testing.assert_array_equal(part.actions["1"], of_env["1"][:count])


class Halved(ActionConnector):
    def __call__(self, actions: Any) -> Any:
        return actions / 2


def test_a_connector_that_cannot_be_undone_is_named(tmp_path: Path) -> None:
    space = spaces.Box(-1, 1, (1,), np.float32)
    place = write(tmp_path / "mine", random_episodes([2], action_space=space), action_space=space)
    envs = RecordedEnvs(Dataset(str(place)), ROWS)
    connectors = ConnectorsConfig.parse({"module_to_env": ["own:halved"]})
    _, module_to_env = build_runner_pipelines(connectors, VECTOR, space, {"own:halved": Halved})
    module = build_module(None, VECTOR, space, {"hidden_sizes": [4]})
    with pytest.raises(NotImplementedError, match="connector Halved has no"):
        Sampler(envs, Actor(module, ROWS, STEPS, 0, module_to_env), STEPS, 0)


def test_a_damaged_episode_ends_the_run_and_is_named(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    place = write(tmp_path / "mine", random_episodes([2, 2]))
    with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1"]["actions"]
    with pytest.raises(EnvironmentFailed, match=r"failed in reading: episode 1 of") as raised:
        sampler_of(place)
    assert raised.value.lasting


@pytest.mark.parametrize("column", ["actions", "rewards"])
def test_an_episode_with_actions_or_rewards_that_are_not_finite_is_named(
    column: str, tmp_path: Path
) -> None:
    acted = spaces.Box(-1, 1, (2,), np.float32)
    episodes = random_episodes([2, 2], VECTOR, acted)
    getattr(episodes[1], column)[0] = np.nan
    place = write(tmp_path / "mine", episodes, VECTOR, acted)
    with pytest.raises(EnvironmentFailed, match=rf"episode 1 of .* not finite, in its {column}"):
        sampler_of(place)


def test_another_environment_is_told_with_both_spaces(tmp_path: Path) -> None:
    dataset = Dataset(str(write(tmp_path / "mine", random_episodes([2]))))
    envs = gymnasium.make_vec("CartPole-v1", 1)
    with pytest.raises(ValueError, match=r"data set .* has observations in"):
        dataset.must_have_the_spaces_of("CartPole-v1", envs)
    envs.close()
