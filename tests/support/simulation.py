"""Processes in simulated time, with asyncio and threads in turn.

The package's modules see this instead of `time`, `threading` and queues. One thread runs at a time,
and only until it waits, so its seed decides a history.
"""

from __future__ import annotations

import _thread
import asyncio
import heapq
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc

from juggler.runtime.actors import hub
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.calls import CallEnd
from juggler.runtime.wire.v1 import attach_pb2


class Violation(AssertionError):
    """What must hold does not."""


class Killed(BaseException):
    """Ends a thread of a process that was killed."""


@dataclass(eq=False)
class Process:
    """A process. While it stands still, what comes is held.

    Attributes:
        reads: it takes what comes, and not only alarms.
        excuses: why the driver may lose it.
    """

    name: str
    alive: bool = True
    stopped: bool = False
    reads: bool = True
    held: list[Callable[[], object]] = field(default_factory=list)
    excuses: list[str] = field(default_factory=list)


class _Thread:
    def __init__(self, process: Process, work: Callable[[], object]) -> None:
        self.process, self.work = process, work
        self.baton = threading.Lock()
        self.baton.acquire()
        self.ready: Callable[[], object] = lambda: True
        self.deadline = 0.0
        self.started = self.ended = False


# Seconds, far from any real clock: a real time that slips in shows at once.
STARTED = 1e7

_active: Simulation | None = None


def active() -> Simulation:
    """The simulation that modules live in now."""
    assert _active is not None
    return _active


