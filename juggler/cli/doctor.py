"""`juggler doctor`: says what works on this machine, and what to do where something does not."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.driver.record.wording import quantity
from juggler.runtime.actors.resources import usable_cores, usable_memory
from juggler.runtime.installing import installing

State = Literal["ok", "absent", "warning", "problem"]
_MIB, _GIB = 1 << 20, 1 << 30
_TORCH_SECONDS = 120.0
_SLOW_TORCH_SECONDS = 15.0
_GRPC_SECONDS = 20.0
_FEW_FILES = 4096
_PORT = 5005  # of `juggler driver`
_GPUS = Path("/proc/driver/nvidia/gpus")

#: Prints the version of torch, its build, and its GPUs, one in a line.
_TORCH = """
import torch
print(torch.__version__, torch.version.cuda or torch.version.hip or "")
torch.ones(8).sum().item()
for i in range(torch.cuda.device_count()):
    torch.ones(8, device=i).sum().item()
    print(torch.cuda.get_device_name(i))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of `juggler doctor`.

    Attributes:
        name: what was looked at.
        state: "absent" is no fault: it is not needed unless somebody wants it.
        said: what was found.
        advice: what to do; "" if there is nothing.
    """

    name: str
    state: State
    said: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Look at everything, one after the other. What raises is a problem of its own."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            yield Finding(name, "problem", f"cannot be checked: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    where = f"{platform.python_version()}, {sys.executable}"
    bits = sys.maxsize > 1 << 32
    if sys.version_info < (3, 11) or not bits:
        yield Finding("python", "problem", where, "install Python 3.11 or newer, of 64 bits")
    else:
        yield Finding("python", "ok", where)


def _juggler() -> Iterator[Finding]:
    yield Finding("juggler", "ok", f"{metadata.version('juggler')}, {Path(__file__).parents[1]}")


def _torch() -> Iterator[Finding]:
    """In a process of its own, which may hang or crash where a driver is broken."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_TORCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        said = f"`import torch` and a sum have not ended in {_TORCH_SECONDS:.0f} s"
        yield Finding("torch", "problem", said, "look at the disk that it is on, and at the GPU")
        return
    seconds = time.monotonic() - began
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding("torch", "problem", last, f"{sys.executable} -m pip install torch")
        return
    head, *gpus = done.stdout.splitlines()
    version, _, build = head.partition(" ")
    yield Finding("torch", "ok", f"{version}, built for {f'CUDA {build}' if build else 'the CPU'}")
    yield from _gpus(gpus, build)
    slow = seconds > _SLOW_TORCH_SECONDS
    yield Finding(
        "import torch",
        "warning" if slow else "ok",
        f"{seconds:.1f} s",
        "every run starts with it: move the environment to a local disk" if slow else "",
    )


def _gpus(seen: list[str], build: str) -> Iterator[Finding]:
    on_host = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    if seen:
        yield Finding("GPU", "ok", ", ".join(seen))
    elif not on_host:
        yield Finding("GPU", "absent", "none: learners compute on the CPU")
    elif not build:
        advice = "pip install --force-reinstall torch, without the index for the CPU"
        yield Finding("GPU", "warning", f"{on_host} there, but this torch has no CUDA", advice)
    else:
        advice = "compare the driver in nvidia-smi with torch's CUDA, and CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "warning", f"{on_host} there, and torch sees none", advice)


def _cores() -> Iterator[Finding]:
    cores, there = usable_cores(), os.cpu_count() or 1
    of = "" if cores == there else f" of {there}"
    said = f"{cores:g}{of}, for EnvRunners and learners"
    if cores < 2:
        yield Finding("cores", "warning", said, "a run needs two at least to be fast")
    else:
        yield Finding("cores", "ok", said)


def _memory() -> Iterator[Finding]:
    free = usable_memory()
    if free is None:
        yield Finding("memory", "absent", "the system does not say how much is free")
        return
    said = f"{free / _GIB:.1f} GiB free"
    if free < 2 * _GIB:
        yield Finding("memory", "warning", said, "each process of a run takes some 300 MiB")
    else:
        yield Finding("memory", "ok", said)


