"""Matches of two policies: outcomes, win rates, exploitability."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.evaluation import actions_of, whole_episodes
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.openspiel import SCHEME, find_game
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.policies.policy import Policy
from juggler.policies.wilson import outcome, wilson


@dataclass(frozen=True, slots=True)
class PlayedMatch:
    """One episode.

    Attributes:
        returns: undiscounted returns of the agents that acted in it.
        steps: numbers of actions, by agent.
    """

    returns: dict[str, float]
    steps: dict[str, int]


def play_matches(
    envs: MultiAgentEnvs,
    players: Sequence[ModuleSlots],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] = lambda *_: None,
    *,
    explore: bool = True,
) -> list[PlayedMatch]:
    """Play the first episodes that begin, without bias to short ones.

    Args:
        envs: the environments, used only here.
        players: play all agents.
        episodes: number of episodes to play.
        seed: of the environments.
        watch: called after each step of all environments, with the number of ended episodes and of
            steps so far.
        explore: draw actions as in training, instead of taking the most likely ones. Without it,
            all matches of a deterministic game are the same.

    Returns:
        The episodes, in the order in which they began.

    Raises:
        EnvironmentFailed: an environment failed.
    """
    act = partial(actions_of, envs, players, explore=explore)
    played = whole_episodes(envs, act, episodes, seed, watch, first_that_begin=True)
    matches = []
    for each in sorted((each for ended in played for each in ended), key=attrgetter("number")):
        acted = {agent: place for place, agent in enumerate(envs.agents) if each.steps[place]}
        returns = {agent: float(each.returns[place]) for agent, place in acted.items()}
        steps = {agent: int(each.steps[place]) for agent, place in acted.items()}
        matches.append(PlayedMatch(returns, steps))
    return matches


@dataclass(frozen=True, slots=True)
class MatchRecord:
    """Results of an agent in many matches.

    Attributes:
        mean: of its returns.
        error: the standard error of that mean; NaN for one match.
        wins: matches in which its side lost to no other side, and won against at least one.
        draws: matches in which its side drew with every other side.
        losses: all other matches.
    """

    mean: float
    error: float
    wins: int
    draws: int
    losses: int

    @property
    def score(self) -> float:
        """The share of wins; a draw counts as half a win."""
        return (self.wins + self.draws / 2) / (self.wins + self.draws + self.losses)

    def interval(self) -> tuple[float, float]:
        """The score's 95 % interval (Wilson 1927)."""
        count = self.wins + self.draws + self.losses
        return wilson(self.wins + self.draws / 2, count)


def records(
    matches: Sequence[PlayedMatch], teams: Sequence[Sequence[str]] = (), margin: float = 0.0
) -> dict[str, MatchRecord]:
    """Compute returns, wins, draws and losses of each agent.

    Args:
        matches: the matches.
        teams: agents that play together. A team's score is the sum of its returns. An agent
            without a team is its own side. If several sides have the largest return, they all win.
        margin: two sides draw if their returns differ by this or less.
    """
    side_of: dict[str, str | int] = {agent: at for at, team in enumerate(teams) for agent in team}
    found: dict[str, list[tuple[float, int]]] = {}  # by agent, its return and its outcome
    for match in matches:
        sides: dict[str | int, float] = {}
        for agent, got in match.returns.items():
            side = side_of.setdefault(agent, agent)
            sides[side] = sides.get(side, 0.0) + got
        for agent, got in match.returns.items():
            mine = side_of[agent]
            against = [outcome(sides[mine], sides[side], margin) for side in sides if side != mine]
            found.setdefault(agent, []).append((got, min(against, default=1) or max(against)))
    return {agent: _record(np.array(pairs)) for agent, pairs in sorted(found.items())}


def _record(pairs: NDArray[np.float64]) -> MatchRecord:
    got, outcomes = pairs[:, 0], pairs[:, 1]  # [M] both
    error = float(got.std(ddof=1) / math.sqrt(len(got))) if len(got) > 1 else math.nan
    return MatchRecord(
        float(got.mean()),
        error,
        int((outcomes > 0).sum()),
        int((outcomes == 0).sum()),
        int((outcomes < 0).sum()),
    )


_MOST_HISTORIES = 1_000_000


def exploitability(policy: Policy, env: str, env_kwargs: Mapping[str, Any] | None = None) -> float:
    """Return the exact mean gain of a best response.

    In units of the game's returns.

    Args:
        policy: plays for all players.
        env: "open_spiel:GAME".
        env_kwargs: parameters of the game.

    Raises:
        ValueError: this is not a game of OpenSpiel, it has too many histories, or the policy does
            not fit it.
    """
    if not env.startswith(SCHEME):
        raise ValueError(f"exploitability: {env} is not a game of OpenSpiel")
    pyspiel: Any = importlib.import_module("pyspiel")
    game = find_game(env)(**(env_kwargs or {})).game
    if not game.get_type().provides_information_state_tensor:
        raise ValueError(
            f"exploitability: {env} has no tensor of a player's whole information, so its policies "
            "cannot be measured"
        )
    # The policy acts by information states, so a table of these is all of it.
    keys, seen, masks = _information_states(env, game)
    chances = policy.probabilities({"observation": seen, "action_mask": masks})  # [S, A]
    chances = chances.astype(np.float64) * masks
    chances /= chances.sum(1, keepdims=True)
    table = {
        key: [(action, float(row[action])) for action in np.flatnonzero(mask)]
        for key, row, mask in zip(keys, chances, masks, strict=True)
    }
    return float(pyspiel.exploitability(game, pyspiel.TabularPolicy(table)))


def _information_states(env: str, game: Any) -> tuple[list[str], Any, Any]:
    """Return all information states: keys, tensors [S, D], legal actions [S, A].

    Raises:
        ValueError: there are too many histories.
    """
    found: dict[str, tuple[Any, Any]] = {}
    left, histories = [game.new_initial_state()], 0
    while left:
        state = left.pop()
        if state.is_terminal():
            continue
        histories += 1
        if histories > _MOST_HISTORIES:
            raise ValueError(
                f"exploitability: {env} has more than {_MOST_HISTORIES:,} histories: too many for "
                "an exact result"
            )
        # All outcomes of dice and cards are followed, instead of a sample.
        if state.is_chance_node():
            left += [state.child(action) for action, _ in state.chance_outcomes()]
            continue
        player = state.current_player()
        key = state.information_state_string(player)
        if key not in found:
            seen = state.information_state_tensor(player)
            found[key] = seen, state.legal_actions_mask(player)
        left += [state.child(action) for action in state.legal_actions()]
    seen, masks = zip(*found.values(), strict=True)
    return [*found], np.array(seen, np.float32), np.array(masks, np.int8)
