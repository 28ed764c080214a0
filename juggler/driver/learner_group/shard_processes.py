"""The processes of a LearnerGroup: one a shard, on this host, kept alive."""

from __future__ import annotations

import secrets
from typing import Any

from juggler.learner.process.program import SHARD, LearnerProgram
from juggler.runtime.actors.hub import Hub, HubSettings
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.processes import (
    WorkerProgram,
    let_go_of_forkserver,
    share_forkserver,
)
from juggler.runtime.actors.requests import RequestPool
from juggler.runtime.actors.supervisor import RestartPolicy, Supervisor
from juggler.runtime.actors.temporary import HeldDirectory
from juggler.runtime.actors.worker import Contact


class ShardProcesses:
    """Starts shards, and carries what is said to them and by them.

    Attributes:
        pool: the commands in flight.
        run: the token, and the id of the run.
    """

    def __init__(self, events: Mailbox[Any], hang_seconds: float) -> None:
        """To be called in a thread that outlives the processes: they die with it.

        Args:
            events: takes what happens.
            hang_seconds: a shard that makes no progress for so long is killed.
        """
        self.run = secrets.token_hex(16), secrets.token_hex(6)
        token, run_id = self.run
        self._directory = HeldDirectory()
        self._address = f"unix:{self._directory.path / 'driver.sock'}"
        settings = HubSettings(
            run_id=run_id, roles=(SHARD,), token=token, hang_seconds=hang_seconds
        )
        self.hub = Hub(settings, events)
        self.pool = RequestPool(self.hub, cap=1 << 16)
        self._supervisor = Supervisor(events)
        share_forkserver()
        try:
            self.hub.start([self._address])
        except BaseException:
            self.close(grace=0.0)
            raise

    def start(self, shard: int) -> None:
        """Start this shard, and start it again whenever it dies."""
        contact = Contact(
            address=self._address,
            index=shard,
            token=self.run[0],
            run_id=self.run[1],
            local=True,
            socket_dir=str(self._directory.path),
        )
        program = WorkerProgram(
            "juggler.learner.process.shard_worker:main", LearnerProgram(contact)
        )
        self._supervisor.add(f"{SHARD}-{shard}", program, RestartPolicy())

    def of_use(self, worker_id: str) -> None:
        """It did what it is for: its failures count from zero again."""
        self._supervisor.of_use(worker_id)

    def kill(self, worker_id: str, pid: int, after: float) -> None:
        """See to it that this process is gone after so many seconds."""
        self._supervisor.kill(worker_id, pid, after)

    def close(self, grace: float) -> None:
        """End them all, after so many seconds at most."""
        self._supervisor.close(grace)
        self.hub.close()
        let_go_of_forkserver()
        self._directory.remove()
