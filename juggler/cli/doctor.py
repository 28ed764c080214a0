"""`juggler doctor`: reports what works on this machine, and what does not."""

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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import tyro

from juggler.cli.arguments import Flag, command
from juggler.cli.findings import Finding, State, judged, print_finding, status_of
from juggler.driver.reporting.wording import quantity
from juggler.runtime.actors.resources import usable_cores, usable_memory
from juggler.runtime.install_commands import installing

_MIB, _GIB = 1 << 20, 1 << 30
_TORCH_SECONDS = 120.0
_SLOW_TORCH_SECONDS = 15.0
_GRPC_SECONDS = 20.0
_FEW_FILES = 4096
_PORT = 5005  # of `juggler driver`
_GPUS = Path("/proc/driver/nvidia/gpus")

#: Prints torch's version, its build, and its GPUs, one per line.
_TORCH = """
import torch
print(torch.__version__, torch.version.cuda or torch.version.hip or "")
torch.ones(8).sum().item()
for i in range(torch.cuda.device_count()):
    torch.ones(8, device=i).sum().item()
    print(torch.cuda.get_device_name(i))
"""


def findings() -> Iterator[Finding]:
    """Run all checks; an exception is reported as a problem."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            yield Finding(name, "problem", f"cannot be checked: {type(error).__name__}: {error}")


def _tried(
    name: str, work: Callable[[], str], advice: str, state: State = "warning"
) -> Iterator[Finding]:
    """Yield the result of this work, or its error."""
    try:
        yield Finding(name, "ok", work())
    except OSError as error:
        yield Finding(name, state, error.strerror or str(error), advice)


def _python() -> Iterator[Finding]:
    where = f"{platform.python_version()}, {sys.executable}"
    yield judged("python", sys.maxsize > 1 << 32, where, "install a Python of 64 bits", "problem")
    yield Finding("juggler", "ok", f"{metadata.version('juggler')}, {Path(__file__).parents[1]}")


def _torch() -> Iterator[Finding]:
    """Check torch in a separate process, which may hang or crash."""
    began = time.monotonic()
    program = [sys.executable, "-c", _TORCH]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=_TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"`import torch` and a sum have not ended in {_TORCH_SECONDS:.0f} s"
        yield Finding("torch", "problem", text, "check its disk, and the GPU")
        return
    seconds = time.monotonic() - began
    # Of a traceback, the last line has the reason; a crash leaves only its status.
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding("torch", "problem", last, f"{sys.executable} -m pip install torch")
        return
    head, *gpus = done.stdout.splitlines()
    version, _, build = head.partition(" ")
    yield Finding("torch", "ok", f"{version}, built for {f'CUDA {build}' if build else 'the CPU'}")
    yield from _gpus(gpus, build)
    advice = "every run starts with it: move the environment to a local disk"
    yield judged("import torch", seconds <= _SLOW_TORCH_SECONDS, f"{seconds:.1f} s", advice)


def _gpus(seen: list[str], build: str) -> Iterator[Finding]:
    on_host = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    if seen:
        yield Finding("GPU", "ok", ", ".join(seen))
    elif not on_host:
        yield Finding("GPU", "absent", "none: learners compute on the CPU")
    elif not build:
        advice = "pip install --force-reinstall torch, without the index for the CPU"
        yield Finding("GPU", "warning", f"{on_host} found, but this torch has no CUDA", advice)
    else:
        advice = "compare the driver in nvidia-smi with torch's CUDA, and CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "warning", f"{on_host} found, but torch sees none", advice)


def _cores() -> Iterator[Finding]:
    cores, there = usable_cores(), os.cpu_count() or 1
    of = "" if cores == there else f" of {there}"
    text = f"{cores:g}{of}, for EnvRunners and learners"
    yield judged("cores", cores >= 2, text, "a run needs at least two to be fast")
    free = usable_memory()
    text = "the free memory is unknown" if free is None else f"{free / _GIB:.1f} GiB free"
    advice = "each process of a run takes some 300 MiB"
    yield judged("memory", free is None or free >= 2 * _GIB, text, advice)


def _shared_memory() -> Iterator[Finding]:
    from juggler.runtime.streams.shared_memory import SharedMemory

    def in_memory() -> str:
        SharedMemory(_MIB).close()
        return "large batches and weights use them"

    def free_memory() -> str:
        free = shutil.disk_usage("/dev/shm").free
        if free < 32 * _MIB or not os.access("/dev/shm", os.W_OK):
            raise OSError(f"/dev/shm has {free / _MIB:.0f} MiB free, or cannot be written")
        return f"/dev/shm has {free / _MIB:.0f} MiB free"

    advice = "large batches and weights use sockets, which takes longer"
    yield from _tried("files in memory", in_memory, advice)
    advice = "environments with vectorize = async need it: mount it, or in docker, --shm-size=1g"
    yield from _tried("shared memory", free_memory, advice)


def _open_files() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    text = "without limit" if unlimited else f"{hard} at once"
    advice = "enough for a few hundred EnvRunners; for more, raise the limit (ulimit -Hn)"
    yield judged("open files", unlimited or hard >= _FEW_FILES, text, advice)


def _processes() -> Iterator[Finding]:
    """Check that processes of a run can end together."""
    from juggler.runtime.actors.processes import process_descriptor

    descriptor = process_descriptor(os.getpid())
    os.close(descriptor)
    code = "from juggler.runtime.actors.processes import *; die_with_parent(); adopt_orphans()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "" if soft == resource.RLIM_INFINITY else f"; one user may have {soft} of them"
    yield Finding("processes", "ok", f"processes of a run end together{limit}")


def _sockets() -> Iterator[Finding]:
    from juggler.runtime.actors import temporary

    # Some network file systems hold files, and no sockets.
    def listen() -> str:
        directory = temporary.HeldDirectory()
        with ExitStack() as undo:
            undo.callback(directory.remove)
            local = undo.enter_context(socket.socket(socket.AF_UNIX))
            local.bind(str(directory.path / "socket"))
            local.listen()
        return f"in {directory.path.parent}"

    advice = f"make {tempfile.gettempdir()} writable, or set TMPDIR to a local disk"
    yield from _tried("sockets", listen, advice, "problem")


def _gRPC() -> Iterator[Finding]:
    """Check a stream over loopback, as between workers and drivers."""
    import grpc

    from juggler.runtime.actors.endpoints import dial, make_server

    def echo() -> str:
        echo: Any = grpc.stream_stream_rpc_method_handler(lambda requests, _: requests)
        handler = grpc.method_handlers_generic_handler("juggler.Doctor", {"Echo": echo})
        server = make_server(1)
        server.add_generic_rpc_handlers((handler,))
        # As large as weights are, so that a slow loopback shows.
        message = os.urandom(_MIB)
        began = time.monotonic()
        try:
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            with dial(f"127.0.0.1:{port}") as channel:
                call: Any = channel.stream_stream("/juggler.Doctor/Echo")
                back = next(iter(call(iter([message]), timeout=_GRPC_SECONDS, wait_for_ready=True)))
        except (grpc.RpcError, RuntimeError) as error:
            # gRPC's own text is long, and names its source files.
            code = error.code().name if isinstance(error, grpc.Call) else str(error)
            raise OSError(f"no stream over 127.0.0.1: {code}") from error
        finally:
            server.stop(None)
        assert back == message
        took = f"{1e3 * (time.monotonic() - began):.0f} ms"
        return f"{grpc.__version__}, 1 MiB there and back in {took}"

    # A proxy or a firewall may interfere, even on loopback.
    advice = "look for a firewall or a proxy on loopback: unset http_proxy, set no_proxy=*"
    yield from _tried("gRPC", echo, advice, "problem")


def _ports() -> Iterator[Finding]:
    def bind() -> str:
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", _PORT))
        return f"{_PORT}, of `juggler driver`, is free"

    advice = f"give `juggler driver` another port than {_PORT}: --bind 127.0.0.1:5006"
    yield from _tried("ports", bind, advice)


def _disk() -> Iterator[Finding]:
    def write() -> str:
        with tempfile.TemporaryFile(dir="."):
            free = shutil.disk_usage(".").free
        if free < _GIB:
            raise OSError(f"only {quantity(free / _GIB)} GiB free in {Path.cwd()}")
        return f"{quantity(free / _GIB)} GiB free in {Path.cwd()}"

    advice = "change to another directory, or give --run-dir: checkpoints with a replay are large"
    yield from _tried("disk", write, advice)


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "")
    text = f"{found}, for compile = true" if found else "no C++ compiler"
    advice = "for compile = true: apt-get install g++"
    yield judged("compiler", bool(found), text, advice, "absent")


def _extras() -> Iterator[Finding]:
    """Check for each extra whether all its packages are installed."""
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
        there = ", ".join(f"{name} {version}" for name, version in versions.items())
        text = f"without {', '.join(missing)}" if missing else there
        yield judged(f"extra {extra}", not missing, text, installing(extra), "absent")


def _is_for_this_python(marker: str) -> bool:
    """Return whether a requirement applies to this version of Python."""
    found = re.search(r"python_version\s*(<|>=)\s*['\"]3\.(\d+)['\"]", marker)
    return found is None or (sys.version_info >= (3, int(found[2]))) == (found[1] == ">=")


def _version(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


CHECKS: Final[tuple[Callable[[], Iterator[Finding]], ...]] = (
    _python,
    _torch,
    _cores,
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


@dataclass(kw_only=True)
class Arguments:
    """Report what works on this machine, and how to fix the rest.

    A dash marks optional parts. Exits with 1 if there is a problem.

    With --health it checks a process instead, with --simulator a simulator: see `juggler doctor
    --health --help` and `juggler check-simulator --help`.
    """

    json: Flag = False
    """Print a JSON list of objects with `name`, `state`, `said` and `advice`."""


@dataclass(kw_only=True)
class HealthArguments:
    """Check the health of a process.

    Exits with 0 if it serves, otherwise with 1 and the reason in one line.
    """

    address: tyro.conf.Positional[str] = "127.0.0.1:5005"
    """Address, HOST:PORT or unix:PATH, of a driver, of a learner, or of --health-bind."""

    service: str = ""
    """"readiness", or the name of a service of the process. Default: whether the process is
    alive."""

    tls: str | None = None
    """Directory with ca.pem, cert.pem and key.pem; or set JUGGLER_TLS."""

    timeout: float = 5.0
    """Seconds to wait for the answer."""


def _diagnose(given: Arguments) -> int:
    found: list[Finding] = []
    for each in findings():
        found.append(each)
        if not given.json:
            print_finding(each)
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return status_of(found)
    states = {each.state for each in found}
    warned = " (see the warnings above)" if "warning" in states else ""
    start = f"To start: juggler train cartpole{warned}"
    problem = "Runs may not work here: see the problems above."
    print(f"\n{problem if 'problem' in states else start}")
    return status_of(found)


def _check_health(given: HealthArguments) -> int:
    from juggler.runtime.actors.endpoints import split_address
    from juggler.runtime.actors.health import check_health
    from juggler.runtime.actors.tls import read_tls

    if not given.timeout > 0:
        raise ValueError(f"--timeout {given.timeout:g}: must be above 0")
    if not given.address.startswith("unix:"):
        split_address(given.address)
    problem = check_health(given.address, given.service, read_tls(given.tls), given.timeout)
    of = given.service or "the process"
    print(f"{given.address}: {of} {f'does not serve: {problem}' if problem else 'serves'}")
    return 1 if problem else 0


def _check_simulator(arguments: Sequence[str]) -> int:
    from juggler.cli import check_simulator  # imports torch

    return check_simulator.run(arguments)


_MODES = {
    "--health": command("healthcheck", HealthArguments, _check_health),
    "--simulator": _check_simulator,
}
run = command("doctor", Arguments, _diagnose, _MODES)
