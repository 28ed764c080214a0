"""What workers say, held against what they were asked, before anybody believes it.

Everything here raises ValueError or TypeError where a worker says what cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message

from juggler.driver.core import events
from juggler.driver.league.config import MOST_HISTORICAL, MOST_LEARNING
from juggler.envrunner.info_numbers import MOST_EPISODES, MOST_NUMBERS
from juggler.runtime.actors.hello import one_line
from juggler.runtime.actors.hub_events import Left
from juggler.runtime.actors.requests import Completed
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.entries import check_entries
from juggler.runtime.wire.frames import MAX_MESSAGE_BYTES
from juggler.runtime.wire.spaces import check_limits
from juggler.runtime.wire.v1 import training_pb2

M = TypeVar("M", bound=Message)

#: Where a worker's time may go, and what it may count: these are in every line of metrics.
_OF_RUNNERS = "waiting environment inference connectors frames messages gathering"
_OF_LEARNERS = "waiting collate update publish receive"
SECONDS = frozenset([*_OF_RUNNERS.split(), *_OF_LEARNERS.split()])
COUNTS = frozenset({"inferences", "inferred_rows", "inferred_batches", "waited_seconds"})

_LONGEST_NOTE = 1000  # characters
_LONGEST_REASON = 300  # of each learner of a group
_LONGEST_NAME = 255
_MOST_STALE_STEPS = 1 << 32  # beside one batch; a run's sum of them has to fit 63 bits
_MOST_NUMBER = 1e15  # of seconds, or counted
_MOST_ARRIVALS = 1024  # in one report
_MORE_EPISODES = 1 << 16  # than steps of a batch: those whose steps are in others, or in none
_MOST_MODULES = MOST_LEARNING
_MOST_PLAYERS = 2 * MOST_HISTORICAL  # those that are gone since the last receipt, too
_MOST_METRICS = 1024  # of a module
_MOST_KEPT = 64  # updates that a learner kept
_MOST_USED = 1 << 16  # batches in them
_OF_AGENT = 4 * _LONGEST_NAME + 64  # bytes of its name, its module and what is around them
_FEW = 1024  # fields of a message, each name in a map included
_MOST_OUTCOMES = 1 << 16  # in a receipt: of matches, and of each agent by who played it


def unpack(
    packed: any_pb2.Any, message: M, most_bytes: int = 1 << 14, most_entries: int = _FEW
) -> M:
    """
    Args:
        packed: as it came.
        message: of the kind that it should be; filled.
        most_bytes: that it may take.
        most_entries: that it may have outermost, see `check_entries`. More is not even read.

    Raises:
        TypeError: it is another message.
        ValueError: it is none, or too large.
    """
    kind: Any = message.DESCRIPTOR
    if not packed.Is(kind):
        raise TypeError(f"{packed.TypeName()[:100] or 'nothing'} in place of {kind.full_name}")
    if len(packed.value) > most_bytes:
        size = len(packed.value)
        raise ValueError(f"a {kind.full_name} of {size} bytes: at most {most_bytes}")
    check_entries(packed.value, most_entries)
    try:
        message.ParseFromString(packed.value)
    except DecodeError as error:
        raise ValueError(f"bytes that are no {kind.full_name}") from error
    return message


def _about_module(answer: M, asked: str) -> M:
    """
    Raises:
        ValueError: the answer is about another module than the command.
    """
    message: Any = answer
    if message.module_id != asked:
        other = one_line(message.module_id, _LONGEST_NAME)
        raise ValueError(f"an answer about module {other!r}, not {asked!r}")
    return answer


def read_runner_ready(body: any_pb2.Any) -> training_pb2.Ready:
    ready = unpack(body, training_pb2.Ready(), MAX_MESSAGE_BYTES)
    if len(ready.modules) > _MOST_MODULES:
        raise ValueError(f"{len(ready.modules)} modules: at most {_MOST_MODULES}")
    for module in ready.modules:
        check_limits(module.observation_space)
        check_limits(module.action_space)
        check_limits(module.environment_observation_space)
        check_limits(module.environment_action_space)
        check_limits(module.critic_space)
    return ready


def read_module_ready(
    command: training_pb2.AddModule, body: any_pb2.Any
) -> training_pb2.ModuleReady:
    ready = unpack(body, training_pb2.ModuleReady(), 1 << 20)
    ready = _about_module(ready, command.module_id)
    ready.description = one_line(ready.description, _LONGEST_NAME)
    _check_name("a meeting point", ready.meeting_point)
    ready.why_alone = one_line(ready.why_alone, _LONGEST_NOTE)
    if len(ready.last_updates) > _MOST_KEPT:
        raise ValueError(f"{len(ready.last_updates)} updates that it kept: at most {_MOST_KEPT}")
    if sum(len(update.batches) for update in ready.last_updates) > _MOST_USED:
        raise ValueError(f"over {_MOST_USED} batches in updates that it kept")
    return ready


def read_receipt(
    request: training_pb2.SampleRequest,
    body: any_pb2.Any,
    agents: Collection[str],
    is_module: Callable[[str], bool],
) -> training_pb2.Receipt:
    """
    Args:
        request: what was asked.
        body: the answer.
        agents: of an environment, if there are several.
        is_module: tells whether a module of this id may have played.
    """
    entries = _FEW + (_MOST_OUTCOMES if agents else 0)
    receipt = unpack(body, training_pb2.Receipt(), MAX_MESSAGE_BYTES, entries)
    receipt = _about_module(receipt, request.module_id)
    if receipt.batch_id != request.batch_id:
        raise ValueError(f"a receipt for batch {receipt.batch_id}, not {request.batch_id}")
    if receipt.stale_steps > _MOST_STALE_STEPS:
        raise ValueError(f"{receipt.stale_steps} steps too old for a batch")
    if receipt.learner != request.learner:
        learner = one_line(receipt.learner, _LONGEST_NAME)
        raise ValueError(f"a receipt for a batch of {learner}, not of {request.learner}")
    most_episodes = receipt.live_steps + _MORE_EPISODES
    _check_returns(receipt.episode_returns, receipt.episode_lengths, most_episodes)
    _check_returns(receipt.env_returns, receipt.env_lengths, most_episodes)
    _check_infos(receipt.infos)
    _check_agent_returns(receipt.agent_returns, agents, is_module, len(receipt.env_returns))
    _check_numbers("seconds", receipt.seconds, SECONDS)
    _check_numbers("counts", receipt.counts, COUNTS)
    if len(receipt.played) > _MOST_PLAYERS:
        raise ValueError(f"{len(receipt.played)} modules that played: at most {_MOST_PLAYERS}")
    for played in receipt.played:
        if played.steps > _MOST_STALE_STEPS:
            raise ValueError(f"{played.steps} steps of a module that is not trained")
        most_episodes = played.steps + _MORE_EPISODES
        _check_returns(played.episode_returns, played.episode_lengths, most_episodes)
    most_matches = len(receipt.env_returns)
    if len(receipt.matches) > most_matches:
        raise ValueError(f"{len(receipt.matches)} matches in {most_matches} episodes that ended")
    for match in receipt.matches:
        if any(math.isinf(value) for value in match.returns):
            raise ValueError(f"a return of match {match.match_id} is infinite")
    receipt.explanation = one_line(receipt.explanation, _LONGEST_NOTE)
    return receipt


def read_arrivals(body: any_pb2.Any) -> training_pb2.Arrivals:
    """A learner's report."""
    return unpack(body, training_pb2.Arrivals(), 1 << 16, _MOST_ARRIVALS)


