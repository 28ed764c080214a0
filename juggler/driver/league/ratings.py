"""Ratings from the win rates of all pairs: Elo, and Nash averaging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.driver.league.results import Payoffs

_Array = NDArray[np.float64]
_POINTS = 400 / np.log(10)  # of Elo for each unit of log odds
_ROUNDS = 200
_EXACT = 1e-9  # tolerance of an equilibrium, in payoff


def elo(payoffs: Payoffs, players: Sequence[str]) -> dict[str, float]:
    """Elo ratings with mean 0; 400 points mean odds of 10:1.

    They are the maximum-likelihood ratings, given the decayed payoffs and one draw of each player
    against a player with rating 0. So they do not depend on the order of games, and are always
    finite. They mean little in games that are not transitive, such as rock-paper-scissors, and a
    copy of a player can move the ratings of others.

    R. A. Bradley and M. E. Terry, Rank analysis of incomplete block designs, 1952.
    """
    count = len(players)
    wins = np.zeros((count, count))  # [P, P]
    place = {player: index for index, player in enumerate(players)}
    for pair in payoffs.pairs.values():
        if pair.first in place and pair.second in place:
            row, column = place[pair.first], place[pair.second]
            wins[row, column] = pair.wins + pair.draws / 2
            wins[column, row] = pair.losses + pair.draws / 2
    # The draw keeps the ratings of undefeated players finite.
    games = wins + wins.T  # [P, P]
    points = wins.sum(1) + 0.5  # [P], with the draw

    def slopes(strengths: _Array) -> tuple[_Array, _Array]:
        """Return gradient [P] and negative Hessian [P, P] of the log-likelihood."""
        odds = strengths[:, None] - strengths[None, :]  # [P, P]
        expected = 1 / (1 + np.exp(-odds))  # [P, P]
        alone = 1 / (1 + np.exp(-strengths))  # [P], against rating 0
        curved = games * expected * expected.T  # [P, P]
        gradient = points - (games * expected).sum(1) - alone  # [P]
        return gradient, np.diag(curved.sum(1) + alone * (1 - alone)) - curved

    # Newton's method: the log-likelihood is concave. Long steps are cut.
    strengths = np.zeros(count)  # [P], log odds
    for _ in range(_ROUNDS):
        gradient, hessian = slopes(strengths)
        step = np.linalg.solve(hessian, gradient)  # [P]
        strengths += step / max(1.0, float(np.abs(step).max(initial=0)))
        if np.abs(step).max(initial=0) < 1e-10:
            break
    strengths -= strengths.mean() if count else 0.0
    return dict(zip(players, (strengths * _POINTS).tolist(), strict=True))


def nash_averaging(payoffs: Payoffs, players: Sequence[str]) -> dict[str, float]:
    """Return each player's weight in the Nash equilibrium over players.

    A game is 2 · win rate - 1 to the player. Of several equilibria, it is the one with the highest
    entropy. Copies of a player share its weight, if the equilibrium without them is unique.

    D. Balduzzi et al., Re-evaluating evaluation, 2018.
    """
    table = [[payoffs.win_rate(player, other) for other in players] for player in players]
    matrix = 2 * np.array(table).reshape(len(players), len(players)) - 1  # [P, P]
    return dict(zip(players, nash_equilibrium(matrix).tolist(), strict=True))


def nash_equilibrium(matrix: _Array) -> _Array:
    """Return the maximum-entropy equilibrium of a symmetric zero-sum game.

    Args:
        matrix: [P, P], payoffs of the row player; antisymmetric.

    Returns:
        [P], probabilities p with (matrix @ p) ≤ 1e-8 everywhere.
    """
    count = len(matrix)
    if count == 0:
        return np.zeros(0)
    weights, slack = _central_path(matrix)
    support = weights > slack  # [P]; strictly complementary: one of the two is 0
    inner, outer = matrix[support][:, support], matrix[~support][:, support]  # [S, S], [P - S, S]
    equations = np.vstack([inner, np.ones(len(inner))])  # [S + 1, S]
    target = np.append(np.zeros(len(inner)), 1.0)  # [S + 1]
    inside = weights[support]  # [S]
    inside = inside + np.linalg.lstsq(equations, target - equations @ inside, rcond=1e-9)[0]
    # A direction that changes no payoff leads to other equilibria.
    _, scales, basis = np.linalg.svd(equations)
    free = basis[(scales > 1e-9 * scales[0]).sum() :].T  # [S, F]: directions to other equilibria
    found = [weights]
    for each in (inside, _highest_entropy(inside, free, outer)):
        of_all = np.zeros(count)
        of_all[support] = np.maximum(each, 0.0)
        found.append(of_all)
    # If weights of 0 are hard to identify, further steps may have led away from equilibria.
    least = min(_missed(matrix, each) for each in found)
    return next(x for x in reversed(found) if _missed(matrix, x) <= max(least, _EXACT))


def _missed(matrix: _Array, weights: _Array) -> float:
    """Return how far weights [P] are from an equilibrium."""
    return max(float(np.max(matrix @ weights)), abs(float(weights.sum()) - 1))


def _central_path(matrix: _Array) -> tuple[_Array, _Array]:
    """Return an equilibrium with the largest support, and its slack.

    An interior-point method: it follows the points at which weight · (value - matrix @ weights) is
    value / P for all strategies, until value is 0. The game is its own dual, so one vector is the
    strategy of both players. The slack is for pure strategies.
    """
    count = len(matrix)
    weights = np.full(count, 1 / count)  # [P]
    slack = np.full(count, 1.0)  # [P], value - matrix @ weights once it has converged
    for _ in range(_ROUNDS):
        gap = 0.2 * float(weights @ slack) / count  # target of each product
        missed = count * gap - slack - matrix @ weights  # [P]
        wanted = gap - weights * (slack + missed)  # [P]
        step = _solved(np.diag(slack) - weights[:, None] * matrix, wanted)  # [P]
        change = missed - matrix @ step  # [P], of the slack
        longest = max(np.max(-step / weights), np.max(-change / slack), 1e-9)
        size = min(1.0, 0.9 / longest)
        weights, slack = weights + size * step, slack + size * change
        if gap < 1e-13 / count and np.abs(missed).max() < 1e-12:
            break
    return weights / weights.sum(), slack


def _highest_entropy(inside: _Array, free: _Array, outer: _Array) -> _Array:
    """Return the maximum-entropy equilibrium with this support.

    Args:
        inside: [S], one equilibrium. If it is at the edge, it is returned.
        free: [S, F], directions to other equilibria.
        outer: [P - S, S], payoffs of strategies outside the support against strategies inside.
            They stay at most 0.
    """

    def bounds(point: _Array) -> _Array:
        """Return the values [P] that must stay above 0."""
        return np.concatenate([point, -(outer @ point)])

    def cost(point: _Array, barrier: float) -> float:
        left = bounds(point)  # [P]
        if (left <= 0).any():
            return float("inf")
        return float(point @ np.log(point) - barrier * np.log(left).sum())

    # At the edge, logarithms are infinite.
    if not free.size or (bounds(inside) <= 0).any():
        return inside
    slopes = np.vstack([free, -(outer @ free)])  # [P, F], of the bounds
    for barrier in 10.0 ** -np.arange(2, 12):
        for _ in range(50):
            pulled = slopes / bounds(inside)[:, None]  # [P, F]
            gradient = free.T @ (np.log(inside) + 1) - barrier * pulled.sum(0)  # [F]
            hessian = free.T @ (free / inside[:, None]) + barrier * pulled.T @ pulled  # [F, F]
            if not np.isfinite(hessian).all():  # at the edge
                break
            # A Newton step, halved until it gains.
            step = -_solved(hessian, gradient)  # [F]
            if -(gradient @ step) < 1e-15:  # possible gain of a step
                break
            size, before = 1.0, cost(inside, barrier)
            while cost(inside + size * free @ step, barrier) > before and size > 1e-9:
                size /= 2
            if size <= 1e-9:  # limit of 64-bit floats
                break
            inside = inside + size * free @ step
    return inside


def _solved(matrix: _Array, target: _Array) -> NDArray[np.floating[Any]]:
    """Solve a linear system [N, N], by least squares if singular."""
    try:
        return np.linalg.solve(matrix, target)
    except np.linalg.LinAlgError:  # singular in 64-bit floats
        return np.linalg.lstsq(matrix, target, rcond=None)[0]
