"""Directories for TLS, good ones and bad ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.tls import Tls, read_tls


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