def read_note(body: any_pb2.Any) -> training_pb2.Note:
    """What a worker has to say to people, in one line."""
    note = unpack(body, training_pb2.Note())
    note.text = one_line(note.text, _LONGEST_NOTE)
    return note


def read_not_begun(left: Left, unanswered: Iterable[Completed]) -> frozenset[int]:
    """Batches that an EnvRunner was asked for and made no step of, if it says what it began."""
    return frozenset(
        each.request.batch_id
        for each in unanswered
        if isinstance(each.request, training_pb2.SampleRequest)
        and left.farewell
        and each.command_id not in left.unanswered
    )


def read_update_done(
    update: training_pb2.Update, body: any_pb2.Any, newest: Version
) -> training_pb2.UpdateDone:
    """`newest`: the version that nothing before this update can exceed."""
    most = len(update.batch_ids)
    size, entries = (1 << 18) + (most << 6), most + _FEW
    done = _about_module(unpack(body, training_pb2.UpdateDone(), size, entries), update.module_id)
    if done.update_id != update.update_id:
        raise ValueError(f"an answer to update {done.update_id}, not {update.update_id}")
    if len(done.batches) > most:
        raise ValueError(f"an answer about {len(done.batches)} batches, of {most} in the update")
    if len(done.metrics) > _MOST_MODULES:
        raise ValueError(f"metrics of {len(done.metrics)} modules: at most {_MOST_MODULES}")
    for values in (done.replay, *(metrics.values for metrics in done.metrics.values())):
        if len(values) > _MOST_METRICS:
            raise ValueError(f"{len(values)} metrics of a module: at most {_MOST_METRICS}")
        for name in values:
            _check_name("a metric", name)
    for module_id in done.metrics:
        _check_name("a module", module_id)
    for name, value in done.replay.items():
        _check_number("numbers of a replay", name, value)
    _check_numbers("seconds", done.seconds, SECONDS)
    _check_version(Version.of(done.version), newest)
    done.peer_lost = one_line(done.peer_lost, _LONGEST_REASON)
    done.hopeless = one_line(done.hopeless, _LONGEST_REASON)
    return done


