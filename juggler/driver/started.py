"""Runs beside the script that starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from juggler.driver.callbacks import Callback, MetricsLine, Run, checked
from juggler.driver.config import RunConfig
from juggler.driver.result import Result
from juggler.driver.starting import train
from juggler.runtime.actors.processes import let_go_of_forkserver, share_forkserver
from juggler.runtime.importing import must_not_be_imported

_MOST_LINES = 1000  # that wait for a reader
_ANSWER_SECONDS = 60.0  # for the run to take a number


class StartedRun:
    """A run in a thread, as `juggler.start` returns it.

    When the program ends before the run does, the run ends in order, with a last checkpoint.
    """

    def __init__(self, train_with: Callable[[Callback], Result]) -> None:
        """Begin to train.

        Args:
            train_with: trains with one callback, and returns when the run is over.
        """
        must_not_be_imported()  # in this thread, as the run has one of its own
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
            self._result.result()  # raises what is wrong

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        assert self._follower.run is not None
        return self._follower.run.run_dir

    @property
    def running(self) -> bool:
        """It is not over yet."""
        return not self._result.done()

    def metrics(self) -> Iterator[MetricsLine]:
        """Yield the lines of metrics until the run ends.

        The first is the newest. The keys are the same as in callbacks. The newest 1000 lines wait
        for a reader.
        """
        return self._follower.lines()

    def stop(self, reason: str = "stopped") -> None:
        """End the run in order, with a last checkpoint.

        This does not wait: `result` does.

        Args:
            reason: the `reason_for_stop` of the summary.

        Raises:
            ValueError: this reason is one that only the run itself can have, or it is empty.
        """
        self._follower.stop(reason)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Put a number in the place of a schedule, as `juggler.Run.set` does.

        This waits until the run has taken it, which is usually within a second.

        Args:
            key: as there.
            value: likewise.
            module_id: likewise.

        Raises:
            ValueError: as there; or the run is over.
            TimeoutError: the run has not taken it within a minute. It may still do so.
        """
        asked = self._follower.ask(lambda run: run.set(key, value, module_id))
        if threading.current_thread() is self._thread:  # a callback, for which the run waits
            self._follower.answer()
        if not wait([asked], _ANSWER_SECONDS).done:
            raise TimeoutError(
                f"set({key!r}, {value}): the run in {self.run_dir} has not taken it within "
                f"{_ANSWER_SECONDS:.0f} s: does it make updates?"
            )
        asked.result()

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the run is over.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: the run goes on.
            Exception: what `juggler.train` would raise.
        """
        # Not by Thread.join: interrupted there, Python 3.11 forgets the thread, and so the run.
        if not wait([self._result], timeout).done:
            raise TimeoutError(f"the run in {self.run_dir} goes on after {timeout} s")
        return self._result.result()

    def __repr__(self) -> str:
        state = "goes on" if self.running else "is over: result() tells how it ended"
        return f"<run in {self.run_dir}, which {state}>"

    def _work(self) -> None:
        result, failure = None, None
        try:
            result = self._train_with(self._follower)
        except BaseException as error:
            failure = error
        try:
            if self._shares:
                let_go_of_forkserver()
        finally:
            if result is None:
                self._result.set_exception(failure)
            else:
                self._result.set_result(result)
            self._follower.over()


class _Follower(Callback):
    """Hands what a run says to other threads.

    Attributes:
        begun: the run has its directory, or never will.
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
        self._asked: list[tuple[Callable[[Run], None], Future[None]]] = []

    def stop(self, reason: str) -> None:
        with self._lock:
            run, self._stop = self.run, reason
        if run is not None:
            run.stop(reason)

    def ask(self, what: Callable[[Run], None]) -> Future[None]:
        """Have the thread of the run do something; what comes of it."""
        answer: Future[None] = Future()
        with self._lock:
            if self._over:
                raise ValueError("the run is over")
            self._asked.append((what, answer))
        return answer

    def answer(self) -> None:
        """Do what was asked for. The thread of the run calls this."""
        with self._lock:
            asked, self._asked = self._asked, []
        for what, answer in asked:
            assert self.run is not None
            try:
                what(self.run)
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

    def on_update(self, run: Run, module_id: str, metrics: Mapping[str, float]) -> None:
        self.answer()

    def on_start(self, run: Run) -> None:
        with self._lock:
            self.run = run
        if self._stop:  # it is not waited for any more
            run.stop(self._stop)
        self.begun.set()

    def on_metrics(self, run: Run, metrics: MetricsLine) -> None:
        self.answer()
        with self._lock:
            self._newest = metrics
            for reader in self._readers:
                if reader.qsize() >= _MOST_LINES:
                    with suppress(Empty):  # it reads at this moment
                        reader.get_nowait()
                reader.put(metrics)
        if not threading.main_thread().is_alive():  # the interpreter waits for this thread
            run.stop("program_ended")

    def over(self) -> None:
        """Nothing more comes."""
        with self._lock:
            self._over = True
            for reader in self._readers:
                reader.put(None)
            asked, self._asked = self._asked, []
        for _, answer in asked:
            answer.set_exception(ValueError("the run is over"))
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
    """Train beside the caller, in a thread that does what `juggler.train` does.

    It returns when the run has its directory and starts its workers. Ctrl-C and SIGTERM stay with
    the program; when the program ends, the run ends in order.

    Args:
        config: as in `train`.
        env: likewise.
        module: likewise.
        callbacks: likewise; they are called in the run's thread.
        keys: of the configuration, likewise.

    Returns:
        What metrics are read from, and the run is stopped and awaited with.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    told = checked(callbacks)
    return StartedRun(
        lambda follower: train(config, env=env, module=module, callbacks=(follower, *told), **keys)
    )
