"""A hub on a Unix socket, with workers of this process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox
from juggler.runtime.actors.tls import Tls, read_tls
from support.changes import HeldLoop


class World:
    """A hub, what it says, and the attachments made to it."""

    def __init__(self, directory: Path) -> None:
        self.events: Mailbox[Any] = Mailbox()
        self.seen: list[Any] = []
        self.address = f"unix:{directory / 'hub.sock'}"
        self._attachments: list[Attachment] = []
        self.hub: Hub

    def start(self, **settings: Any) -> None:
        settings = {"run_id": "run", "roles": ("worker", "other"), **settings}
        self.loop = HeldLoop()
        self.hub = Hub(HubSettings(**settings), self.events, self.loop)
        _, self.tcp_address = self.hub.start([self.address, "127.0.0.1:0"])

    def attach(self, role: str = "worker", index: int = -1, **options: Any) -> Attachment:
        inbox: Mailbox[Any] = options.pop("inbox", Mailbox())
        own = {name: options.pop(name) for name in ("incarnation", "devices") if name in options}
        contact = Contact(self.address, index, **options)
        attachment = Attachment(contact, role, inbox, **own)
        self._attachments.append(attachment)
        return attachment

    def wait_for(self, kind: type, seconds: float = 90.0) -> Any:
        """The next event of a kind; earlier others are kept in `seen`."""
        return self.wait_until(lambda event: isinstance(event, kind), seconds)

    def wait_until(self, wanted: Callable[[Any], bool], seconds: float = 90.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for index, event in enumerate(self.seen):
                if wanted(event):
                    return self.seen.pop(index)
            self.seen.extend(self.events.gather(deadline - time.monotonic()))
        raise AssertionError(f"it did not come within {seconds} s; came: {self.seen}")

    def close(self) -> None:
        for attachment in self._attachments:
            attachment.close()
        if hasattr(self, "hub"):
            self.hub.close()


def make(directory: Path, *hosts: str, days: float = 1.0) -> Tls:
    make_certificates(directory, hosts, days)
    tls = read_tls(str(directory))
    assert tls is not None
    return tls


def mixed(directory: Path, **sources: Path) -> Path:
    """A directory with files of others: `ca=...`, `cert=...`, `key=...`."""
    directory.mkdir()
    for name, source in sources.items():
        shutil.copy(source / f"{name}.pem", directory)
    return directory
