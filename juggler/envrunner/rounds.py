"""The requests of a round, and its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from juggler.envrunner.agent_returns import AgentReturns
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.info_numbers import InfoNumbers
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2


class RequestedRound:
    """Collects the requests of a round."""

    def __init__(self) -> None:
        self.requests: dict[int, training_pb2.SampleRequest] = {}  # received so far, by command id

    def add(self, command_id: int, request: training_pb2.SampleRequest) -> bool:
        """Add the next request. True: the round is complete.

        Raises:
            ValueError: it does not belong to the earlier requests.
        """
        for other in self.requests.values():
            if (other.round, other.requests_in_round) != (request.round, request.requests_in_round):
                raise ValueError(
                    f"a request of round {request.round} arrived before all "
                    f"{other.requests_in_round} of round {other.round}"
                )
            if other.module_id == request.module_id:
                raise ValueError(
                    f"round {request.round} has two requests for module {request.module_id!r}"
                )
        self.requests[command_id] = request
        return not request.round or len(self.requests) >= request.requests_in_round


@dataclass(frozen=True, slots=True)
class TrainedResult:
    """Results of a trained module in a round."""

    batch: EpisodeBatch | None  # of its rows; None: no row is complete
    # The oldest weights that acted in the batch; without a batch, the weights that acted.
    version: Version
    # Undiscounted returns of the episodes that ended in this round, with their steps in earlier
    # rounds.
    episode_returns: list[float]
    episode_lengths: list[int]  # their numbers of steps
    # What connectors have learned since the last batch; {}: nothing.
    connector_delta: State = field(default_factory=dict)
    stale_steps: int = 0  # steps that were dropped because they were too old for a batch


@dataclass(slots=True)
class FrozenResult:
    """Results of a module that is not trained in a round."""

    steps: int = 0  # actions of its agents whose rewards are known
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)

    def add(self, other: FrozenResult) -> None:
        """Add its results for other agents."""
        self.steps += other.steps
        self.episode_returns += other.episode_returns
        self.episode_lengths += other.episode_lengths


@dataclass(frozen=True, slots=True)
class PlayedRound:
    """Results of fragment_steps steps of each environment."""

    # Results by id of a module that collects; or the reason why they are lost.
    modules: Mapping[str, TrainedResult | NonFiniteBatch]
    # Time spent in "environment", in "inference", in "frames" (making batches), and in "connectors"
    # (everything else).
    seconds: Mapping[str, float]
    # With several agents, of the environments' episodes that ended, the sum of all agents' returns.
    env_returns: list[float] = field(default_factory=list)
    env_lengths: list[int] = field(default_factory=list)  # their numbers of environment steps
    # Results by id of a module that is not trained.
    others: Mapping[str, FrozenResult] = field(default_factory=dict)
    # Returns of each agent in these episodes; {}: of too many agents, or of one.
    agent_returns: AgentReturns = field(default_factory=dict)
    # Of a league, that ended, with the returns of each agent in the order of the Setup's agents;
    # NaN: it never acted.
    matches: list[training_pb2.MatchResult] = field(default_factory=list)
    # To log once: how modules act, and which agent does not end.
    notes: list[training_pb2.Note] = field(default_factory=list)
    # Numbers in the environments' infos, of the episodes that ended.
    infos: InfoNumbers = field(default_factory=dict)