def _shared_memory() -> Iterator[Finding]:
    from juggler.runtime.streams.shared_memory import Memory

    try:
        Memory(_MIB).close()
    except OSError as error:
        advice = "large batches and weights go through sockets, which takes longer"
        yield Finding("files in memory", "warning", f"{error.strerror}", advice)
    place = Path("/dev/shm")
    if not place.is_dir():
        advice = "mount it, or leave out vectorize = async"
        yield Finding("shared memory", "warning", "there is no /dev/shm", advice)
        return
    free = shutil.disk_usage(place).free
    said = f"/dev/shm has {free / _MIB:.0f} MiB free"
    if free < 32 * _MIB or not os.access(place, os.W_OK):
        advice = "environments with vectorize = async need it: in docker, --shm-size=1g"
        yield Finding("shared memory", "warning", said, advice)
    else:
        yield Finding("shared memory", "ok", said)


def _open_files() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    said = "without limit" if unlimited else f"{hard} at once"
    if not unlimited and hard < _FEW_FILES:
        advice = "enough for some hundred EnvRunners; for more, raise the limit (ulimit -Hn)"
        yield Finding("open files", "warning", said, advice)
    else:
        yield Finding("open files", "ok", said)


def _processes() -> Iterator[Finding]:
    """What processes of a run need to end together."""
    from juggler.runtime.actors.orphans import process_descriptor

    descriptor = process_descriptor(os.getpid())
    os.close(descriptor)
    code = "from juggler.runtime.actors.orphans import *; die_with_parent(); take_in_orphans()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "" if soft == resource.RLIM_INFINITY else f"; one user may have {soft} of them"
    said = f"those of a run end together{limit}"
    yield Finding("processes", "ok", said)


def _sockets() -> Iterator[Finding]:
    from juggler.runtime.actors.temporary import HeldDirectory

    try:
        directory = HeldDirectory()
    except OSError as error:
        place = tempfile.gettempdir()
        advice = f"make {place} writable, or set TMPDIR to a place that is"
        yield Finding("sockets", "problem", f"no directory for them: {error}", advice)
        return
    try:
        with socket.socket(socket.AF_UNIX) as local:
            local.bind(str(directory.path / "socket"))
            local.listen()
    except OSError as error:
        advice = "set TMPDIR to a local disk, where Unix sockets can be made"
        yield Finding("sockets", "problem", f"{directory.path}: {error}", advice)
    else:
        yield Finding("sockets", "ok", f"in {directory.path.parent}")
    finally:
        directory.remove()


def _gRPC() -> Iterator[Finding]:
    """A stream over loopback there and back, as every worker has one with its driver."""
    import grpc

    from juggler.runtime.actors.endpoints import dial, make_server

    echo: Any = grpc.stream_stream_rpc_method_handler(lambda requests, _: requests)
    handler = grpc.method_handlers_generic_handler("juggler.Doctor", {"Echo": echo})
    server = make_server(1)
    server.add_generic_rpc_handlers((handler,))
    message = os.urandom(_MIB)
    began = time.monotonic()
    try:
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with dial(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream("/juggler.Doctor/Echo")
            back = next(iter(call(iter([message]), timeout=_GRPC_SECONDS, wait_for_ready=True)))
    except (grpc.RpcError, RuntimeError) as error:
        code = error.code().name if isinstance(error, grpc.Call) else str(error)
        advice = "look for a firewall or a proxy on loopback: unset http_proxy, set no_proxy=*"
        yield Finding("gRPC", "problem", f"no stream over 127.0.0.1: {code}", advice)
        return
    finally:
        server.stop(None)
    assert back == message
    milliseconds = 1e3 * (time.monotonic() - began)
    yield Finding(
        "gRPC", "ok", f"{grpc.__version__}, 1 MiB there and back in {milliseconds:.0f} ms"
    )


def _ports() -> Iterator[Finding]:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", _PORT))
        except OSError as error:
            advice = "give `juggler driver` another one: --bind 127.0.0.1:5006"
            yield Finding("ports", "warning", f"{_PORT} is taken: {error.strerror}", advice)
        else:
            yield Finding("ports", "ok", f"{_PORT}, of `juggler driver`, is free")


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        advice = "go to another directory, or give --run-dir"
        yield Finding("disk", "warning", f"{here} cannot be written: {error.strerror}", advice)
        return
    free = shutil.disk_usage(here).free
    said = f"{quantity(free / _GIB)} GiB free in {here}"
    advice = "checkpoints with a replay are large: give --run-dir elsewhere"
    yield Finding("disk", "warning", said, advice) if free < _GIB else Finding("disk", "ok", said)


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "")
    if found:
        yield Finding("compiler", "ok", f"{found}, for compile = true")
    else:
        advice = "for compile = true: apt-get install g++"
        yield Finding("compiler", "absent", "no C++ compiler", advice)


