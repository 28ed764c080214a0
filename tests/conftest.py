"""What tests of several rooms share."""

from __future__ import annotations

import gc
import os
import platform
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.changes import HeldLoop, newer_threads_end

# As `make test` has it: threads of several processes that wait for each other on a few cores can
# take minutes for a moment's work. Before torch is imported, and for all that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As Juggler has it, for tests that import gRPC before Juggler: gRPC's fork handlers have ended what
# tests start.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A shell that starts tests in the background makes them ignore Ctrl-C, and so what they start, too.
# nohup makes them ignore SIGHUP.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# h5py asks for it when it is imported, which starts a process the first time.
platform.processor()

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Nearly all that is imported and collected stays until the end. To look through it for garbage
# again and again takes a quarter of the time of collecting, and then some time of every test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of real runs more time for busy machines."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in ("slow", "long")):
            continue
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
        if "[public" in item.name:  # the transport that fast tests of streams go through, too
            item.add_marker(pytest.mark.long)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each file from two on, slowest first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"seconds by file, {sum(seconds.values()):.0f} in all")
    for file, taken in seconds.most_common():
        if taken >= 2:
            terminalreporter.write_line(f"{taken:8.1f}  {file}")


#: Modules that may sleep in tests of the gate, as nothing tells them of what they wait for: names
#: and locks of other processes, and torch's stores and devices.
_MAY_SLEEP = {"host_weights.py", "torch_peers.py"}
_PATCH = pytest.StashKey[pytest.MonkeyPatch]()
_started: list[str] = []  # processes, by the test that runs
_slept: list[str] = []  # where


def _noted(begin: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        _started.append(repr(args[1:] or args))
        return begin(*args, **kwargs)

    return noted


def _noted_sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    caller = sys._getframe(1)
    path = Path(caller.f_code.co_filename)
    if path.name not in _MAY_SLEEP:
        _slept.append(f"{path}:{caller.f_lineno}")
    sleep(seconds)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Watch tests of the gate, with all of their fixtures."""
    patch = item.stash[_PATCH] = pytest.MonkeyPatch()
    if not any(item.get_closest_marker(tier) for tier in ("slow", "long")):
        patch.setattr(subprocess.Popen, "__init__", _noted(subprocess.Popen.__init__))
        patch.setattr(BaseProcess, "start", _noted(BaseProcess.start))
        patch.setattr(os, "posix_spawn", _noted(os.posix_spawn))
        patch.setattr(time, "sleep", _noted_sleep)
        if (hub := sys.modules.get("juggler.runtime.actors.hub")) is not None:
            patch.setattr(hub, "new_event_loop", HeldLoop)
    _started.clear()
    _slept.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail tests of the gate that start a process or sleep."""
    try:
        yield
    finally:
        item.stash[_PATCH].undo()
    assert not _started, f"a test that starts a process must be marked slow: {_started}"
    assert not _slept, f"a test of the gate waits for an event, and does not sleep: {_slept}"


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run a Python program in a temporary directory; return its output."""

    def run(*arguments: str | Path, timeout: float = 300) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change to the test's directory; forget its modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which commands put the directory into
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture
def run_shortly(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_tmp_path: None,
    local_workers: None,
) -> Callable[..., str]:
    """Run scripts in this process, with short runs; return their output."""
    import juggler

    begins = {name: getattr(juggler, name) for name in ("train", "resume")}

    def cut(begin: Callable[..., Any], **limits: Any) -> Callable[..., Any]:
        return lambda *args, **keys: begin(*args, **{**keys, **limits})

    def run(*scripts: Path, stop_steps: int = 1) -> str:
        for name, begin in begins.items():
            monkeypatch.setattr(juggler, name, cut(begin, stop_steps=stop_steps))
        for script in scripts:
            runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Any]:
    """Makes batches of random episodes: see `support.batches.make_batch`."""
    # Here, as it imports NumPy, which OMP_NUM_THREADS has to be set before.
    from support.batches import make_batch

    return make_batch


@pytest.fixture(scope="session")
def _kept_forkserver() -> Iterator[None]:
    from juggler.runtime.actors.processes import release_forkserver, share_forkserver

    share_forkserver()
    yield
    release_forkserver()


@pytest.fixture
def one_forkserver(_kept_forkserver: None) -> None:
    """For workers that are processes: what a forkserver imports takes seconds."""
    from support.processes import have_jugglers_forkserver

    have_jugglers_forkserver()


@pytest.fixture
def local_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run local workers as threads; in slow tests, as processes."""
    if any(request.node.get_closest_marker(tier) for tier in ("slow", "long")):
        request.getfixturevalue("one_forkserver")
        yield
        return
    from support.processes import workers_in_threads

    with workers_in_threads():
        yield


@pytest.fixture(scope="module")
def workers_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's shared workers as threads; as processes for slow tests."""
    from support.processes import have_jugglers_forkserver, workers_in_threads

    here = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("slow") for item in here):
        request.getfixturevalue("_kept_forkserver")
        have_jugglers_forkserver()
        yield
        return
    with workers_in_threads():
        yield


@pytest.fixture
def every_thread_ends() -> Iterator[None]:
    """Threads that a test starts end soon after it."""
    before = {*threading.enumerate()}
    yield
    newer_threads_end(before)
