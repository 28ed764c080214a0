"""The requests of a round, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from juggler.envrunner.agent_returns import AgentReturns
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.info_numbers import InfoNumbers
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2


class RequestedRound:
    """Gathers the requests of a round, which follow each other.

    Attributes:
        requests: received so far, by command id.
    """

    def __init__(self) -> None:
        self.requests: dict[int, training_pb2.SampleRequest] = {}

    def add(self, command_id: int, request: training_pb2.SampleRequest) -> bool:
        """Take the next request. True: the round is complete.

        Raises:
            ValueError: it does not belong to the requests before.
        """
        for other in self.requests.values():
            if (other.round, other.requests_in_round) != (request.round, request.requests_in_round):
                raise ValueError(
                    f"a request of round {request.round} came before all "
                    f"{other.requests_in_round} of round {other.round}"
                )
            if other.module_id == request.module_id:
                raise ValueError(
                    f"round {request.round} has two requests for module {request.module_id!r}"
                )
        self.requests[command_id] = request
        return not request.round or len(self.requests) >= request.requests_in_round


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one module did in a round.

    Attributes:
        batch: of its rows; None: no row is complete.
        version: the oldest weights that acted in the batch; without a batch, the weights that
            acted.
        episode_returns: undiscounted returns of the episodes that ended in this round, with their
            steps in earlier rounds.
        episode_lengths: their numbers of steps.
        connector_delta: what connectors have learned since the last batch; {}: nothing.
        stale_steps: steps that were dropped because they are too old for a batch.
    """

    batch: EpisodeBatch | None
    version: Version
    episode_returns: list[float]
    episode_lengths: list[int]
    connector_delta: State = field(default_factory=dict)
    stale_steps: int = 0


@dataclass(slots=True)
class Played:
    """What a module that is not trained did in a round.

    Attributes:
        steps: actions of its agents whose rewards are known.
        episode_returns: as in `Recorded`.
        episode_lengths: as in `Recorded`.
    """

    steps: int = 0
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)

    def add(self, other: Played) -> None:
        """Add what it did for other agents."""
        self.steps += other.steps
        self.episode_returns += other.episode_returns
        self.episode_lengths += other.episode_lengths


@dataclass(frozen=True, slots=True)
class EndedMatch:
    """What came of a match of a league.

    Attributes:
        match_id: from the driver.
        attempt: how often its line-up was drawn again.
        returns: of each agent, in the order of the Setup's agents; NaN: it never acted.
        length: environment steps.
    """

    match_id: int
    attempt: int
    returns: list[float]
    length: int


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """What came of fragment_steps steps of each environment.

    Attributes:
        modules: by id of each module that was to be recorded, what it did; or why that is lost.
        seconds: time spent in "environment", in "inference", in "frames" (making batches), and in
            "connectors" (everything else).
        env_returns: with several agents, of the environments' episodes that ended, the sum of all
            agents' returns.
        env_lengths: their numbers of environment steps.
        others: by id, what modules did that are not trained.
        agent_returns: what each agent got in them.
        matches: of a league, that ended.
        notes: for people, each of them once: how modules act, and which agent does not end.
        infos: numbers that the environments put into their infos, of the episodes that ended.
    """

    modules: Mapping[str, Recorded | NonFinite]
    seconds: Mapping[str, float]
    env_returns: list[float] = field(default_factory=list)
    env_lengths: list[int] = field(default_factory=list)
    others: Mapping[str, Played] = field(default_factory=dict)
    agent_returns: AgentReturns = field(default_factory=dict)
    matches: list[EndedMatch] = field(default_factory=list)
    notes: list[training_pb2.Note] = field(default_factory=list)
    infos: InfoNumbers = field(default_factory=dict)
