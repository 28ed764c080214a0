"""How a run ends: why, what is still waited for, and the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from juggler.driver.core.events import Finish, StopRequested
from juggler.driver.loop import Loop
from juggler.driver.parts import RunParts
from juggler.driver.record.run_directory import RunDirectory, RunDirectoryError
from juggler.driver.record.wording import IN_PYTHON, resuming
from juggler.driver.script_classes import is_of_a_script
from juggler.driver.signals import REASONS, way_out
from juggler.driver.upkeep import Upkeep
from juggler.envrunner.program import ENVRUNNER
from juggler.learner.process.program import LEARNER
from juggler.runtime.actors.hub import Hub

#: What the end of a run may take: usually less than the 5 s that people wait after a Ctrl-C. A
#: large last checkpoint takes up to 40 s, recordings up to 30 s, and trackers up to two minutes.
_LAST_UPDATES_SECONDS = 1.0
_SILENCE_SECONDS = 2.5  # of learners whose state is waited for; they say something every second
_LEAVE_SECONDS = 0.5
_RECORDING_SECONDS = 30.0  # for EnvRunners that still write what they have recorded
#: A large state takes longer, and is worth it: containers are given a minute to end.
_LAST_CHECKPOINT_SECONDS = 40.0
_TELL_SECONDS = 2.0  # until people are told what is waited for

#: Reasons to stop for which nobody has to have learned anything.
_IN_PART = ("stop_steps", "stop_seconds")


class Ending:
    """Winds a run down, and closes its books.

    Args:
        parts: of the run.
        loop: hears what comes meanwhile.
        upkeep: writes the last line of metrics.
        hub: knows which learners still say something.
        directory: where the summary goes.
    """

    def __init__(
        self, parts: RunParts, loop: Loop, upkeep: Upkeep, hub: Hub, directory: RunDirectory
    ) -> None:
        self._parts = parts
        self._loop = loop
        self._upkeep = upkeep
        self._hub = hub
        self._directory = directory
        self._command = "train" if parts.only_local else "driver"
        if is_of_a_script(parts.config):
            self._command = IN_PYTHON
        self._last_line: dict[str, Any] | None = None
        self._told_of_waiting = False  # for the last checkpoint
        self._hung = ""  # where all environments were stuck as the run was to end

    @property
    def leave_seconds(self) -> float:
        """How long workers of this host may take to end in order."""
        recorded = self._parts.config.env_runner.record
        return _RECORDING_SECONDS if recorded else _LEAVE_SECONDS

    def wind_down(self) -> None:
        """Let updates end, make the last checkpoint, and send everybody home."""
        parts, snapshots = self._parts, self._parts.snapshots
        self._hung = self._upkeep.standstill.hung_runners(self._hub.vitals())
        parts.happened(StopRequested())
        self._loop.drain(_LAST_UPDATES_SECONDS, lambda: parts.core.idle)
        self._wait_for_snapshot(time.monotonic() + _LAST_CHECKPOINT_SECONDS)
        self._wait_for_confirmation()
        deadline = time.monotonic() + _LAST_CHECKPOINT_SECONDS
        self._wait_for_snapshot(deadline)
        if parts.confirmation.kept is not None:
            if problem := snapshots.keep(parts.confirmation.kept):
                parts.progress.message(problem, "error")
            elif snapshots.newest:
                parts.callbacks.checkpoint(snapshots.newest)
        elif parts.core.updates and not self._has_saved() and parts.checkpointing.begin():
            self._wait_for_snapshot(deadline)
        parts.evaluations.give_up()
        self._see_what_failed()
        parts.happened(Finish())
        self._last_line = self._upkeep.write_line()
        parts.callbacks.tell()
        # One that leaves at once would be replaced while another still takes its time.
        parts.local.stop_restarting()
        parts.commands.dismiss_all()
        self._loop.drain(_LEAVE_SECONDS, lambda: not parts.registry.attached)

    def _wait_for_confirmation(self) -> None:
        """A run that has made its last step may have solved its task with it."""
        parts, confirmation = self._parts, self._parts.confirmation
        if parts.end.reason == "stop_steps":
            confirmation.look()
            if confirmation.under_way and parts.only_local:
                parts.local.start_evaluators()  # the run may have ended with its first update
            patience = parts.config.driver.worker_timeout_seconds
            confirmation.wait(self._loop.drain, self._seconds_left(), patience)
            if confirmation.outcome is not None:
                parts.end.solved_after_all()
        confirmation.give_up()

    def _seconds_left(self) -> float:
        limit = self._parts.config.driver.stop_seconds
        return math.inf if limit is None else limit - self._parts.clock.now().training

    def _wait_for_snapshot(self, deadline: float) -> None:
        drain: Callable[[float, Callable[[], bool]], None] = self._loop.drain
        drain(_TELL_SECONDS, self._no_snapshot_comes)
        if not self._no_snapshot_comes():
            self._tell_of_waiting()
            drain(deadline - time.monotonic(), self._no_snapshot_comes)

    def _tell_of_waiting(self) -> None:
        """Once: there may be several snapshots to wait for."""
        if not self._told_of_waiting:
            self._told_of_waiting = True
            was_signalled = self._parts.end.reason in REASONS.values()
            presses = "a second Ctrl-C" if was_signalled else "Ctrl-C twice"
            how = way_out(f"{presses} leaves without it")
            self._parts.progress.message(f"waiting for the last checkpoint{how}", "info")

    def _no_snapshot_comes(self) -> bool:
        """None is under way, or the learners that it should come from say nothing more."""
        snapshots = self._parts.snapshots
        if snapshots.writing or not snapshots.under_way:
            return not snapshots.under_way
        learners = [each for name, each in self._hub.vitals().items() if name.startswith(LEARNER)]
        return all(each.seconds_silent > _SILENCE_SECONDS for each in learners)

    def _has_saved(self) -> bool:
        """Whether a synchronous run has a checkpoint of its last update: taken between two turns,
        as no other could be now."""
        synchronous = self._parts.config.driver.synchronous
        return synchronous and self._newest_update() == self._parts.core.updates

    def _newest(self) -> Path | None:
        """The newest checkpoint, unless somebody has removed it."""
        newest = self._parts.snapshots.newest
        return newest if newest and newest.is_dir() else None

    def _newest_update(self) -> int | None:
        newest = self._newest()
        return int(newest.stem) if newest else None

    def _see_what_failed(self) -> None:
        """A run that trained on nothing, or has no checkpoint of its end, did not end well."""
        parts, end = self._parts, self._parts.end
        last = (parts.confirmation.outcome or {}).get("update", parts.core.updates)
        if end.reason == "stop_seconds" and not parts.core.has_updated:
            end.failed_at(f"nothing was trained on. {self._upkeep.standstill.what_is_there()}")
        elif end.reason in _IN_PART and parts.local.keep_failing(ENVRUNNER):
            end.failed_at(
                f"it got to {end.reason}, but {parts.config.env_runner.env} kept failing in every "
                f"EnvRunner: {parts.departures.last_failure or parts.departures.last_exit}"
            )
        elif end.reason == "stop_seconds" and self._hung:
            end.failed_at(
                f"it got to stop_seconds, but {parts.config.env_runner.env} hung in every "
                f"EnvRunner: {self._hung}"
            )
        elif last and self._newest_update() != last:
            end.failed_at(f"the last checkpoint, of update {last}, was not written")

    def close_books(self) -> dict[str, Any]:
        """Write the summary. Also for a loop that was left in its middle."""
        parts = self._parts
        if self._last_line is None:
            parts.happened(Finish())
            self._last_line = self._upkeep.write_line()
        newest = self._newest()
        summary = {
            **self._last_line,
            "startup_time": self._last_line["wall_time"] - self._last_line["training_time"],
            "solved": parts.end.solved_at is not None,
            "confirmation": parts.confirmation.outcome,
            "last_restart": parts.metrics.workers.last_restart or None,
            "wall_seconds_to_first_update": self._loop.first_update,
            "wall_seconds_to_solved": parts.end.solved_at,
            "reason_for_stop": parts.end.reason or "killed",
            "failure": parts.end.failure or None,
            "run_dir": str(self._directory.path),
            "command": self._command,
            "checkpoint": str(newest) if newest else None,
            "best": parts.evaluations.best.summary,
        }
        try:
            self._directory.write_summary(summary)
        except RunDirectoryError as error:
            parts.progress.message(str(error), "error")
        parts.progress.finish(summary)
        self._directory.close()
        return summary

    def how_to_go_on(self) -> str:
        """For people, behind the text of a failure. A resumed run that made no update has failed
        at what it would do again, so nothing is said."""
        update = self._newest_update()
        if not self._parts.core.has_updated:
            return ""
        if update is None:
            return "\nThere is no checkpoint to go on from"
        return f"\nTo go on from update {update}: {resuming(self._directory.path, self._command)}"