class Simulation:
    """
    Args:
        seed: of all that is drawn.

    Attributes:
        now: seconds of a clock that only goes forward.
        wall: what the clock on the wall shows more than that.
        current: the process that runs.
        errors: of any thread.
    """

    def __init__(self, seed: int) -> None:
        self.random, self.now, self.wall = Random(seed), STARTED, 1e9
        self.errors: list[BaseException] = []
        self.loops: list[SimulatedLoop] = []
        self.current: Process | None = None
        self._heap: list[tuple[float, int, Process | None, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._main = _Thread(Process("the test"), lambda: None)
        self._main.started = True
        self._threads = [self._main]  # that have not ended
        self._running: _Thread | None = self._main

    def at(self, delay: float, work: Callable[[], object], process: Process | None = None) -> None:
        """Do this later, as this process."""
        entry = (self.now + max(0.0, delay), next(self._numbers), process, work)
        heapq.heappush(self._heap, entry)

    def thread(self, work: Callable[[], object], process: Process | None = None) -> _Thread:
        """Start a thread of this process, or of the one that calls."""
        owner = process or self.current
        assert owner is not None
        thread = _Thread(owner, work)
        self._threads.append(thread)
        return thread

    def run(self, seconds: float, done: Callable[[], object] = lambda: False) -> bool:
        """Let time pass until something holds."""
        found = self.wait(lambda: self.errors or done(), seconds)
        if self.errors:
            raise self.errors[0]
        return found

    def stop(self, process: Process) -> None:
        """Let a process stand still."""
        process.stopped = True

    def resume(self, process: Process) -> None:
        """Read waiting messages at once, or after the due alarms."""
        process.stopped, held, process.held = False, process.held, []
        process.reads = self.random.random() < 0.5
        for work in held:
            self._do(process, work)
        if not process.reads:
            self.at(0.0001, partial(self._read, process))

    def _read(self, process: Process) -> None:
        process.reads, held, process.held = True, process.held, []
        for work in held:
            self._do(process, work)

    def kill(self, process: Process) -> None:
        process.alive, process.stopped = False, False

    def wait(self, ready: Callable[[], object], timeout: float | None) -> bool:
        """Let others run until something holds, in the thread that calls."""
        thread = self._running
        if thread is None:
            if timeout != 0 and not ready():
                raise Violation("what must not wait waits")
            return bool(ready())
        if not thread.process.alive:
            raise Killed
        if timeout is None or timeout > 0:
            thread.ready, thread.deadline = ready, 1e12
            if timeout is not None and timeout < 1e8:
                thread.deadline = self.now + timeout
                self.at(timeout, _nothing)
            self._hand_over(thread)
            if not thread.process.alive:
                raise Killed
        return bool(ready())

    def close(self) -> None:
        """End all threads and tasks."""
        for thread in self._threads[1:]:
            self.kill(thread.process)
        self.wait(lambda: len(self._threads) == 1, 1e9)
        for loop in self.loops:
            loop.close_tasks()

    def _do(self, process: Process | None, work: Callable[[], object]) -> None:
        if process is not None:
            if process.stopped or not (process.reads or isinstance(work, Alarm)):
                process.held.append(work)
                return
            if not process.alive:
                return
        self.call(process, work)

    def call(self, process: Process | None, work: Callable[[], object]) -> None:
        """Do this now, as this process. It must not wait."""
        before, self.current, running, self._running = self.current, process, self._running, None
        try:
            work()
        except BaseException as error:
            self.errors.append(error)
        self.current, self._running = before, running

    def _hand_over(self, thread: _Thread) -> None:
        """Let the next thread run, until it is this one's turn."""
        following = self._following()
        if following is not thread:
            self._begin(following)
            thread.baton.acquire()
        self.current, self._running = thread.process, thread

    def _begin(self, thread: _Thread) -> None:
        if thread.started:
            thread.baton.release()
        else:
            thread.started = True
            _thread.start_new_thread(self._live, (thread,))

    def _following(self) -> _Thread:
        """Let time pass until a thread can run."""
        while True:
            while sum(loop.run_ready() for loop in self.loops):
                pass
            able = [each for each in self._threads if self._can_run(each)]
            if able:
                return able[0] if len(able) == 1 else self.random.choice(able)
            self.now, _, process, work = heapq.heappop(self._heap)
            self._do(process, work)

    def _can_run(self, thread: _Thread) -> bool:
        process = thread.process
        if not process.alive:
            return True
        return not process.stopped and (thread.deadline <= self.now or bool(thread.ready()))

    def _live(self, thread: _Thread) -> None:
        self.current, self._running = thread.process, thread
        try:
            if thread.process.alive:
                thread.work()
        except Killed:
            pass
        except BaseException as error:
            if thread.process.alive:
                self.errors.append(error)
        thread.ended = True
        self._threads.remove(thread)
        self._begin(self._following())


def _nothing() -> None:
    """Only time passes."""


class Alarm(partial[None]):
    """An event of a clock, not of a socket."""


class SimulatedLoop(asyncio.AbstractEventLoop):
    """A loop of asyncio in simulated time, of one process."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        self._simulation, self._process = simulation, process
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        simulation.loops.append(self)

    def run_ready(self) -> bool:
        """Run what is ready. False: nothing was."""
        if not self._ready or self._process.stopped:
            return False
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    self._simulation.call(self._process, handle._run)
        finally:
            asyncio._set_running_loop(None)
        return True

    def close_tasks(self) -> None:
        self._process.alive = self._process.reads = True
        self._process.stopped = False
        for _ in range(5):  # a task may wait for another one
            for task in self._tasks:
                task.cancel()
            self.run_ready()

    def time(self) -> float:
        return self._simulation.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        alarm = Alarm(self._ready.append, handle)
        self._simulation.at(when - self.time(), alarm, self._process)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._simulation.errors.append(context.get("exception") or Violation(context["message"]))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


# What the package's modules see instead of the standard library.


class _Lock:
    """Does nothing: a thread runs until it waits."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Condition(_Lock):
    def notify(self, n: int = 1) -> None:
        pass

    notify_all = notify

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        return active().wait(predicate, timeout)


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return active().wait(self.is_set, timeout)


class _StartedThread:
    def __init__(self, target: Any, args: Any = (), name: str = "", daemon: bool = True) -> None:
        self._work = partial(target, *args)
        self._thread: _Thread | None = None

    def start(self) -> None:
        self._thread = active().thread(self._work)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.ended

    def join(self, timeout: float | None = None) -> None:
        active().wait(lambda: not self.is_alive(), timeout)


class _Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self, timeout: float | None = None) -> Any:
        if not active().wait(lambda: self._items, timeout):
            raise Empty
        return self._items.popleft()


class _Pool:
    def __init__(self, workers: int, name: str = "") -> None:
        self._futures: list[Future[Any]] = []

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        _wait(self._futures, None)

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._futures.append(future)
        active().thread(run)
        return future


def _wait(futures: list[Future[Any]], timeout: float | None) -> Any:
    active().wait(lambda: all(each.done() for each in futures), timeout)
    return SimpleNamespace(not_done=[each for each in futures if not each.done()])


_TIME = SimpleNamespace(
    monotonic=lambda: active().now,
    perf_counter=lambda: active().now,
    time=lambda: active().now + active().wall,
    process_time=lambda: 0.0,
    sleep=lambda seconds: active().wait(lambda: False, seconds),
)
_THREADING = SimpleNamespace(
    Thread=_StartedThread,
    Event=_Event,
    Condition=_Condition,
    Lock=_Lock,
    get_ident=lambda: id(active()._running),
    enumerate=list,
    TIMEOUT_MAX=1e9,
)
_INSTEAD = [
    ("time", time, _TIME),
    ("threading", threading, _THREADING),
    ("SimpleQueue", SimpleQueue, _Queue),
    ("ThreadPoolExecutor", ThreadPoolExecutor, _Pool),
    ("wait", wait, _wait),
]


@contextmanager
def simulated_modules() -> Iterator[None]:
    """All modules of the package that are imported live in simulated time."""
    changed = []
    for name, module in list(sys.modules.items()):
        if name.startswith("juggler.") and module is not None:
            for attribute, real, instead in _INSTEAD:
                if vars(module).get(attribute) is real:
                    setattr(module, attribute, instead)
                    changed.append((module, attribute, real))
    try:
        yield
    finally:
        for module, attribute, real in changed:
            setattr(module, attribute, real)


@contextmanager
def simulated(simulation: Simulation) -> Iterator[Simulation]:
    """The simulation that modules live in."""
    global _active
    assert _active is None
    _active = simulation
    try:
        yield simulation
    finally:
        try:
            simulation.close()
        finally:
            _active = None


# -- workers, and the streams between them and the hub ---------------------------------------------


BY_PROCESS: dict[int, Worker] = {}  # by process


def me(simulation: Simulation) -> Worker:
    """The worker whose thread calls."""
    return BY_PROCESS[id(simulation.current)]


class Worker:
    """A process of a worker, and what it needs of the world."""

    role = ""

    def __init__(self, world: Any, role: str, index: int) -> None:
        self.world, self.role, self.index = world, role, index
        self.worker_id = f"{role}-{index}"
        self.incarnation = f"{world.random.getrandbits(60):x}"
        self.pid = world.random.getrandbits(30)
        self.process = Process(self.worker_id)
        self.line: Line | None = None
        self.senders: list[Any] = []
        self.hangs = False

    def excuse(self, why: str) -> None:
        self.process.excuses.append(why)

    def attach(self, inbox: Any) -> Attachment:
        def connect(*ends: Any) -> Line:
            self.line = Line(self.world, self, *ends)
            return self.line

        return Attachment(
            Contact("simulated", self.index, local=True),
            self.role,
            inbox,
            incarnation=self.incarnation,
            data_addresses=(f"unix:{self.incarnation}",),
            connect=connect,
        )

    def run(self) -> str:
        raise NotImplementedError

    def gone(self) -> None:
        """The process has ended."""


class Line:
    """The stream between a worker and the hub: both ends."""

    local = known = True

    def __init__(
        self,
        world: Any,
        worker: Worker,
        next_message: Callable[[], bytes | None],
        received: Callable[[bytes], None],
        ended: Callable[[CallEnd], None],
    ) -> None:
        self._world, self._worker = world, worker
        self._next, self._received, self._ended = next_message, received, ended
        self._sending = False
        self._over = {"up": False, "down": False}
        self._last = {"up": 0.0, "down": 0.0}  # when the last message arrives
        self._inbox: deque[bytes] = deque()
        self._waiter: Any = None
        self._end = CallEnd("", grpc.StatusCode.OK, ())
        self._task: Any = None
        world.lines.append(self)
        self._carry("up", self._open)

    def _carry(self, way: str, work: Callable[[], None]) -> None:
        """Have something arrive, behind what went this way before."""
        simulation = self._world.simulation
        arrives = simulation.now + self._world.latency(self._worker)
        self._last[way] = max(self._last[way], arrives)
        process = self._world.driver if way == "up" else self._worker.process

        def arrive() -> None:
            if not self._over[way]:
                work()

        simulation.at(self._last[way] - simulation.now, arrive, process)

    # The worker's end.

    def wake(self) -> None:
        if not self._sending and self._worker.process.alive:
            self._sending = True
            self._world.simulation.at(0.0005, self._leave, self._worker.process)

    def _leave(self) -> None:
        message = self._next()
        if message is None:
            self._sending = False
            return
        self._carry("up", partial(self._hear, message))
        if self._world.random.random() < self._world.history.duplicates:
            said = attach_pb2.FromWorker.FromString(message)
            if not said.HasField("hello") and not said.HasField("farewell"):
                self._carry("up", partial(self._hear, message))
        self._world.simulation.at(0.0005, self._leave, self._worker.process)

    def close(self) -> None:
        if not self._over["down"]:
            self.is_gone()
            closed = CallEnd("closed", grpc.StatusCode.CANCELLED, ())
            self._world.simulation.at(0.0, partial(self._ended, closed), self._worker.process)
            self._over["down"] = True

    def is_gone(self) -> None:
        """The worker's process or its channel is."""
        self._carry("up", self._cancel)

    def break_off(self) -> None:
        """Both ends notice; what was on its way is lost."""
        self._over["up"] = True
        broken = CallEnd("the connection broke", grpc.StatusCode.UNAVAILABLE, ())
        if not self._over["down"]:
            self._over["down"] = True
            delay = self._world.latency(self._worker)
            simulation = self._world.simulation
            simulation.at(delay, partial(self._ended, broken), self._worker.process)
            simulation.at(delay, self._cancel, self._world.driver)

    # The hub's end.

    def _open(self) -> None:
        loop = self._world.asyncio_loop
        self._task = loop.create_task(self._world.hub.serve(self))
        self._task.add_done_callback(lambda _: self._served())

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _hear(self, message: bytes) -> None:
        self._inbox.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> bytes | None:
        while not self._inbox:
            self._waiter = self._world.asyncio_loop.create_future()
            await self._waiter
        return self._inbox.popleft()

    async def send(self, message: attach_pb2.ToWorker) -> None:
        self._carry("down", partial(self._received, message.SerializeToString()))

    def end(self, why: str, reason: str = "", code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        metadata = ((hub.REASON_KEY, reason.encode()),) if reason else ()
        self._end = CallEnd(why, code, metadata)

    def _served(self) -> None:
        self._world.lines.remove(self)

        def ended() -> None:
            self._over["down"] = True
            self._ended(self._end)

        if not self._over["down"]:
            self._carry("down", ended)

    def ping(self) -> None:
        """End connections without timely answers to pings, as gRPC does."""
        if self._task is None or self._task.done():
            return
        options = dict(hub.WATCHFUL_SERVER_OPTIONS)
        patience = float(options["grpc.http2.ping_timeout_ms"]) / 1000
        answered: list[bool] = []
        self._carry("down", lambda: self._carry("up", lambda: answered.append(True)))

        def look() -> None:
            if not answered and not self._over["up"]:
                self.break_off()

        self._world.simulation.at(patience, Alarm(look), self._world.driver)
