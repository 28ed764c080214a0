"""Serves the page about a run while it trains, in a process of its own that only reads files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from juggler.driver.callbacks import Callback, MetricsLine, Run
from juggler.driver.watching.serving import serve_page
from juggler.runtime.actors.credentials import read_token
from juggler.runtime.actors.endpoints import EndpointError

_END_SECONDS = 3.0
_NICER = 5  # than the run
_MOST_SAID = 1 << 16  # bytes


class PageBeside(Callback):
    """Starts the process and ends it. Whatever becomes of the page, the run goes on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._told = False

    def on_start(self, run: Run) -> None:
        # The modules of this process, wherever they are from.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(run.run_dir)],
                stdin=subprocess.PIPE,  # which closes when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            run.message(f"the page cannot be served: {error}", "warning")
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        if self._process is None:
            return
        self._hear(self._process)
        if not self._told and b"\n" in self._said:
            self._told = True
            run.message(self._said.partition(b"\n")[0].decode(errors="replace"))
        if self._process.poll() is not None:
            last = self._said.strip().rpartition(b"\n")[2].decode(errors="replace")
            run.message(f"the page is no longer served: {last}", "warning")
            self._close(self._process)

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        if self._process is not None:
            self._close(self._process)

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while said := process.stdout.read(_MOST_SAID):
            self._said = (self._said + said)[-_MOST_SAID:]

    def _close(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(run_dir: str) -> int:
    """Serve until the process that has started this one ends, or says so."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the run decides when it ends
    os.nice(_NICER)
    try:
        with serve_page([Path(run_dir)], token=(token := read_token(None))) as address:
            print(f"page: {address}{', which asks for the token' if token else ''}", flush=True)
            sys.stdin.buffer.read()
    except (EndpointError, ValueError) as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
