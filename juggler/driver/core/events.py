"""Events that the driver's core books, and commands that it returns.

Terms
    worker       an envrunner or a learner; one process's time as a worker is an incarnation.
    batch        the live steps of one module that one sample request brought; its id is never used
                 twice in a run.
    module       what one group of learners trains. Events and commands name their module; events
                 of a whole worker or run concern every module.
    round        requests to one runner, one for each module that takes part, which it answers by
                 playing once.
    share        what one learner gets of an update: some of the batches that it holds.
    live steps   environment steps that an action caused; the unit of all accounting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from juggler.runtime.episodes.version import DEFAULT_MODULE, Version

#: Why steps that were sampled are never trained on.
DROP_REASONS = (
    "stale",  # too many updates since their weights acted
    "refused",  # the learner did not take the batch
    "nonfinite",  # NaN or infinity in the batch
    "learner_lost",  # the learner that had the batch is gone
    "restart",  # in flight at a checkpoint, or unknown to a restarted learner
    "shutdown",  # never needed before the run ended, or the training of their module
)


class WorkerKey(NamedTuple):
    """A worker's id, and which of its processes it is."""

    worker_id: str  # role and index, as in "envrunner-0"; a replacement gets the same
    incarnation: str


class UsedBatch(NamedTuple):
    """What a learner did with one batch of its share."""

    batch_id: int
    live_steps: int
    staleness: int  # in updates, when it was consumed
    dropped: str = ""  # empty: trained; else a reason


class UpdateShare(NamedTuple):
    learner: str
    batch_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunnerJoined:
    runner: str
    incarnation: str
    # By module id, rows times steps of its batches: an upper bound of their live steps.
    steps_per_request: Mapping[str, int]

    def __post_init__(self) -> None:
        for module_id, steps in self.steps_per_request.items():
            if steps < 1:
                raise ValueError(
                    f"{self.runner} reports that its batches of module {module_id!r} hold {steps} "
                    "steps: must be at least 1"
                )


@dataclass(frozen=True, slots=True)
class RunnerPlays:
    """A runner has received a module that was added during the run."""

    runner: str
    incarnation: str
    steps_per_request: int  # as in `RunnerJoined`
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class RunnerLeft:
    runner: str
    incarnation: str
    reason: str
    not_begun: frozenset[int] = frozenset()  # requested batches of which it made no step


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    learner: str
    incarnation: str
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class StartWithFewer:
    """Some initial learners of a module are missing; the others begin."""

    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class LearnerLeaves:
    """Ask a learner to leave once its batches are trained on.

    Another learner must have its weights, too. `ReleaseLearner` reports this for each module.
    Asynchronous mode only.
    """

    learner: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class LearnerLeft:
    """The process is gone, with all the modules that it had."""

    learner: str
    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SampleReceived:
    """A runner's receipt: the batch arrived, or `dropped` says why not."""

    batch_id: int
    runner: str
    incarnation: str
    learner: str
    live_steps: int
    version: Version  # that acted
    dropped: str = ""
    stale_steps: int = 0  # too old to be in any batch
    module_id: str = DEFAULT_MODULE

    def __post_init__(self) -> None:
        _check(self.runner, self.batch_id, self.live_steps, self.dropped)


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """A runner could not sample for this request; there are no steps."""

    batch_id: int
    runner: str
    incarnation: str
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """A learner's report: the batch is there."""

    learner: str
    incarnation: str
    batch_id: int
    live_steps: int
    module_id: str = DEFAULT_MODULE

    def __post_init__(self) -> None:
        _check(self.learner, self.batch_id, self.live_steps, "")


@dataclass(frozen=True, slots=True)
class UpdateFinished:
    """One learner's answer to an update."""

    update_id: int
    learner: str
    incarnation: str
    version: Version  # of the weights that the update made
    used: tuple[UsedBatch, ...]
    module_id: str = DEFAULT_MODULE

    def __post_init__(self) -> None:
        for batch in self.used:
            _check(self.learner, batch.batch_id, batch.live_steps, batch.dropped)


@dataclass(frozen=True, slots=True)
class UnreportedUpdate:
    """A lost learner is back, with an update that may be unreported."""

    learner: str
    version: Version  # of the weights that the update made
    used: tuple[UsedBatch, ...]
    module_id: str = DEFAULT_MODULE

    def __post_init__(self) -> None:
        for batch in self.used:
            _check(self.learner, batch.batch_id, batch.live_steps, batch.dropped)


@dataclass(frozen=True, slots=True)
class UpdateAborted:
    """One learner could not make an update; its share is dropped."""

    update_id: int
    learner: str
    incarnation: str
    reason: str
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class PeersMet:
    """The group of this generation can update; its weights have `update` updates."""

    generation: int
    update: int
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class RebuildGroup:
    """Ask the members of this generation to form another group.

    Either they cannot update together although no member has left, or they have new weights, with
    which runners should act.
    """

    generation: int
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class StartNextTurn:
    """In synchronous mode, after an update: the next turn may begin."""

    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class TrainingEnds:
    """Stop training one module, as `StopRequested` stops all."""

    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Request no more steps and updates; work in flight is still booked."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Close the books: open work will not be reported any more."""


#: What happens to the runners that modules share.
OfRunner = RunnerJoined | RunnerPlays | RunnerLeft

#: What happens to every module of a run at once.
OfEveryModule = LearnerLeaves | LearnerLeft | StopRequested | Finish

#: What happens to one module, which the event names.
OfModule = (
    LearnerJoined
    | StartWithFewer
    | SampleReceived
    | SampleFailed
    | BatchArrived
    | UpdateFinished
    | UnreportedUpdate
    | UpdateAborted
    | PeersMet
    | RebuildGroup
    | StartNextTurn
    | TrainingEnds
)

Event = OfRunner | OfEveryModule | OfModule


@dataclass(frozen=True, slots=True)
class Request:
    """Command to a runner: sample one batch for this learner.

    The weights must be `at_least` or newer.
    """

    runner: str
    incarnation: str
    batch_id: int
    learner: str
    generation: int
    at_least: Version
    module_id: str = DEFAULT_MODULE
    round: int = 0  # requests of one round are answered by playing once; 0: a round of one request
    requests_in_round: int = 0


@dataclass(frozen=True, slots=True)
class IssueUpdate:
    """Command to make one update together, sent to all members or none."""

    update_id: int
    generation: int
    shares: tuple[UpdateShare, ...]  # by rank
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class FormGroup:
    """To the learners: these are the group from now on."""

    generation: int
    members: tuple[str, ...]  # by rank
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class ReleaseLearner:
    """This module no longer needs the leaving learner."""

    learner: str
    module_id: str = DEFAULT_MODULE


@dataclass(frozen=True, slots=True)
class Discard:
    """Command to a learner: discard batches that no update will name."""

    learner: str
    batch_ids: tuple[int, ...]
    module_id: str = DEFAULT_MODULE


Command = Request | IssueUpdate | FormGroup | ReleaseLearner | Discard


def _check(worker: str, batch_id: int, live_steps: int, dropped: str) -> None:
    if live_steps < 0:
        raise ValueError(f"{worker} reported {live_steps} live steps in batch {batch_id}")
    if dropped and dropped not in DROP_REASONS:
        raise ValueError(
            f"{worker} dropped batch {batch_id} for the reason {dropped!r}; "
            f"known are: {', '.join(DROP_REASONS)}"
        )
