"""`juggler status` and `juggler watch`: show runs in terminal and browser."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from juggler.cli.arguments import AccessArguments, Flag, command, make_console, make_table
from juggler.driver.reporting.wording import (
    LEAGUE_RETURNS,
    clock,
    mean_return,
    number,
    plain,
    quantity,
)

if TYPE_CHECKING:
    from juggler.driver.watching.overview import Overview

#: The status of a run: see `juggler.driver.monitoring.plain_status`.
Status: TypeAlias = Mapping[str, Any]

DEFAULT: Final = "runs"  # directory of runs if none is given
_HINT = f"(default: {DEFAULT})"
_EVERY_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_DAY = 86_400.0
_RUN_STYLES = {
    "running": "cyan",
    "solved": "green",
    "failed": "bold red",
    "killed": "bold red",
    "stopped": "",
}


@dataclass(kw_only=True)
class Arguments(AccessArguments):
    """Show the state of a run, updated every second.

    Shows workers, versions, rates, step counts and recent events, until the run ends or until
    Ctrl-C.

    With --runs, or without a run, lists all runs of a directory: see `juggler status --runs
    --help`.
    """

    where: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DRIVER")]
    """Address of the driver, HOST:PORT; or, on its host, the run directory."""

    once: Flag = False
    """Show the state once and stop."""

    json: Flag = False
    """Print one JSON object per line, with the whole state."""


@dataclass(kw_only=True)
class RunsArguments:
    """List runs, the newest first, with their state.

    For a single run, also list its checkpoints.
    """

    directory: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[STR]", help_behavior_hint=_HINT)
    ] = None
    """Directory of runs, or of a run."""

    json: Flag = False
    """Print one JSON object per run, one per line."""


@dataclass(kw_only=True)
class WatchArguments(AccessArguments):
    """Serve a page about running and finished runs.

    It reads their directories, without affecting the runs. Ctrl-C ends it. The page asks for the
    token, which is required beyond loopback; with --tls, it is served by HTTPS.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(help_behavior_hint=_HINT)
    ] = ()
    """Directories of runs, or runs: several are compared."""

    bind: str | None = None
    """Address to serve at, HOST:PORT. none: 127.0.0.1:7070, or the next free port."""

    insecure: Flag = False
    """Serve beyond loopback without encryption: only on a network that you trust."""


def _show(given: Arguments) -> int:
    console, statuses = make_console(), _statuses(given)
    first = next(statuses)
    is_live = console.is_terminal and not (given.once or given.json)
    live = Live(console=console, auto_refresh=False) if is_live else None
    with suppress(KeyboardInterrupt), live or nullcontext():  # Ctrl-C is the usual way to end it
        for status in [first] if given.once else chain([first], statuses):
            if given.json:
                print(json.dumps(status), flush=True)
            elif live is not None:
                live.update(table(status, console.width), refresh=True)
            else:
                console.print(table(status, console.width))
                sys.stdout.flush()
    return 0


def _statuses(given: Arguments) -> Iterator[Status]:
    """Yield the driver's status, once a second, until it has ended."""
    import grpc

    from juggler.driver.monitoring import ask_status
    from juggler.driver.reporting.run_directory import RunDirectoryError, find_driver, not_running
    from juggler.runtime.actors.credentials import read_token
    from juggler.runtime.actors.endpoints import (
        EndpointError,
        dial,
        no_driver,
        split_address,
        why_not_secure,
    )
    from juggler.runtime.actors.tls import read_tls

    # A directory may have a colon in its name, so it is looked for first.
    run_dir = Path(given.where)
    if not run_dir.is_dir() and ":" not in given.where:
        raise RunDirectoryError(f"{given.where} is neither a directory nor an address HOST:PORT")
    address = find_driver(run_dir) if run_dir.is_dir() else given.where
    if not run_dir.is_dir():
        split_address(address)
    tls = read_tls(given.tls)
    # One channel for all requests: a connection each second would cost a TLS handshake.
    with dial(address, tls) as channel:
        token = read_token(given.token_file, tls)
        for answered in count():
            try:
                yield ask_status(channel, _ANSWER_SECONDS, token)
            except grpc.RpcError as error:
                answer: Any = error
                gone = answer.code() == grpc.StatusCode.UNAVAILABLE
                if gone and answered:
                    return print("the driver has ended", file=sys.stderr)
                # Its address is still in the directory if it was killed.
                if gone and run_dir.is_dir():
                    raise RunDirectoryError(not_running(run_dir)) from None
                if answer.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise EndpointError(no_driver(address)) from None
                why = why_not_secure(address, "driver", tls) if gone else ""
                raise EndpointError(
                    why or f"no status from {address}: {answer.details()}"
                ) from None
            time.sleep(_EVERY_SECONDS)


