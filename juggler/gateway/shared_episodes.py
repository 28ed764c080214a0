"""Episodes of a simulator's environments, in which several agents may act."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.multi_agent.line_up import LineUp, LineUps, Players

_OUT, _ACTS, _ENDED = 0, 1, 2
_NONE, _NONE_LONG = np.zeros(0), np.zeros(0, np.intp)

#: Of more episodes that ended since the driver last heard of them, the newest are kept. It takes so
#: many with a batch of any size.
MOST_UNTOLD = 1 << 16


def keep_newest(ended: list[Any]) -> int:
    """Forget the oldest of too many episodes -> how many."""
    many = max(0, len(ended) - MOST_UNTOLD)
    del ended[:many]
    return many


class AgentRows(Protocol):
    """What a batch of steps says of one agent, in R rows.

    Attributes:
        environments: [R] their numbers.
        ended: places among the rows where the agent's episode ended.
        paused: places that want no action.
        rewarded: places whose rewards are those of an action.
        rewards: [R]
        early: rewards from before an agent's first action, with their places.
    """

    environments: list[int]
    paused: list[int]
    rewarded: list[int]
    rewards: list[float]
    early: list[tuple[int, float]]

    @property
    def index(self) -> int:
        """Of the agent, in its session."""

    @property
    def ended(self) -> list[int]: ...


def _environments_acted_in(parts: Sequence[AgentRows]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        out = set(part.paused)
        found.update(each for at, each in enumerate(part.environments) if at not in out)
    return found


class Followed(NamedTuple):
    """What a batch of steps means for the episodes of environments.

    Attributes:
        over: environments whose episodes are over with it.
        began: those whose next episodes begin with it.
        early: the first agent and environment where the agent shall act though it has ended; None:
            there is none.
    """

    over: list[int]
    began: list[int]
    early: tuple[int, int] | None


class BookedBatch(NamedTuple):
    """What a batch of steps means for the books.

    Attributes:
        env_returns: [L] of the episodes that are over.
        env_lengths: [L] their environment steps.
        agent_returns: [L, A] each agent's return in these; NaN if it did not act.
        steps: of environments.
    """

    env_returns: NDArray[np.float64]
    env_lengths: NDArray[np.intp]
    agent_returns: NDArray[np.float64]
    steps: int


class SharedEpisodes:
    """The episodes of N environments with A agents each.

    An agent takes part from its first observation until its end. The episode of an environment is
    over when no agent takes part in it any more. Until then, an agent that has ended stays away.

    Args:
        seats: their players.
        environments: N.

    Attributes:
        seats: as given.
    """

    def __init__(self, seats: Seats, environments: int) -> None:
        self.seats = seats
        shape = len(seats.names), environments
        self._stages: NDArray[np.int8] = np.zeros(shape, np.int8)
        self._returns = np.zeros(shape)
        self._acted = np.zeros(shape, np.bool_)  # in the episode
        self._lengths = np.zeros(environments, np.intp)

    def follow(self, parts: Sequence[AgentRows], continuing: Collection[int] = ()) -> Followed:
        """Follow which agents end and which act next.

        Args:
            parts: of different agents.
            continuing: environments whose episodes continue with the agents that act next, even if
                all earlier agents have ended.
        """
        stages = self._stages
        touched: set[int] = set()
        for part in parts:
            ended = [part.environments[at] for at in part.ended]
            stages[part.index, ended] = _ENDED
            touched.update(ended)
        if continuing:
            touched -= {*continuing} & _environments_acted_in(parts)
        over = [each for each in sorted(touched) if not (stages[:, each] == _ACTS).any()]
        stages[:, over] = _OUT
        began: set[int] = set()
        for part in parts:
            out = set(part.paused)
            acting = [each for at, each in enumerate(part.environments) if at not in out]
            of_agent = stages[part.index, acting]  # [B]
            gone = of_agent == _ENDED
            if gone.any():
                return Followed(over, [], (part.index, acting[int(gone.argmax())]))
            if self.seats.drawn:
                new = np.array(acting, np.intp)[of_agent == _OUT]
                began.update(new[(stages[:, new] == _OUT).all(0)].tolist())
            stages[part.index, acting] = _ACTS
        return Followed(over, sorted(began), None)

    def book(self, parts: Sequence[AgentRows], over: list[int]) -> BookedBatch:
        """Add the rewards of a batch of steps.

        A length is a number of environment steps: each batch with rewards for it is one.

        Args:
            parts: of different agents.
            over: as `follow` returned it.
        """
        stepped: set[int] = set()
        for part in parts:
            rewarded = [part.environments[at] for at in part.rewarded]
            self._returns[part.index, rewarded] += [part.rewards[at] for at in part.rewarded]
            self._acted[part.index, rewarded] = True
            stepped.update(rewarded)
        self._lengths[list(stepped)] += 1
        booked = self._ended(over, len(stepped))
        for part in parts:  # these may be of the next episode
            for at, reward in part.early:
                self._returns[part.index, part.environments[at]] += reward
        return booked

    def _ended(self, over: list[int], steps: int) -> BookedBatch:
        if not over:  # as most batches
            return BookedBatch(_NONE, _NONE_LONG, _NONE[:, None], steps)
        returns, lengths = self._returns[:, over], self._lengths[over]  # [A, L], [L]
        of_agents = np.where(self._acted[:, over], returns, np.nan)  # [A, L]
        self._returns[:, over], self._acted[:, over], self._lengths[over] = 0, False, 0
        return BookedBatch(returns.sum(0), lengths, of_agents.T, steps)


class Seats:
    """The players in the environments of a session.

    Args:
        line_ups: decides for each episode; None: the same modules act in all of them.
        names: of A agents.
        played_by: by name, the modules that may act.
        order: the names in the order of the line-ups.
        numbers: of the N environments among those of all sessions of this gateway.

    Attributes:
        names: as given.
        drawn: line-ups are drawn.
    """

    def __init__(
        self,
        line_ups: LineUps | None,
        names: Sequence[str],
        played_by: Mapping[str, Sequence[str]],
        order: Sequence[str],
        numbers: range,
    ) -> None:
        self.names = tuple(names)
        self._line_ups, self._numbers = line_ups, np.array(numbers, np.intp)
        self._players = Players(
            len(numbers), self.names, {name: ids[0] for name, ids in played_by.items()}
        )
        self._column = np.array([order.index(name) for name in names], np.intp)  # [A]

    @property
    def drawn(self) -> bool:
        return self._line_ups is not None

    def of(self, environments: Sequence[int]) -> NDArray[np.object_]:
        """The ids of modules [K, A] in environments [K]."""
        return self._players.of(np.array(environments, np.intp))

    def begin(self, environments: Sequence[int]) -> None:
        """Environments [K] begin an episode.

        Raises:
            LineUpError: there is no line-up for one.
        """
        assert self._line_ups is not None
        began = np.array(environments, np.intp)
        line_up = self._line_ups.begin(self._numbers[began])
        ours = line_up.players.reshape(len(began), -1)[:, self._column]  # [K, A]
        slots = began[:, None] * len(self.names) + np.arange(len(self.names))  # [K, A]
        self._players.line_up(LineUp(slots.ravel(), ours.ravel()))

    def ended(
        self,
        environments: Sequence[int],
        returns: NDArray[np.float64],
        lengths: NDArray[np.intp],
    ) -> None:
        """Tell how episodes ended, in environments [L].

        Args:
            environments: [L]
            returns: [L, A]; NaN where an agent did not act.
            lengths: [L] environment steps.
        """
        if self._line_ups is not None:
            in_order = np.empty_like(returns)  # [L, A]
            in_order[:, self._column] = returns
            self._line_ups.ended(self._numbers[list(environments)], in_order, lengths)

    def leave(self) -> None:
        """Drop running episodes: a league's matches are played by others."""
        if self._line_ups is not None:
            self._line_ups.abandon(self._numbers.tolist())
