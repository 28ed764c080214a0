"""Evaluates a checkpoint in whole episodes of simulators, without exploration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import add_returns
from juggler.envrunner.evaluation import Goal, PlayedEpisodes
from juggler.gateway.module_player import EVALUATED, LEFT, TRAINING, ModulePlayer
from juggler.gateway.sessions import BookedBatch, GatewaySession, StepMessage
from juggler.runtime.acting.actor import Actor


class GreedyEpisodes:
    """The evaluation of a checkpoint in the environments of simulators.

    It takes the first episodes to begin, because the first episodes to end would be the short ones.
    They are neither trained on nor counted in training.

    Args:
        actors: the policies and connectors of the checkpoint, by player; a player that comes later
            is added.
        most_steps: maximum steps of an episode, which then counts with its return so far; 0: no
            limit.
        goal: the evaluation ends once it is out of reach; None: no goal.
        everywhere: play in all environments, instead of half of them.
    """

    def __init__(
        self,
        actors: dict[str, Actor],
        episodes: int,
        most_steps: int,
        goal: Goal | None,
        everywhere: bool = False,
    ) -> None:
        self.actors, self.most_steps = actors, most_steps
        self.everywhere = everywhere
        self.played = PlayedEpisodes([], [], {})  # so far
        self.running = 0  # number of its episodes that have begun and not ended
        self.given_up = ""  # why the evaluation ends early; "": it does not
        self._episodes, self._goal = episodes, goal

    @property
    def is_over(self) -> bool:
        """Whether it is complete, cancelled, or cannot reach its goal."""
        returns, goal = self.played.returns, self._goal
        in_vain = goal is not None and returns and goal.out_of_reach(returns, self._episodes)
        return bool(self.given_up or in_vain) or len(returns) >= self._episodes

    @property
    def missing(self) -> int:
        """Number of episodes that have to begin."""
        return 0 if self.is_over else self._episodes - len(self.played.returns) - self.running


class Evaluations:
    """Lets evaluations play some of the episodes of simulators.

    All agents of an environment play an episode for the same purpose.
    """

    def __init__(
        self, players: Mapping[str, ModulePlayer], sessions: Mapping[str, GatewaySession]
    ) -> None:
        self.running: GreedyEpisodes | None = None  # the evaluation; None: there is none
        self.began = False  # an evaluation has begun, so episodes of one may be running
        self._players, self._sessions = players, sessions

    def begin(self, evaluation: GreedyEpisodes) -> None:
        """Play new episodes without exploration."""
        self.running, self.began = evaluation, True
        for key, actor in evaluation.actors.items():
            if key in self._players:  # a league's player may have left since
                self._players[key].evaluate(actor)

    def end(self) -> GreedyEpisodes | None:
        """Remove and return the evaluation, if it has ended."""
        evaluation = self.running
        if evaluation is None or not evaluation.is_over:
            return None
        for player in self._players.values():
            playing = player.of["playing"]
            playing[playing == EVALUATED] = LEFT
            player.greedy = None
        self.running = None
        return evaluation

    def playing(self, session: GatewaySession) -> NDArray[np.int8]:
        """Return the purposes [N] of episodes in a session's environments."""
        agent = session.agents[0]
        purposes: NDArray[np.int8] = self._players[agent.player].of["playing"][agent.places]
        return purposes

    def book(self, batch: StepMessage, booked: BookedBatch | None) -> NDArray[np.bool_]:
        """Count the ended episodes of an evaluation.

        Args:
            batch: its rewards are not in players yet.
            booked: results of environments with several agents.

        Returns:
            [L] which of the ended episodes belong to training.
        """
        over, session = batch.over, batch.session
        playing = self.playing(session)[over]  # [L]
        if (playing == EVALUATED).any():
            if booked is None:
                so_far, (part,) = self._so_far(session, over), batch.parts
                totals = so_far.env_returns + [part.rewards[at] for at in part.ended]
                booked = so_far._replace(env_returns=totals, env_lengths=so_far.env_lengths + 1)
            self._count(session, over, booked, playing == EVALUATED)
        return np.asarray(playing == TRAINING)

    def _so_far(self, session: GatewaySession, environments: Sequence[int]) -> BookedBatch:
        """Return results of running episodes."""
        if session.episodes is not None:
            return session.episodes.so_far(environments)
        places, of = session.alone.places[environments], self._players[session.alone.player].of
        nothing = np.empty((len(places), 0))
        return BookedBatch(of["return"][places], of["length"][places], nothing, 0)

    def _count(
        self,
        session: GatewaySession,
        environments: Sequence[int],
        booked: BookedBatch,
        which: NDArray[np.bool_],
    ) -> None:
        """Count some [L] of the episodes in environments [L]."""
        assert self.running is not None
        played = self.running.played
        played.returns.extend(booked.env_returns[which].tolist())
        played.lengths.extend(booked.env_lengths[which].tolist())
        self.running.running -= int(which.sum())
        if session.episodes is not None:
            players = session.episodes.players(environments)[which]
            names = session.episodes.names
            add_returns(played.agent_returns, names, booked.agent_returns[which], players)

    def choose(self, batch: StepMessage) -> list[int]:
        """Return the environments whose new episodes the evaluation may play.

        Args:
            batch: its ended episodes are booked.
        """
        evaluation = self.running
        if evaluation is None or not (missing := evaluation.missing):
            return []
        environments = sum(each.environments for each in self._sessions.values())
        most = environments if evaluation.everywhere else max(1, environments // 2)
        more = min(missing, most - evaluation.running)
        return _began(batch)[:more] if more > 0 else []

    def begin_episodes(self, batch: StepMessage, chosen: list[int]) -> None:
        """Note that the evaluation plays the chosen new episodes."""
        batch.evaluated = chosen
        if self.running is not None:
            self.running.running += len(chosen)

    def follow(self, batch: StepMessage) -> None:
        """Set the purposes of new episodes, and leave the longest ones.

        Args:
            batch: its results are in players.
        """
        session, evaluation = batch.session, self.running
        if batch.over:
            self._set(session, batch.over, TRAINING)
        if evaluation is not None and evaluation.most_steps:
            self._leave_long(batch, evaluation)
        if batch.evaluated:
            self._set(session, batch.evaluated, EVALUATED)

    def _leave_long(self, batch: StepMessage, evaluation: GreedyEpisodes) -> None:
        """Count the episodes that take too long with their returns so far."""
        session, playing = batch.session, self.playing(batch.session)
        stepped = {each for part in batch.parts for each in part.environments}
        mine = [each for each in stepped if playing[each] == EVALUATED]
        so_far = self._so_far(session, mine)
        long = so_far.env_lengths >= evaluation.most_steps
        self._count(session, mine, so_far, long)
        self._set(
            session, [each for each, is_long in zip(mine, long, strict=True) if is_long], LEFT
        )

    def leave(self, session: GatewaySession) -> None:
        """Note that a session takes its episodes along."""
        if self.running is not None:
            self.running.running -= int((self.playing(session) == EVALUATED).sum())

    def _set(self, session: GatewaySession, environments: Collection[int], purpose: int) -> None:
        """Set the purpose of episodes in some environments of a session."""
        for agent in session.agents:
            for key, places in agent.seats.items():
                self._players[key].of["playing"][places[[*environments]]] = purpose


def _began(batch: StepMessage) -> list[int]:
    """Return the environments whose next episodes begin."""
    if batch.session.episodes is not None:
        return batch.began
    (part,) = batch.parts
    out, acted = set(part.paused), part.agent.acted
    return [e for at, e in enumerate(part.environments) if at not in out and not acted[e]]