_WORKER_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "left": "red"}
_LEVELS = {"info": "dim", "warning": "yellow", "error": "red"}
_SILENT_SECONDS = 3.0  # of an attached worker: more than one or two heartbeats
_SHOWN_MESSAGES = 6
_NARROW = 130  # terminal columns
_ONLY_WIDE = ("host", "pid", "incarnation", "device", "memory", "last error")


def table(status: Status, width: int) -> RenderableType:
    """Tabulate the most important facts, in a given number of columns."""
    is_wide = width >= _NARROW
    workers = _workers(status, () if is_wide else _ONLY_WIDE)
    errors = () if is_wide else _last_errors(status)
    return Group(_head(status), _books(status), workers, *errors, *_log_messages(status))


def _head(status: Status) -> Text:
    state = "green" if status["phase"] == "training" else "yellow"
    return Text.assemble(
        ("juggler ", "bold"),
        f"{plain(status['env'])} with {status['algorithm']}, run {status['run_id']}: ",
        (plain(status["phase"]), state),
        f", {clock(status['metrics'].get('wall_time', 0.0))}",
        (f"  {plain(status['run_dir'])}", "dim"),
    )


def _books(status: Status) -> Table:
    line, queues, driver = status["metrics"], status["queues"], status["driver"]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    # The driver is one process with one loop: if it uses nearly one core, it holds up the run.
    rows = {
        **(_metrics(line) if "episodes" in line else {}),
        "queues": f"{queues['requests_in_flight']} requests and {queues['updates_in_flight']} "
        f"updates in flight, {queues['queued_batches']} batches "
        f"({quantity(queues['queued_steps'])} steps) queued",
        # Present only where simulators dial in.
        **_simulators(status),
        "driver": f"{clock(driver['cpu_seconds'])} of CPU, {_memory(driver['resident_bytes'])}; "
        f"{line.get('restarts', 0)} restarts",
    }
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _metrics(line: Mapping[str, Any]) -> dict[str, str]:
    """Return rows about a line of metrics."""
    dropped = dict(sorted(line["env_steps_dropped"].items()))
    lost = line["env_steps_lost_unreported"]
    generation, update = line["weights_version"]
    episodes = f"{line['episodes']:,} episodes"
    return {
        "return": plain(f"{mean_return(line, most=None)} over the last 100 of {episodes}"),
        **_league(line),
        # The steps balance: what was sampled is the sum of what follows it.
        "steps": f"{quantity(line['env_steps_sampled'])} sampled = "
        f"{quantity(line['env_steps_trained'])} trained + {quantity(sum(dropped.values()))} "
        f"dropped + {quantity(line['env_steps_in_flight'])} in flight; "
        f"{quantity(line['steps_per_second'])} steps/s"
        + (f", {quantity(lost)} lost unreported" if lost else ""),
        "dropped": ", ".join(f"{quantity(n)} {reason}" for reason, n in dropped.items())
        or "nothing",
        "weights": f"generation {generation}, update {update:,}; staleness "
        f"{number(line['staleness_mean'])} on average",
    }