def _extras() -> Iterator[Finding]:
    """For each extra, whether all that it brings is there."""
    wanted: dict[str, list[str]] = {}
    for requirement in metadata.requires("juggler") or ():
        needs, _, marker = requirement.partition(";")
        match = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if match and _is_for_this_python(marker):
            wanted.setdefault(match[1], []).append(re.split(r"[^\w.-]", needs.strip())[0])
    for extra, packages in sorted(wanted.items()):
        if extra == "dev":
            continue
        versions = {name: _version(name) for name in packages}
        missing = [name for name in packages if not versions[name]]
        if not missing:
            said = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Finding(f"extra {extra}", "ok", said)
        else:
            said = f"without {', '.join(missing)}"
            yield Finding(f"extra {extra}", "absent", said, installing(extra))


def _is_for_this_python(marker: str) -> bool:
    """Whether the condition of a requirement, of ours, leaves it to this version of Python."""
    found = re.search(r"python_version\s*(<|>=)\s*['\"]3\.(\d+)['\"]", marker)
    return found is None or (sys.version_info >= (3, int(found[2]))) == (found[1] == ">=")


def _version(package: str) -> str:
    """Of an installed package; "" if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python,
    _juggler,
    _torch,
    _cores,
    _memory,
    _shared_memory,
    _open_files,
    _processes,
    _sockets,
    _gRPC,
    _ports,
    _disk,
    _compiler,
    _extras,
)


_MARKS = {"ok": "ok", "absent": "-", "warning": "warning", "problem": "problem"}
_COLOURS = {"ok": "32", "absent": "2", "warning": "33", "problem": "31"}


@dataclass(kw_only=True)
class Arguments:
    """Say what works on this machine, and what to do where something does not. A dash marks what is
    only needed by who wants it. Exits with 1 if there is a problem."""

    json: Flag = False
    """Print a list of objects for programs, with `name`, `state`, `said` and `advice`."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "doctor")
    return report_errors("doctor", lambda: _look(given))


def _look(given: Arguments) -> int:
    found: list[Finding] = []
    for each in findings():
        found.append(each)
        if not given.json:
            _print(each)
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return _status(found)
    counts = {state: sum(each.state == state for each in found) for state in _MARKS}
    print()
    if not counts["problem"]:
        said = "To begin: juggler train cartpole"
        print(said if not counts["warning"] else f"{said} (see the warnings above)")
    else:
        print("Runs may not work here: see the problems above.")
    return _status(found)


def _status(found: Sequence[Finding]) -> int:
    return 1 if any(each.state == "problem" for each in found) else 0


def _print(found: Finding) -> None:
    mark = f"{_MARKS[found.state]:<8}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        mark = f"\x1b[{_COLOURS[found.state]}m{mark}\x1b[0m"
    print(f"{mark} {found.name:<16} {found.said}", flush=True)
    if found.advice:
        print(f"{'':<25} → {found.advice}")
