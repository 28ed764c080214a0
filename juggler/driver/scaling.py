"""More or fewer workers on this host, while a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.events import BeginWithFewer, LearnerLeaves
from juggler.driver.core.group import worker_order
from juggler.driver.learners_here import bytes_of_copies, must_be_alone, must_have_room
from juggler.driver.monitoring import ScaleAsked
from juggler.driver.parts import RunParts
from juggler.driver.workers.learners import PEER_SILENCE_SECONDS
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.wire.v1 import attach_pb2


def scale(parts: RunParts, asked: ScaleAsked) -> None:
    """Have as many workers on this host as somebody asks for, and answer."""
    why = _why_nobody(parts)
    if asked.env_runners:
        why = why or _why_not_these_runners(parts.config)
    if asked.learners:
        why = why or _why_not_these_learners(parts, asked.learners)
    if why:
        asked.answer.set_exception(ValueError(why))
        return
    before = (
        _scale_runners(parts, asked.env_runners) if asked.env_runners else 0,
        _scale_learners(parts, asked.learners) if asked.learners else 0,
    )
    asked.answer.set_result(before)


def _scale_runners(parts: RunParts, wanted: int) -> int:
    attached = parts.registry.attached
    before, leaving = parts.local.scale(ENVRUNNER, wanted)
    for worker_id in leaving:
        if worker_id in attached:
            parts.commands.send(attached[worker_id], attach_pb2.Stop())
        parts.local.end(worker_id, was_told=worker_id in attached)
    _tell(parts, "EnvRunners", wanted, before)
    return before


def _scale_learners(parts: RunParts, wanted: int) -> int:
    if wanted > 1:
        parts.registry.most_learners = max(parts.registry.most_learners, wanted)
        parts.hub.lose_after(LEARNER, PEER_SILENCE_SECONDS)
    before, leaving = parts.local.scale(LEARNER, wanted)
    for worker_id in leaving:
        learner = parts.registry.attached.get(worker_id)
        if learner is None:
            parts.local.end(worker_id, was_told=False)
            continue
        parts.happened(LearnerLeaves(worker_id, learner.incarnation))
        parts.leaving_learners.add(learner)
    if wanted < parts.config.driver.learners:  # nobody is to wait for the others
        for module_id, module in parts.core.modules.items():
            if module.missing_learners:
                parts.happened(BeginWithFewer(module_id))
    _tell(parts, "learners", wanted, before)
    return before


def _tell(parts: RunParts, what: str, wanted: int, before: int) -> None:
    if wanted != before:
        text = f"{what}: {wanted} are wanted now, in place of {before}"
        parts.progress.message(text, "info")


def _why_nobody(parts: RunParts) -> str:
    """Why no worker of this run can come or go, or ""."""
    if parts.end.reached:
        return "the run is ending"
    if not parts.only_local:
        return (
            "the workers of this run dial in: start or end them where they are; a run of `juggler "
            "launch` is scaled where it was launched"
        )
    if parts.config.driver.synchronous:
        return "a synchronous run has the same workers in each turn: resume it with more or fewer"
    return ""


def _why_not_these_runners(config: RunConfig) -> str:
    """Why no EnvRunner can come or go, or ""."""
    if config.env_runner.dataset:
        return "EnvRunners that play a data set share it out when the run begins"
    if config.env_runner.gateway:
        return "simulators dial the gateway of this run, of which there is one"
    return ""


def _why_not_these_learners(parts: RunParts, wanted: int) -> str:
    """Why the run cannot go on with so many learners, or ""."""
    config = parts.config
    for what, has in (
        ("num_learners in its tables of modules", config.agents.own_learners),
        ("modules that share parts", config.agents.shared),
        ("a league", config.agents.league),
    ):
        if has:
            return f"a run with {what} keeps its learners: resume it with more or fewer"
    if wanted > (most := config.driver.max_learners):
        return f"{wanted} learners: must be at most max_learners = {most}"
    hosts = Counter(
        module_id
        for worker_id in parts.local.wanted(LEARNER, wanted)
        for module_id in parts.registry.modules_of(worker_order(worker_id)[1])
    )
    try:
        must_be_alone(config, hosts)
        _must_fit(parts, parts.local.wanted(LEARNER, wanted))
    except ConfigError as error:
        return str(error)
    if orphans := [each for each in parts.core.modules if each not in hosts]:
        return (
            f"nobody would train module {orphans[0]!r}: modules stay with the learner processes "
            "that they began with, so that there must be more of them"
        )
    return ""


def _must_fit(parts: RunParts, learners: Sequence[str]) -> None:
    """
    Args:
        parts: of the run.
        learners: worker ids of those that are wanted.

    Raises:
        ConfigError: what they keep does not fit into this host's memory.
    """
    registry, driver, vitals = parts.registry, parts.config.driver, parts.hub.vitals()
    if all(map(parts.local.is_up, learners)):
        return  # nobody comes
    sizes, taken, kept_by = [], 0.0, dict[str, float]()
    for worker_id in learners:
        _, index = worker_order(worker_id)
        device = driver.device_name(index)
        kept = {
            each: float(registry.kept_bytes.get((device, each), 0))
            for each in registry.modules_of(index)
        }
        kept_by |= kept
        sizes.append(sum(kept.values()))
        if worker_id in vitals:  # at most: the process has other memory, too
            taken += min(sizes[-1], vitals[worker_id].resident_bytes)
    must_have_room(sizes, taken, bytes_of_copies(parts.config, kept_by))