def _league(line: Mapping[str, Any]) -> dict[str, str]:
    """Return rows about a league's players, if any."""
    if (league := line.get("league")) is None:
        return {}
    ratings = [f"{plain(name)} {each['elo']:.0f}" for name, each in league["learning"].items()]
    players = f"{league['players']} players, {league['historical']} of them frozen"
    return {"": f"of {LEAGUE_RETURNS}", "league": f"{players}; Elo {', '.join(ratings)}"}


def _simulators(status: Status) -> dict[str, str]:
    """Return a row about simulators at gateways, if there are any gateways."""
    shown = [each["simulators"] for each in status["workers"] if each["simulators"]]
    connected, environments = (
        sum(each[key] for each in shown) for key in ("connected", "environments")
    )
    text = f"{connected:,} connected, with {environments:,} environments"
    return {"simulators": text} if shown else {}


def _workers(status: Status, left_out: Sequence[str]) -> Table:
    found = Table(box=None, padding=(0, 1), header_style="bold")
    rows = [_cells(worker) for worker in sorted(status["workers"], key=_order)]
    titles = [title for title in (rows[0] if rows else ()) if title not in left_out]
    for title in titles:
        found.add_column(title, no_wrap=title != "last error")
    for row in rows:
        found.add_row(*(row[title] for title in titles))
    return found


def _cells(worker: Mapping[str, Any]) -> dict[str, Text | str]:
    """Return the cells of a worker by title, from left to right."""
    version, resources = worker["version"], worker["resources"] or {}
    # A worker that has left is silent for good.
    silence, on_device = worker["seconds_silent"], resources.get("device_bytes", 0)
    silent = worker["state"] in ("ready", "starting") and silence > _SILENT_SECONDS
    return {
        "worker": worker["worker_id"],
        "state": Text(worker["state"], style=_WORKER_STYLES.get(worker["state"], "bold red")),
        "host": plain(worker["host"]),
        "pid": str(worker["pid"] or "-"),
        "incarnation": plain(worker["incarnation"])[:8],
        "device": plain(worker["device"]) or "-",
        # As the driver writes versions in its messages.
        "version": f"{version['generation']}.{version['update']}" if version else "-",
        "steps/s": quantity(worker["steps_per_second"]),
        "silent": Text(clock(silence), style="yellow" if silent else ""),
        "memory": _memory(resources.get("resident_bytes", 0))
        + (f" + {_memory(on_device)}" if on_device else ""),
        "restarts": str(worker["restarts"]),
        "last error": Text(_last_error(worker), style="red"),
    }


def _last_error(worker: Mapping[str, Any]) -> str:
    error = plain(worker["last_error"])
    return f"{clock(worker['seconds_since_error'])} ago: {error}" if error else ""


def _last_errors(status: Status) -> list[Text]:
    """Return a line for each worker with an error."""
    workers = sorted(status["workers"], key=_order)
    errors = {worker["worker_id"]: _last_error(worker) for worker in workers}
    return [Text(f"{name}, {error}", style="red") for name, error in errors.items() if error]


def _log_messages(status: Status) -> list[Text]:
    now = time.time()
    return [
        Text(
            f"{clock(max(0.0, now - each['time']))} ago: {each['text']}",
            style=_LEVELS.get(each["level"], ""),
        )
        for each in status["log_messages"][-_SHOWN_MESSAGES:]
    ]


def _order(worker: Mapping[str, Any]) -> tuple[str, int]:
    index = worker["worker_id"].rpartition("-")[2]
    return worker["role"], int(index) if index.isdecimal() else -1


