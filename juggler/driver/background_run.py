"""Runs alongside the script that starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from juggler.driver.callbacks import Callback, MetricsLine, Run, checked
from juggler.driver.config import RunConfig
from juggler.driver.result import Result
from juggler.driver.start_run import train
from juggler.runtime.actors.processes import release_forkserver, share_forkserver
from juggler.runtime.importing import must_not_be_imported

_MOST_LINES = 1000  # lines that wait for a reader


class StartedRun:
    """A run in a thread, returned by `juggler.start`.

    If the program ends before the run, the run ends normally, with a last checkpoint.
    """

    def __init__(self, train_with: Callable[[Callback], Result]) -> None:
        """Start training.

        Args:
            train_with: trains with one callback, and returns when the run has ended.
        """
        must_not_be_imported()  # in this thread, as the run has its own
        self._train_with = train_with
        self._follower = _Follower()
        self._result: Future[Result] = Future()
        # The forkserver ends with the thread that starts it, and runs share one. The main thread
        # outlives them all.
        self._shares = threading.current_thread() is threading.main_thread()
        if self._shares:
            share_forkserver()
        self._thread = threading.Thread(target=self._work, name="juggler run")
        self._thread.start()
        try:
            self._follower.begun.wait()
        except BaseException:
            self._follower.stop("interrupted")
            raise
        if self._follower.run is None:
            self._result.result()  # raises errors of the start

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        assert self._follower.run is not None
        return self._follower.run.run_dir

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self._result.done()

    def metrics(self) -> Iterator[MetricsLine]:
        """Yield the lines of metrics until the run ends.

        The first is the newest. The keys are the same as in callbacks. The newest 1000 lines wait
        for a reader.
        """
        return self._follower.lines()

    def stop(self, reason: str = "stopped") -> None:
        """End the run normally, with a last checkpoint.

        This does not wait: `result` does.

        Args:
            reason: the `reason_for_stop` of the summary.

        Raises:
            ValueError: the reason is empty, or one that only the run itself may give.
        """
        self._follower.stop(reason)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Replace a schedule by a number: see `juggler.Run.set`.

        Args:
            key: as in `juggler.Run.set`.
            value: as in `juggler.Run.set`.
            module_id: as in `juggler.Run.set`.

        Raises:
            ValueError: as in `juggler.Run.set`; or the run has ended.
        """
        if not self.running:
            raise ValueError("the run has ended")
        assert self._follower.run is not None
        self._follower.run.set(key, value, module_id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the run has ended.

        Args:
            timeout: in seconds; None: no limit.

        Raises:
            TimeoutError: the run is still running.
            Exception: the exception that `juggler.train` would raise.
        """
        # Not by Thread.join: if interrupted there, Python 3.11 forgets the thread, and so the run.
        if not wait([self._result], timeout).done:
            raise TimeoutError(f"the run in {self.run_dir} is still running after {timeout} s")
        return self._result.result()

    def __repr__(self) -> str:
        state = "is running" if self.running else "has ended: see result()"
        return f"<run in {self.run_dir}, which {state}>"

    def _work(self) -> None:
        result, failure = None, None
        try:
            result = self._train_with(self._follower)
        except BaseException as error:
            failure = error
        try:
            if self._shares:
                release_forkserver()
        finally:
            if result is None:
                self._result.set_exception(failure)
            else:
                self._result.set_result(result)
            self._follower.end_lines()


class _Follower(Callback):
    """Passes events of a run to other threads.

    Attributes:
        begun: the run has its directory, or failed before.
        run: None before it has begun.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.run: Run | None = None
        self._lock = threading.Lock()
        self._stop = ""
        self._over = False
        self._newest: MetricsLine = {}
        self._readers: list[SimpleQueue[MetricsLine | None]] = []

    def stop(self, reason: str) -> None:
        with self._lock:
            run, self._stop = self.run, reason
        if run is not None:
            run.stop(reason)

    def on_start(self, run: Run) -> None:
        with self._lock:
            self.run = run
        if self._stop:  # the caller no longer waits for it
            run.stop(self._stop)
        self.begun.set()

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        with self._lock:
            self._newest = metrics
            for reader in self._readers:
                if reader.qsize() >= _MOST_LINES:
                    with suppress(Empty):  # the reader just took the line
                        reader.get_nowait()
                reader.put(metrics)
        if not threading.main_thread().is_alive():  # the interpreter waits for this thread
            run.stop("program_ended")

    def end_lines(self) -> None:
        """End the lines."""
        with self._lock:
            self._over = True
            for reader in self._readers:
                reader.put(None)
        self.begun.set()

    def lines(self) -> Iterator[MetricsLine]:
        reader: SimpleQueue[MetricsLine | None] = SimpleQueue()
        with self._lock:
            if self._newest:
                reader.put(self._newest)
            if self._over:
                reader.put(None)
            self._readers.append(reader)
        try:
            while (line := reader.get()) is not None:
                yield line
        finally:
            with self._lock:
                self._readers.remove(reader)


def start(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> StartedRun:
    """Train alongside the caller, like `juggler.train` in a thread.

    It returns when the run has its directory and starts its workers. Ctrl-C and SIGTERM stay with
    the program; when the program ends, the run ends normally.

    Args:
        config: as in `train`.
        env: as in `train`.
        module: as in `train`.
        callbacks: as in `train`, but called in the run's thread.
        keys: of the configuration, as in `train`.

    Returns:
        A handle to read metrics, to stop the run and to wait for it.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    listeners = checked(callbacks)
    return StartedRun(
        lambda follower: train(
            config, env=env, module=module, callbacks=(follower, *listeners), **keys
        )
    )
