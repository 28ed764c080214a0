"""EnvRunners whose batches do not get to a learner that is here."""

from __future__ import annotations

import time

from juggler.runtime.actors.hub_events import Worker

#: A learner that is gone is missed by EnvRunners before the driver knows; it is told by then.
_GRACE_SECONDS = 5.0
_AGAIN_SECONDS = 60.0


class UnreachedLearners:
    """Whom to tell people of: such an EnvRunner makes steps that nobody gets, and updates wait."""

    def __init__(self) -> None:
        # By incarnations of both: the generation of the learners' group, when the first batch was
        # lost since one got there or people were told, and whether they were.
        self._since: dict[tuple[str, str], tuple[int, float, bool]] = {}

    def brought(self, runner: Worker, learner: Worker) -> None:
        """A batch got there."""
        self._since.pop((runner.incarnation, learner.incarnation), None)

    def lost(self, runner: Worker, learner: Worker, generation: int, why: str) -> str:
        """A batch did not get there. Returns what to tell people; "": nothing now.

        Args:
            runner: that made it.
            learner: that it was for.
            generation: of the learners' group; while a new one forms, nobody takes batches.
            why: of the EnvRunner.
        """
        key, now = (runner.incarnation, learner.incarnation), time.monotonic()
        since = self._since.get(key)
        if since is None or since[0] != generation:
            self._since[key] = (generation, now, False)
            return ""
        if now - since[1] < (_AGAIN_SECONDS if since[2] else _GRACE_SECONDS):
            return ""
        self._since[key] = (generation, now, True)
        where = ", ".join(learner.data_addresses)
        return (
            f"batches of {runner.worker_id} on {runner.host} do not reach {learner.worker_id} on "
            f"{learner.host} at {where}: {why}. They are dropped (learner_lost), and updates wait "
            "for that learner. Can the one host reach that address? A learner needs --bind, and "
            "--advertise where it is known by another address; with TLS, its certificate names it"
        )

    def left(self, runner: Worker) -> None:
        """An EnvRunner is gone."""
        for key in [key for key in self._since if key[0] == runner.incarnation]:
            del self._since[key]
