"""More or fewer EnvRunners, while a run goes on."""

from __future__ import annotations

from juggler.driver.monitoring import ScaleAsked
from juggler.driver.parts import RunParts
from juggler.runtime.wire.v1 import attach_pb2


def scale(parts: RunParts, asked: ScaleAsked) -> None:
    """Have as many EnvRunners on this host as somebody asks for, and answer."""
    if why := _why_not(parts):
        asked.answer.set_exception(ValueError(why))
        return
    attached = parts.registry.attached
    before, leaving = parts.local.scale(asked.env_runners, attached)
    for worker_id in leaving:
        parts.commands.send(attached[worker_id], attach_pb2.Stop())
    if before != asked.env_runners:
        text = f"EnvRunners: {asked.env_runners} are wanted now, in place of {before}"
        parts.progress.message(text, "info")
    asked.answer.set_result(before)


def _why_not(parts: RunParts) -> str:
    """Why nobody can scale this run, or ""."""
    if not parts.only_local:
        return (
            "the workers of this run dial in: start or end them where they are; a run of `juggler "
            "launch` is scaled where it was launched"
        )
    if parts.config.driver.synchronous:
        return "a synchronous run waits for the same EnvRunners in each turn: resume it with more"
    if parts.config.env_runner.dataset:
        return "EnvRunners that play a data set share it out when the run begins"
    if parts.config.env_runner.gateway:
        return "simulators dial the gateway of this run, of which there is one"
    return ""
