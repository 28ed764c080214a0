"""V-trace, GAE and n-step transitions against slow loops in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.batches import MakeBatch
from torch import Tensor

from juggler.learner.core.returns import (
    Estimates,
    gae,
    next_values,
    rows_of_transitions,
    transitions,
    vtrace,
)
from juggler.learner.core.sequences import all_observations
from juggler.learner.data.collate import collate
from juggler.runtime.connectors.row_times import linear_recurrence
from juggler.runtime.episodes.batch import EpisodeBatch

Case = dict[str, NDArray[Any]]
Array = NDArray[np.float64]


def random_case(seed: int, rows: int, steps: int, *, reset_rows: bool, ends: float) -> Case:
    """Rows with all kinds of ends; dead steps have values too."""
    rng = np.random.default_rng(seed)
    live = np.ones((rows, steps), bool)
    ended = rng.random((rows, steps)) < ends
    if reset_rows:
        for t in range(1, steps):
            live[:, t] = ~(ended[:, t - 1] & live[:, t - 1])
    truncated = ended & live & (rng.random((rows, steps)) < 0.5)
    return {
        "log_ratios": rng.normal(0, 1, (rows, steps)),
        "rewards": rng.normal(0, 1, (rows, steps)),
        "values": rng.normal(0, 3, (rows, steps)),
        "last_values": rng.normal(0, 3, rows),
        "final_values": rng.normal(0, 3, (rows, steps)),  # where truncated
        "terminated": ended & live & ~truncated,
        "truncated": truncated,
        "live": live,
    }


def after(case: Case, n: int, t: int, found: Array) -> tuple[float, float]:
    """(V(x_{t+1}), the result for step t + 1) along one episode."""
    if case["terminated"][n, t]:
        return 0.0, 0.0
    if case["truncated"][n, t]:
        return case["final_values"][n, t], case["final_values"][n, t]
    if t + 1 == case["live"].shape[1]:
        return case["last_values"][n], case["last_values"][n]
    return case["values"][n, t + 1], found[n, t + 1]


def slow_vtrace(
    case: Case, gamma: float, lambda_: float, rho_bar: float, rho_bar_pg: float, c_bar: float
) -> tuple[Array, Array]:
    """v_s and advantages by Espeholt et al. 2018, section 4.

    v_s = V(x_s) + δ_s + γ c_s (v_{s+1} - V(x_{s+1})), δ_s = ρ_s (r_s + γ V(x_{s+1}) - V(x_s))
    """
    targets, advantages = np.zeros_like(case["values"]), np.zeros_like(case["values"])
    for n, t in reversed(list(np.ndindex(*case["live"].shape))):
        if not case["live"][n, t]:
            continue
        reward, value = case["rewards"][n, t], case["values"][n, t]
        ratio = np.exp(case["log_ratios"][n, t])
        value_after, target_after = after(case, n, t, targets)
        delta = min(rho_bar, ratio) * (reward + gamma * value_after - value)
        trace = gamma * lambda_ * min(c_bar, ratio)
        targets[n, t] = value + delta + trace * (target_after - value_after)
        advantages[n, t] = min(rho_bar_pg, ratio) * (reward + gamma * target_after - value)
    return targets, advantages


def slow_gae(case: Case, gamma: float, lambda_: float) -> tuple[Array, Array]:
    """λ-returns by their recurrence, and A_t = G_t - V(x_t)."""
    returns = np.zeros_like(case["values"])
    for n, t in reversed(list(np.ndindex(*case["live"].shape))):
        if case["live"][n, t]:
            value_after, return_after = after(case, n, t, returns)
            mixed = (1 - lambda_) * value_after + lambda_ * return_after
            returns[n, t] = case["rewards"][n, t] + gamma * mixed
    return returns, np.where(case["live"], returns - case["values"], 0)


def arguments(case: Case) -> dict[str, Tensor]:
    """A case as the fast functions take it, in float32."""
    rows, steps = np.nonzero(case["truncated"])
    columns = {
        name: torch.as_tensor(array, dtype=torch.bool if array.dtype == bool else torch.float32)
        for name, array in case.items()
    }
    final_values = columns.pop("final_values")[rows, steps]
    columns["next_values"] = next_values(
        columns["values"],
        columns.pop("last_values"),
        final_values,
        torch.as_tensor(rows),
        torch.as_tensor(steps),
    )
    return columns


def assert_agree(fast: Estimates, slow: tuple[Array, Array], live: NDArray[np.bool_]) -> None:
    for found, expected in zip(fast, slow, strict=True):
        np.testing.assert_allclose(found, np.where(live, expected, 0), rtol=2e-4, atol=2e-4)


cases = st.builds(
    random_case,
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    steps=st.integers(1, 20),
    reset_rows=st.booleans(),
    ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@settings(max_examples=300)
@given(
    case=cases,
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lambda_=st.sampled_from([0.0, 0.95, 1.0]),
    bars=st.sampled_from([(1.0, 1.0, 1.0), (2.0, 1.5, 0.5), (1.0, 3.0, 1.0)]),
)
def test_vtrace_agrees_with_the_equations(
    case: Case, gamma: float, lambda_: float, bars: tuple[float, float, float]
) -> None:
    rho_bar, rho_bar_pg, c_bar = bars
    fast = vtrace(
        **arguments(case),
        gamma=gamma,
        lambda_=lambda_,
        rho_bar=rho_bar,
        rho_bar_pg=rho_bar_pg,
        c_bar=c_bar,
    )
    assert_agree(fast, slow_vtrace(case, gamma, lambda_, *bars), case["live"])


@settings(max_examples=200)
@given(
    case=cases, gamma=st.sampled_from([0.0, 0.99, 1.0]), lambda_=st.sampled_from([0.0, 0.95, 1.0])
)
def test_gae_agrees_with_the_lambda_return(case: Case, gamma: float, lambda_: float) -> None:
    columns = arguments(case)
    del columns["log_ratios"]
    fast = gae(**columns, gamma=gamma, lambda_=lambda_)
    assert_agree(fast, slow_gae(case, gamma, lambda_), case["live"])


def test_importance_weights_beyond_all_bounds_are_clipped() -> None:
    case = random_case(0, 1, 3, reset_rows=False, ends=0.0)
    case["log_ratios"] = np.zeros((1, 3))
    expected = vtrace(**arguments(case), gamma=0.99)
    case["log_ratios"] = np.array([[0.0, 200.0, 1000.0]])
    found = vtrace(**arguments(case), gamma=0.99)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 64, 100])
def test_a_linear_recurrence_is_solved_as_by_a_loop_also_under_vmap(length: int) -> None:
    rng = np.random.default_rng(length)
    a, b, x_last = rng.normal(size=(3, length)), rng.normal(size=(3, length)), rng.normal(size=3)
    x = x_last
    slow = np.zeros_like(a)
    for t in reversed(range(length)):
        x = b[:, t] + a[:, t] * x
        slow[:, t] = x
    case = torch.tensor(a), torch.tensor(b), torch.tensor(x_last)
    fast = linear_recurrence(*case)
    np.testing.assert_allclose(fast, slow, rtol=1e-9, atol=1e-9)
    (mapped,) = torch.func.vmap(linear_recurrence)(*(x.unsqueeze(0) for x in case))
    torch.testing.assert_close(mapped, fast)


# n-step transitions against those written out, step by step in float64.


class Slow(NamedTuple):
    reward: float
    discount: float
    after: np.ndarray  # the observation after the transition


def slow_transition(batch: EpisodeBatch, n: int, t: int, steps: int, gamma: float) -> Slow:
    reward, discount = 0.0, 1.0
    for at in range(t, t + steps):
        reward += discount * float(batch.rewards[n, at])
        discount *= gamma
        ends = bool(batch.terminated[n, at] or batch.truncated[n, at])
        last = at + 1 == batch.steps
        if ends or last or at + 1 == t + steps or not batch.live[n, at + 1]:
            break
    if batch.terminated[n, at]:
        return Slow(reward, 0.0, np.zeros(0))
    if batch.truncated[n, at]:
        (k,) = np.flatnonzero((batch.final_rows == n) & (batch.final_steps == at))
        return Slow(reward, discount, batch.final_observations[k])
    return Slow(
        reward, discount, batch.last_observations[n] if last else batch.observations[n, at + 1]
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20])
def test_transitions_end_with_their_episode_and_their_row(
    make_batch: MakeBatch, steps: int
) -> None:
    ends = {"terminated": 0, "truncated": 0}
    for seed in range(5):
        batch = make_batch(4, 9, seed=seed)
        columns = collate([batch])
        found = transitions(columns, steps, 0.9)
        seen = all_observations(columns)
        rows = rows_of_transitions(columns, steps, 0.9)
        ends["terminated"] += int(batch.terminated.sum())
        ends["truncated"] += int(batch.truncated.sum())
        live = list(zip(*np.nonzero(batch.live), strict=True))
        assert len(rows["rewards"]) == len(live) > 0
        for place, (n, t) in enumerate(live):
            slow = slow_transition(batch, n, t, steps, 0.9)
            assert float(found.rewards[n, t]) == pytest.approx(slow.reward, rel=1e-5, abs=1e-6)
            assert float(found.discounts[n, t]) == pytest.approx(slow.discount, rel=1e-6)
            assert float(rows["rewards"][place, 0]) == float(found.rewards[n, t])
            assert float(rows["discounts"][place, 0]) == float(found.discounts[n, t])
            np.testing.assert_array_equal(rows["observations"][place, 0], batch.observations[n, t])
            np.testing.assert_array_equal(rows["actions"][place, 0], batch.actions[n, t])
            if slow.discount:
                np.testing.assert_array_equal(seen[found.after[n, t]], slow.after)
                np.testing.assert_array_equal(rows["last_observations"][place], slow.after)
    assert all(ends.values()), "both ends are in the batches"


def test_rewards_of_the_next_episode_are_in_no_transition(make_batch: MakeBatch) -> None:
    batch = make_batch(4, 9, seed=0)
    columns = collate([batch])
    dead = ~columns["live"]
    columns["rewards"] = torch.where(dead, torch.nan, columns["rewards"])
    assert rows_of_transitions(columns, 5, 0.9)["rewards"].isfinite().all()
