"""Numbers in environments' infos, aggregated over episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.envrunner.agent_returns import has_metrics_by_agent
from juggler.envrunner.multi_agent.turns import Turn
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.near_matches import listed
from juggler.runtime.wire.v1 import training_pb2

#: Maximum number of reported numbers; later ones are dropped.
MOST_NUMBERS: Final = 128
#: Maximum number of names; each of several agents may give a number of the same name.
MOST_NAMES: Final = 32
LONGEST_NAME: Final = 100  # characters, of a number or of its agent
#: Maximum number of reported episodes of a fragment, the newest.
MOST_EPISODES: Final = 100

#: Types that count as numbers.
NUMBERS: Final = (float, int, np.floating, np.integer, np.bool_)
LARGEST = 1e300  # so that sums are finite
_MOST_OTHERS = 1000  # remembered names of values that are not numbers
#: Keys of infos that are not the environment's own.
NOT_OF_THE_ENVIRONMENT = frozenset((ACTION_MASK, "final_obs", "final_info"))


class InfoNumber(NamedTuple):
    """Statistics of a number over the steps of an episode."""

    mean: float
    least: float
    most: float


#: By name, one per episode that gave it, in the order of their last steps. A number of one of
#: several agents is named "AGENT/NAME".
InfoNumbers = dict[str, list[InfoNumber]]


def keep_numbers(infos: dict[str, Any], info: Mapping[Any, Any], row: int, rows: int) -> None:
    """Put one row's numbers into the infos of a step.

    They are arrays [rows], NaN where a row gave no number. It runs in each step of each row, and is
    much faster than Gymnasium's way.
    """
    for name, value in info.items():
        if isinstance(value, NUMBERS) and type(name) is str and name not in NOT_OF_THE_ENVIRONMENT:
            array = infos.get(name)  # [rows]
            if array is None:
                if len(infos) >= MOST_NUMBERS:
                    continue
                array = infos[name] = np.full(rows, np.nan)
            try:
                array[row] = value
            except OverflowError:  # an integer too large for a float
                pass


def to_messages(numbers: InfoNumbers) -> list[training_pb2.InfoNumber]:
    return [
        training_pb2.InfoNumber(
            name=name,
            mean=[each.mean for each in episodes],
            least=[each.least for each in episodes],
            most=[each.most for each in episodes],
        )
        for name, episodes in numbers.items()
    ]


def from_messages(messages: Iterable[training_pb2.InfoNumber]) -> InfoNumbers:
    """Reverse `to_messages`."""
    return {
        message.name: [
            InfoNumber(*each)
            for each in zip(message.mean, message.least, message.most, strict=True)
        ]
        for message in messages
    }


@dataclass(slots=True)
class _Number:
    """One number by step, and its sums over running episodes."""

    values: NDArray[np.float64]  # [N, T]; NaN where a step gave no number
    sums: NDArray[np.float64]  # [N]
    counts: NDArray[np.int64]  # [N]
    least: NDArray[np.float64]  # [N]; infinite before the first one
    most: NDArray[np.float64]  # [N]


class InfoWatch:
    """Collects numbers in the infos of N rows, if they are finite.

    Args:
        rows: N, environments with one agent, or agents of environments with several.
        steps: T of a fragment.
        agents: the rows' A agents, in turn; (): numbers are not reported by agent.
    """

    def __init__(
        self, rows: int, steps: int, autoreset: AutoresetMode, agents: Sequence[str] = ()
    ) -> None:
        self._shape = rows, steps
        self._same_step = autoreset is AutoresetMode.SAME_STEP
        self._agents = agents
        self._before_names = [f"{agent}/" for agent in agents] or [""]
        self._most_names = most_names(agents)
        self._numbers: dict[str, _Number] = {}
        self._others: set[str] = set()  # names of values that are not numbers

    def restart(self) -> None:
        """Drop all running episodes."""
        self._numbers = {}

    def see(self, infos: Mapping[str, Any], t: int, done: NDArray[np.bool_]) -> None:
        """Record step t of a vector of environments.

        Args:
            done: [N] where an episode ended. Under SAME_STEP autoreset, its last info is separate.
        """
        self.record(infos, t, ~done if self._same_step else None)
        if self._same_step and isinstance(final := infos.get("final_info"), Mapping):
            self.record(final, t, done)

    def record(self, infos: Mapping[str, Any], t: int, of: NDArray[np.bool_] | None) -> None:
        """Record step t in the rows `of` [N]; None: all."""
        for name, given in infos.items():
            number = self._numbers.get(name)
            if number is None:
                if name in self._others:
                    continue
                if not self._is_number(name, given):
                    if len(self._others) < _MOST_OTHERS:
                        self._others.add(name)
                    continue
                number = self._numbers[name] = self._begin()
            elif not self._are_numbers(given):
                continue  # this time it is something else
            # As in Gymnasium, "_NAME" marks the environments that gave it.
            there = infos.get(f"_{name}")  # [N] where an environment gave it; None: everywhere
            if not self._are_flags(there):
                there = None
            if of is not None:
                there = of if there is None else there & of
            column = number.values[:, t]  # [N]
            if there is None:
                column[:] = given
            else:
                np.copyto(column, given, where=there, casting="unsafe")

    def _are_numbers(self, given: Any) -> bool:
        """Return whether it has a number for each environment."""
        rows = self._shape[0]
        return (
            isinstance(given, np.ndarray) and given.shape == (rows,) and given.dtype.kind in "biuf"
        )

    def _are_flags(self, given: Any) -> bool:
        return (
            isinstance(given, np.ndarray)
            and given.shape == self._shape[:1]
            and given.dtype == np.bool_
        )

    def _is_number(self, name: Any, given: Any) -> bool:
        return (
            self._are_numbers(given)
            and isinstance(name, str)
            and not name.startswith("_")
            and name not in NOT_OF_THE_ENVIRONMENT
            and is_name(name)
            and not names_another(name, self._agents, self._agents)
            and len(self._numbers) < self._most_names
        )

    def _begin(self) -> _Number:
        rows = self._shape[0]
        return _Number(
            values=np.full(self._shape, np.nan),
            sums=np.zeros(rows),
            counts=np.zeros(rows, np.int64),
            least=np.full(rows, np.inf),
            most=np.full(rows, -np.inf),
        )

    def advance(self, live: NDArray[np.bool_] | None, done: NDArray[np.bool_]) -> InfoNumbers:
        """Aggregate one fragment, after all its steps were recorded.

        Args:
            live: [N, T]; false where a step only resets; None: nowhere.
            done: [N, T], the last step of an episode.
        """
        if not self._numbers:
            return {}
        begins = np.ones_like(done)  # [N, T] where a segment of an episode begins
        begins[:, 1:] = done[:, :-1]
        at = np.flatnonzero(begins)  # [S] where each begins among all steps
        rows = at // done.shape[1]  # [S]
        ends = np.append(at[1:], done.size) - 1  # [S] its last step among all
        # Sums over segments at once: a loop over episodes would take longer than their steps.
        ended = done.ravel()[ends]  # [S]
        first = np.ones(len(rows), np.bool_)  # [S] continues the running episode of its row
        first[1:] = rows[1:] != rows[:-1]
        last = np.ones(len(rows), np.bool_)  # [S]
        last[:-1] = first[1:]
        by_step = np.argsort(ends[ended] % done.shape[1], kind="stable")
        order = np.flatnonzero(ended)[by_step]  # [E]
        found: InfoNumbers = {}
        for name, number in self._numbers.items():
            values = number.values  # [N, T]
            # Numbers that are too large or not finite are left out.
            counted = np.abs(values) <= LARGEST  # [N, T]
            if live is not None:
                counted &= live
            sums = _reduce(np.add, np.where(counted, values, 0.0), at)  # [S]
            counts = _reduce(np.add, counted.astype(np.int64), at)  # [S]
            least = _reduce(np.minimum, np.where(counted, values, np.inf), at)  # [S]
            most = _reduce(np.maximum, np.where(counted, values, -np.inf), at)  # [S]
            # The running episode of a row continues with its first segment.
            sums[first] += number.sums
            counts[first] += number.counts
            least[first] = np.minimum(least[first], number.least)
            most[first] = np.maximum(most[first], number.most)
            number.sums = np.where(ended, 0.0, sums)[last]
            number.counts = np.where(ended, 0, counts)[last]
            number.least = np.where(ended, np.inf, least)[last]
            number.most = np.where(ended, -np.inf, most)[last]
            values[:] = np.nan
            # Only episodes that gave the number report it.
            given = order[counts[order] > 0]  # [E']
            agents = rows[given] % len(self._before_names)  # [E']
            for place, before in enumerate(self._before_names):
                newest = given[agents == place][-MOST_EPISODES:]  # [K]
                if len(newest):
                    means = sums[newest] / counts[newest]  # [K]
                    columns = means.tolist(), least[newest].tolist(), most[newest].tolist()
                    each = [InfoNumber(*values) for values in zip(*columns, strict=True)]
                    found[before + name] = each
        return found


def is_name(name: str) -> bool:
    """Return whether a number or an agent may have this name."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


