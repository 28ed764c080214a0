"""What a learner works out from rows of several agents is what whole episodes would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.paced_sampling import Collected, Remembering, sampler_of
from support.scripted_agents import (
    TWO_MODULES,
    LoggedEpisode,
    random_world,
)

from juggler.learner.core.returns import gae, next_values, vtrace

SEEDS = range(4)
GAMMA, LAMBDA = 0.9, 0.8


def value(observation: np.ndarray) -> float:
    return float(np.sin(observation.astype(np.float64) @ np.arange(1, len(observation) + 1)))


@pytest.mark.parametrize("row_age", [0, 2, 1000])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_targets_are_those_of_whole_stretches_of_episodes(seed: int, row_age: int) -> None:
    envs = random_world(seed)
    collected = Collected(sampler_of(envs, TWO_MODULES, steps=6, row_age=row_age))
    for update in range(30):
        collected.play("reds", "blues", update=update)
    checked = 0
    for batch in [each for batches in collected.batches.values() for each in batches]:
        values = np.apply_along_axis(value, -1, np.asarray(batch.observations))  # [N, T]
        lasts = np.apply_along_axis(value, -1, np.asarray(batch.last_observations))  # [N]
        finals = np.array([value(each) for each in np.asarray(batch.final_observations)])  # [K]
        tensors = [torch.tensor(each) for each in (values, lasts, finals)]
        after = next_values(
            *tensors,
            torch.tensor(batch.final_rows, dtype=torch.int64),
            torch.tensor(batch.final_steps, dtype=torch.int64),
        )
        columns: dict[str, Any] = {
            "rewards": torch.tensor(batch.rewards, dtype=torch.float64),
            "values": tensors[0],
            "next_values": after,
            "terminated": torch.tensor(batch.terminated),
            "truncated": torch.tensor(batch.truncated),
            "live": torch.tensor(batch.live),
            "gamma": GAMMA,
            "lambda_": LAMBDA,
        }
        found = {
            "gae": gae(**columns),
            "vtrace": vtrace(log_ratios=torch.sin(3 * tensors[0]), **columns),
        }
        for row in batch.episodes():
            observations = np.asarray(row.observations)
            slot, number, first = observations[0][:3].astype(int).tolist()
            n = np.flatnonzero(
                (np.asarray(batch.observations)[..., :3] == observations[0][:3]).all(-1)
                & batch.live
            )[0]
            at = np.unravel_index(n, batch.live.shape)
            stretch = slice(int(at[1]), int(at[1]) + len(row))
            logged = envs.log[slot][number]
            for name, got in found.items():
                expected = slowly(logged, first, len(row), name)
                targets = got.targets[int(at[0]), stretch].numpy()
                np.testing.assert_allclose(targets, expected, rtol=0, atol=1e-6)
            checked += len(row)
    assert checked > 100


def slowly(logged: LoggedEpisode, first: int, length: int, name: str) -> list[float]:
    """Targets of some steps of an episode, by the definition, backwards."""
    rewards, targets = logged.rewards(), []
    values = [value(observation) for observation in logged.observations]
    correction = 0.0
    for step in reversed(range(first, first + length)):
        over = logged.end != "" and step == len(logged.actions) - 1
        discount = 0.0 if over and logged.end != "truncated" else GAMMA
        error = rewards[step] - values[step] + (discount and discount * values[step + 1])
        ratio = min(1.0, np.exp(np.sin(3 * values[step]))) if name == "vtrace" else 1.0
        correction = ratio * error + LAMBDA * discount * ratio * correction
        targets.append(values[step] + correction)
    return targets[::-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_states_at_the_starts_of_rows_are_those_of_a_run_that_was_not_cut(seed: int) -> None:
    envs = random_world(seed)
    sampler = sampler_of(envs, TWO_MODULES, steps=4, row_age=3, module=Remembering)
    collected = Collected(sampler)
    for update in range(30):
        collected.play("reds", "blues", update=update)
    rows = 0
    for batch in [each for batches in collected.batches.values() for each in batches]:
        states: Any = batch.states["module"]
        for row in range(batch.rows):
            slot, number, step = np.asarray(batch.observations)[row, 0, :3].astype(int).tolist()
            total = torch.full((3,), 0.5)
            for seen in envs.log[slot][number].observations[:step]:
                total = 0.5 * total + torch.from_numpy(seen[:3])
            np.testing.assert_allclose(states["sum"][row], total.numpy(), rtol=1e-6)
            rows += step > 0
    assert rows > 20


def test_contexts_at_the_starts_of_rows_are_those_of_the_agent() -> None:
    envs = random_world(3)
    connectors = {"env_to_module": [{"use": "frame_stack", "k": 2}]}
    collected = Collected(sampler_of(envs, TWO_MODULES, steps=4, row_age=3, connectors=connectors))
    for update in range(20):
        collected.play("reds", "blues", update=update)
    rows = 0
    for batch in [each for batches in collected.batches.values() for each in batches]:
        (frames,) = [np.asarray(each) for each in leaves(batch.states["connectors"])]  # [N, 1, ...]
        for row in range(batch.rows):
            seen = np.asarray(batch.observations)[row, 0]
            slot, number, step = seen[:3].astype(int).tolist()
            before = envs.log[slot][number].observations[max(0, step - 1)]
            np.testing.assert_array_equal(frames[row].reshape(-1, len(seen))[-1], before)
            rows += step > 0
    assert rows > 20


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    return [tree]