def _memory(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size else "-"


def _list(given: RunsArguments) -> int:
    import msgspec

    from juggler.driver.watching.overview import RunReader, names_of

    directories, run_dirs = _found([given.directory] if given.directory is not None else [])
    names = names_of(run_dirs)
    found = [RunReader(*each).read() for each in zip(run_dirs, names, strict=True)]
    # One line each, which scripts read one by one.
    if given.json:
        for each in found:
            print(json.dumps(msgspec.to_builtins(each)))
    elif found:
        console = make_console()
        _show_runs(found, console)
        if run_dirs == directories:
            _show_checkpoints(run_dirs[0], console)
    else:
        print(f"there are no runs in {directories[0]}: `juggler train cartpole` makes one in runs/")
    return 0


def _found(given: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return directories and their runs; only the default may be missing."""
    from juggler.driver.watching.overview import find_runs

    if not given and not Path(DEFAULT).exists():
        return [Path(DEFAULT)], []
    directories = [Path(each) for each in given or [DEFAULT]]
    return directories, find_runs(directories)


def _show_runs(found: list[Overview], console: Console) -> None:
    words = "name", "environment", "algorithm", "state"
    table = make_table(words, ("return", "best", "steps", "time", "checkpoints"), "written")
    # As `Text`, since a name may look like markup of rich.
    for each in found:
        table.add_row(
            Text(each.name),
            Text(each.env.rpartition(":")[2]),
            Text(each.algorithm),
            Text(each.state, style=_RUN_STYLES[each.state]),
            number(each.return_last),
            number(each.return_best),
            quantity(each.env_steps),
            clock(each.wall_time),
            str(len(each.checkpoints)),
            _ago(each.written),
        )
    console.print(table)
    # On stderr, so that the table can be piped.
    for each in found:
        if each.problem:
            print(f"{each.directory}: {each.problem}", file=sys.stderr)


def _show_checkpoints(run_dir: Path, console: Console) -> None:
    """Show the newest checkpoints and the best one, for use in commands."""
    from juggler.driver.watching.overview import text_of
    from juggler.runtime.checkpoints.checkpoint import read_metadata

    table = make_table(("checkpoint",), ("return", "steps"), "written")
    for path in _checkpoints(run_dir):
        try:
            counters = read_metadata(path)["counters"]
            returns, steps = counters.get("returns"), quantity(counters["trained"])
            shown = number(fmean(returns) if returns else None), steps
            written = _ago(path.stat().st_mtime)
        except Exception:  # the directory may contain anything
            shown, written = ("", ""), "damaged"
        table.add_row(Text(text_of(path)), *shown, written)
    if table.row_count:
        console.print()
        console.print(table)


def _checkpoints(run_dir: Path) -> Iterator[Path]:
    from juggler.runtime.checkpoints.checkpoint import BEST, DIRECTORY, newest_first

    for name in (DIRECTORY, BEST):
        if (run_dir / name).is_dir():
            yield from newest_first(run_dir / name)


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    return f"{int(seconds / _DAY)} days ago" if seconds >= 2 * _DAY else f"{clock(seconds)} ago"


def _watch(given: WatchArguments) -> int:
    from juggler.driver.watching.page_server import serve_page
    from juggler.runtime.actors.credentials import read_token
    from juggler.runtime.actors.tls import read_tls

    (directories, found), tls = _found(given.runs), read_tls(given.tls)
    # The page starts with the runs that are named, but not with all of one directory.
    with serve_page(
        directories,
        given.bind,
        named=len(directories) > 1,
        token=(token := read_token(given.token_file, tls)),
        tls=tls,
        insecure=given.insecure,
    ) as address:
        count = "1 run" if len(found) == 1 else f"{len(found)} runs"
        asks = ", which asks for the token" if token else ""
        # Until a signal: the server has its own threads.
        print(f"watching {count} at {address}{asks} (Ctrl-C ends this)", flush=True)
        try:
            while True:
                signal.pause()
        except KeyboardInterrupt:
            return 0  # Ctrl-C is the usual way to end it


_runs = command("runs", RunsArguments, _list)
_status = command("status", Arguments, _show, {"--runs": _runs})
watch = command("watch", WatchArguments, _watch)


def run(arguments: Sequence[str]) -> int:
    return (_status if arguments else _runs)(arguments)