def read_unheard_update(
    module_id: str, learner: str, done: training_pb2.UpdateDone, newest: Version
) -> events.UnheardUpdate:
    """`newest`: as of `read_update_done`."""
    version = Version.of(done.version)
    _check_version(version, newest)
    return events.UnheardUpdate(learner, version, used_batches(done), module_id)


def used_batches(done: training_pb2.UpdateDone) -> tuple[events.UsedBatch, ...]:
    return tuple(
        events.UsedBatch(batch.batch_id, batch.live_steps, batch.staleness, batch.dropped)
        for batch in done.batches
    )


def read_group_formed(
    group: training_pb2.Group, body: any_pb2.Any, newest: Version
) -> training_pb2.GroupFormed:
    """`newest`: the version that nothing before this group can exceed by more than one update."""
    formed = _about_module(unpack(body, training_pb2.GroupFormed()), group.module_id)
    if formed.generation != group.generation:
        raise ValueError(f"an answer to generation {formed.generation}, not {group.generation}")
    if formed.update > newest.update + 1:
        raise ValueError(f"weights of update {formed.update}, where the newest is {newest.update}")
    formed.peer_lost = one_line(formed.peer_lost, _LONGEST_REASON)
    return formed


def read_evaluation(
    request: training_pb2.Evaluate,
    body: any_pb2.Any,
    agents: Collection[str],
    is_module: Callable[[str], bool],
) -> training_pb2.Evaluation:
    """`agents`, `is_module`: as of `read_receipt`."""
    # Another module may play an agent in each episode.
    played = request.episodes * len(agents)
    most = min((1 << 10) + 16 * request.episodes + _OF_AGENT * played, MAX_MESSAGE_BYTES)
    evaluation = unpack(body, training_pb2.Evaluation(), most, _FEW + played)
    if not evaluation.episode_returns:
        raise ValueError("an evaluation without an episode")
    returns, lengths = evaluation.episode_returns, evaluation.episode_lengths
    _check_returns(returns, lengths, request.episodes)
    _check_agent_returns(evaluation.agent_returns, agents, is_module, len(returns))
    return evaluation


def _check_version(version: Version, newest: Version) -> None:
    # Runners would wait for such weights, and in vain.
    if version.generation > newest.generation or version.update > newest.update + 1:
        raise ValueError(f"weights of {version}, where the newest can be one after {newest}")


def _check_returns(returns: Collection[float], lengths: Collection[int], most: int) -> None:
    if len(returns) != len(lengths):
        raise ValueError("another number of returns than of lengths")
    if len(returns) > most:
        raise ValueError(f"{len(returns)} episodes, where there can be {most}")
    if not all(map(math.isfinite, returns)):
        raise ValueError("a return that is not finite")


def _check_agent_returns(
    told: Iterable[training_pb2.AgentReturns],
    agents: Collection[str],
    is_module: Callable[[str], bool],
    most: int,
) -> None:
    for each in told:
        if each.agent not in agents:
            raise ValueError(f"returns of {each.agent[:100]!r}, which is no agent of this run")
        if not is_module(each.module_id):  # metrics would have one more with each such name
            raise ValueError(f"returns of {each.module_id[:100]!r}, which is no module of this run")
        if len(each.returns) > most:
            raise ValueError(f"{len(each.returns)} returns of an agent in {most} episodes")
        if not all(map(math.isfinite, each.returns)):
            raise ValueError("a return that is not finite")


def _check_infos(infos: Collection[training_pb2.InfoNumber]) -> None:
    if len(infos) > MOST_NUMBERS:
        raise ValueError(f"{len(infos)} numbers of infos: at most {MOST_NUMBERS}")
    for number in infos:
        _check_name("a number of infos", number.name)
        episodes = {len(number.mean), len(number.least), len(number.most)}
        if len(episodes) > 1 or max(episodes) > MOST_EPISODES:
            raise ValueError(
                f"numbers of infos of {sorted(episodes)} episodes: at most {MOST_EPISODES}"
            )
        for values in (number.mean, number.least, number.most):
            if not all(map(math.isfinite, values)):
                raise ValueError(f"the number {number.name!r} of infos is not finite")


def _check_numbers(what: str, numbers: Mapping[str, float], known: Collection[str]) -> None:
    for name, value in numbers.items():
        if name not in known:
            raise ValueError(f"{what} of {name[:100]!r}: known are {', '.join(sorted(known))}")
        _check_number(what, name, value)


def _check_number(what: str, name: str, value: float) -> None:
    if not 0 <= value <= _MOST_NUMBER:
        raise ValueError(f"{name} = {value} in the {what}")


def _check_name(what: str, name: str) -> None:
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise ValueError(f"{what} needs a printable name of at most {_LONGEST_NAME} characters")
