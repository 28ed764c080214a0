"""The driver's books in a checkpoint, and what must hold of them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from juggler.driver.core.events import DROP_REASONS
from juggler.driver.core.ledger import Counters, LedgerError
from juggler.driver.core.state import Past
from juggler.driver.record.episode_returns import RETURN_WINDOW
from juggler.driver.record.metrics import Metrics
from juggler.driver.record.module_metrics import AgentMetrics, ModuleMetrics
from juggler.driver.run_clock import Times
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError
from juggler.runtime.episodes.version import Version

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Returns = Annotated[list[float], msgspec.Meta(max_length=RETURN_WINDOW)]
_Lengths = Annotated[list[_Count], msgspec.Meta(max_length=RETURN_WINDOW)]


@dataclass(frozen=True, slots=True)
class _SavedCandidates:
    """What `Candidates` has; older checkpoints have none."""

    refused: _Count = 0
    not_before: _Count = 0


@dataclass(frozen=True, slots=True)
class _Books:
    """The books of a module, or of all of them together."""

    sampled: _Count
    trained: _Count
    dropped: dict[Literal[*DROP_REASONS], _Count]  # type: ignore[valid-type]
    in_flight: _Count
    lost_unreported: _Count

    @property
    def counters(self) -> Counters:
        return Counters(
            self.sampled, self.trained, self.dropped, self.in_flight, self.lost_unreported
        )


@dataclass(frozen=True, slots=True)
class _Past(_Books):
    """The books of modules that are not trained any more, and the sums of their versions."""

    version: tuple[_Count, _Count]

    @property
    def past(self) -> Past:
        return Past(self.counters, Version(*self.version))


@dataclass(frozen=True, slots=True)
class _OfAgent:
    """The episodes in which an agent acted."""

    episodes: _Count
    returns: _Returns


@dataclass(frozen=True, slots=True)
class _OfModule(_OfAgent):
    """The episodes of the agents that a module plays."""

    lengths: _Lengths


@dataclass(frozen=True, slots=True)
class _Saved(_Books):
    """The driver's share of a checkpoint, as `counters_of` makes it."""

    next_id: _Count
    wall_time: Annotated[float, msgspec.Meta(ge=0)]
    episodes: _Count
    returns: _Returns
    lengths: _Lengths
    training_time: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # older ones have none
    candidates: _SavedCandidates = field(default_factory=_SavedCandidates)
    by_module: dict[str, _OfModule] = field(default_factory=dict)  # with several agents
    by_agent: dict[str, _OfAgent] = field(default_factory=dict)  # likewise
    played: dict[str, _Count] = field(default_factory=dict)  # by modules that are not trained
    league: dict[str, Any] = field(default_factory=dict)  # see `League.to_state`
    copies: dict[str, str] = field(default_factory=dict)  # digests of the league's copies, by id
    resets: dict[str, _Count] = field(default_factory=dict)  # see `league_players.RESETS`
    values: dict[str, dict[str, float | None]] = field(default_factory=dict)  # see `ChangedValues`
    past: _Past | None = None  # where modules have come and gone


def must_be_sound(checkpoint: Checkpoint) -> None:
    """Check that a run can continue from what a driver, or somebody else, has written there.

    Raises:
        CheckpointError: it cannot; says why.
    """
    path = checkpoint.path or Path()
    try:
        saved = msgspec.convert(checkpoint.counters, _Saved)
        saved.counters.check()
        past = [saved.past.counters] if saved.past else []
        for books in past:
            books.check()
    except (msgspec.ValidationError, LedgerError) as error:
        raise CheckpointError(path, f"its counters cannot be those of a run: {error}") from None
    _modules_must_be_sound(checkpoint, saved.counters, past)
    for key in ("wall_time", "training_time"):
        if not math.isfinite(value := getattr(saved, key)):
            raise CheckpointError(path, f"its counters have {key} = {value}")
    _episodes_must_be_sound(path, saved)


def _episodes_must_be_sound(path: Path, saved: _Saved) -> None:
    """
    Raises:
        CheckpointError: there are more returns than episodes that have ended, or other lengths.
    """
    ended: list[_Saved | _OfModule] = [saved, *saved.by_module.values()]
    for each in ended:
        if len(each.returns) != len(each.lengths) or len(each.returns) > each.episodes:
            raise CheckpointError(
                path,
                f"its counters have {len(each.returns)} returns and {len(each.lengths)} lengths of "
                f"{each.episodes} episodes",
            )
    for of_agent in saved.by_agent.values():
        if len(of_agent.returns) > of_agent.episodes:
            raise CheckpointError(
                path,
                f"its counters have {len(of_agent.returns)} returns of {of_agent.episodes} "
                "episodes of an agent",
            )


def _modules_must_be_sound(
    checkpoint: Checkpoint, together: Counters, past: Iterable[Counters]
) -> None:
    """
    Raises:
        CheckpointError: the books of a module are not sound, or those of all do not add up.
    """
    path, books = checkpoint.path or Path(), list(past)
    for module_id in checkpoint.module_ids:
        try:
            books.append(msgspec.convert(checkpoint.counters_of(module_id), _Books).counters)
            books[-1].check()
        except (msgspec.ValidationError, LedgerError) as error:
            raise CheckpointError(
                path, f"the counters of module {module_id!r} cannot be those of a run: {error}"
            ) from None
    added = Counters.sum(books)
    if added != Counters.sum([together]):
        raise CheckpointError(
            path, f"the counters of its modules add up to {added}, and its own are {together}"
        )


def books_of(counters: Counters) -> dict[str, Any]:
    """Books as a checkpoint has them."""
    return {**asdict(counters), "dropped": dict(counters.dropped)}


def counters_of(
    books: Iterable[Counters], past: Past, next_id: int, metrics: Metrics, times: Times
) -> dict[str, Any]:
    """The driver's share of a checkpoint.

    Args:
        books: of each module, as they were when its state was cut.
        past: of modules whose states are not there.
        next_id: of the core.
        metrics: of the run.
        times: of the run.
    """
    before = {**books_of(past.counters), "version": past.version}
    return {
        **books_of(Counters.sum([*books, past.counters])),
        **({"past": before} if past != Past() else {}),
        "next_id": next_id,
        "wall_time": times.wall,
        "training_time": times.training,
        **_ended(metrics),
        "lengths": list(metrics.lengths),
        "by_module": {
            name: {**_ended(each), "lengths": list(each.lengths)}
            for name, each in metrics.by_module.items()
            if each.episodes
        },
        "by_agent": {name: _ended(each) for name, each in metrics.by_agent.items()},
        "candidates": asdict(metrics.candidates),
        "played": {name: each.played for name, each in metrics.by_module.items() if each.played},
    }


def _ended(of: Metrics | ModuleMetrics | AgentMetrics) -> dict[str, Any]:
    return {"episodes": of.episodes, "returns": list(of.returns)}


def books_in(checkpoint: Checkpoint, module_id: str) -> Counters:
    """The books of a module as a sound checkpoint has them."""
    return msgspec.convert(checkpoint.counters_of(module_id), _Books).counters


def past_in(checkpoint: Checkpoint, trained: Container[str]) -> Past:
    """What modules did, as a sound checkpoint has it, that are not among those trained now."""
    saved = msgspec.convert(checkpoint.counters, _Saved).past
    past = saved.past if saved else Past()
    for module_id in checkpoint.modules:
        if module_id not in trained:
            version = Version(*checkpoint.version_of(module_id))
            past = past.and_of(books_in(checkpoint, module_id), version)
    return past