def names_another(name: str, agents: Sequence[str], others: Collection[str]) -> bool:
    """Return whether this name could be another agent's number.

    "b/x" of an agent "a" has the same name as "x" of an agent "a/b".
    """
    return "/" in name and any(
        len(agent) < len(other) and f"{agent}/{name}".startswith(f"{other}/")
        for agent in agents
        for other in others
    )


def reported_agents(agents: Sequence[str]) -> Sequence[str]:
    """Return the agents, if numbers can be reported by agent; else ()."""
    return agents if has_metrics_by_agent(agents) and all(map(is_name, agents)) else ()


def most_names(agents: Sequence[str]) -> int:
    """Return the maximum number of names for these agents."""
    return min(MOST_NAMES, MOST_NUMBERS // max(1, len(agents)))


def keep_newest(kept: dict[str, deque[InfoNumber]], numbers: InfoNumbers) -> None:
    """Add numbers of more episodes, and keep the newest of each name."""
    for name, episodes in numbers.items():
        if name in kept or len(kept) < MOST_NUMBERS:
            kept.setdefault(name, deque(maxlen=MOST_EPISODES)).extend(episodes)


def _reduce(function: np.ufunc, values: NDArray[Any], at: NDArray[np.intp]) -> NDArray[Any]:
    """Reduce steps [R, T] between these places: [S]."""
    reduced: NDArray[Any] = function.reduceat(values.ravel(), at)
    return reduced


#: Types of values that an environment may have meant as numbers of its agents.
_MEANT: Final = (np.ndarray, Mapping, Real)


def arrays_in(
    infos: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[dict[str, NDArray[Any]], str]:
    """Flatten infos [N, A] to new arrays [N * A], by name.

    Also describes the infos that nothing reads, for `Turn.unread`.
    """
    found: dict[str, NDArray[Any]] = {}
    others: list[str] = []
    for name, given in infos.items():
        if isinstance(given, np.ndarray) and given.shape == shape:
            found[name] = given.flatten()
        elif isinstance(given, _MEANT):
            others.append(str(name))
    if not others:
        return found, ""
    return found, (
        f"{listed(others)}, and no array of the shape {list(shape)} there: nothing reads that. "
        "Infos have arrays [num_envs, agents] by name"
    )


def unknown_agents(names: Collection[str], agents: Sequence[str]) -> str:
    """Describe infos under names that are not agents; "": there are none."""
    if not names:
        return ""
    return (
        f"{listed(sorted(names))}, and no agent is called so: nothing reads that. Infos have a "
        f"dict for each agent, as in {{{agents[0]!r}: {{...}}}}"
    )


class AgentInfos:
    """Collects numbers in infos of N environments with A agents each.

    An agent's numbers count from its first action on, and are reported when the episode of its
    environment ends. With many agents, numbers are not reported by agent.

    Args:
        steps: T, environment steps of a round.
    """

    def __init__(self, num_envs: int, agents: Sequence[str], steps: int) -> None:
        self._slots = num_envs * len(agents)
        self._agents = len(agents)
        # An episode's numbers are read before the next one begins.
        mode = AutoresetMode.DISABLED
        self._watch = InfoWatch(self._slots, steps, mode, reported_agents(agents))
        self._over = np.zeros((num_envs, steps), np.bool_)

    def restart(self) -> None:
        """Drop all running episodes."""
        self._watch.restart()
        self._over[:] = False

    def see(self, turn: Turn, t: int) -> None:
        """Record step t of a round."""
        if turn.infos:
            stepped = np.zeros(self._slots, np.bool_)  # [N * A]
            for group in turn.groups:
                stepped[group.acting[~group.first]] = stepped[group.ended] = True
            self._watch.record(turn.infos, t, stepped)
        self._over[turn.over, t] = True

    def advance(self) -> InfoNumbers:
        """Aggregate a round, after all its steps were recorded."""
        found = self._watch.advance(None, np.repeat(self._over, self._agents, 0))
        self._over[:] = False
        return found
