"""A run's status as tables in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from juggler.driver.record.wording import LEAGUE_RETURNS, clock, number, plain, quantity
from juggler.runtime.wire.v1 import status_pb2

_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "left": "red"}
_LEVELS = {"info": "dim", "warning": "yellow", "error": "red"}
_SILENT_SECONDS = 3.0  # of an attached worker: more than a heartbeat or two
_SHOWN_MESSAGES = 6
_NARROW = 130  # terminal columns
_ONLY_WIDE = ("host", "pid", "incarnation", "device", "memory", "last error")


def table(status: status_pb2.RunStatus, width: int) -> RenderableType:
    """The most important facts, in a given number of columns."""
    is_wide = width >= _NARROW
    workers = _workers(status, () if is_wide else _ONLY_WIDE)
    errors = () if is_wide else _last_errors(status)
    return Group(_head(status), _books(status), workers, *errors, *_log_messages(status))


def _head(status: status_pb2.RunStatus) -> Text:
    state = "green" if status.phase == "training" else "yellow"
    return Text.assemble(
        ("juggler ", "bold"),
        f"{plain(status.env)} with {status.algorithm}, run {status.run_id}: ",
        (plain(status.phase), state),
        f", {clock(status.wall_seconds)}",
        (f"  {plain(status.run_dir)}", "dim"),
    )


def _books(status: status_pb2.RunStatus) -> Table:
    steps, queues, episodes = status.steps, status.queues, status.episodes
    version, staleness = status.version, status.staleness
    consumed = sum(staleness.counts)
    dropped = ", ".join(f"{quantity(n)} {reason}" for reason, n in sorted(steps.dropped.items()))
    has_return = episodes.HasField("return_mean")
    lost = f", {quantity(steps.lost_unreported)} lost unreported" if steps.lost_unreported else ""
    rows = {
        "return": f"{number(episodes.return_mean if has_return else None)} over the last 100 of "
        f"{episodes.ended:,} episodes",
        **_returns("modules", {_module(each): each for each in status.modules}),
        **({"": f"of {LEAGUE_RETURNS}"} if status.HasField("league") and status.modules else {}),
        **_league(status),
        **_returns("agents", {agent.agent: agent for agent in status.agents}),
        "steps": f"{quantity(steps.sampled)} sampled = {quantity(steps.trained)} trained + "
        f"{quantity(sum(steps.dropped.values()))} dropped + {quantity(steps.in_flight)} in flight; "
        f"{quantity(status.steps_per_second)} steps/s{lost}",
        "dropped": dropped or "nothing",
        "weights": f"generation {version.generation}, update {version.update:,}; staleness "
        f"{number(staleness.sum / consumed if consumed else None)} on average",
        "queues": f"{queues.requests_in_flight} requests and {queues.updates_in_flight} updates in "
        f"flight, {queues.queued_batches} batches ({quantity(queues.queued_steps)} steps) queued",
        **_simulators(status),
        "driver": f"{clock(status.driver.cpu_seconds)} of CPU, "
        f"{_memory(status.driver.resident_bytes)}; {status.restarts} restarts",
    }
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in rows.items():
        grid.add_row(name, text)
    return grid


def _module(module: status_pb2.ModuleStatus) -> str:
    return f"{module.module_id}{' (not trained)' if module.HasField('steps_played') else ''}"


def _league(status: status_pb2.RunStatus) -> dict[str, str]:
    """A row about the players of a league, if the run has one."""
    if not status.HasField("league"):
        return {}
    league = status.league
    ratings = ", ".join(f"{plain(each.player_id)} {each.elo:.0f}" for each in league.learning)
    return {
        "league": f"{league.players} players, {league.historical} of them frozen; Elo {ratings}"
    }


def _simulators(status: status_pb2.RunStatus) -> dict[str, str]:
    """A row about the simulators at gateways, if there are any gateways."""
    told = [each.simulators for each in status.workers if each.HasField("simulators")]
    connected = sum(each.connected for each in told)
    environments = sum(each.environments for each in told)
    text = f"{connected:,} connected, with {environments:,} environments"
    return {"simulators": text} if told else {}


def _returns(
    title: str, of: Mapping[str, status_pb2.ModuleStatus | status_pb2.AgentStatus]
) -> dict[str, str]:
    """A row with the mean return of each module or agent, if there are several."""
    words = (
        f"{plain(name)} {number(each.return_mean if each.HasField('return_mean') else None)}"
        for name, each in of.items()
    )
    return {title: ", ".join(words)} if of else {}


def _workers(status: status_pb2.RunStatus, left_out: Sequence[str]) -> Table:
    rows = [_cells(worker) for worker in sorted(status.workers, key=_order)]
    found = Table(box=None, padding=(0, 1), header_style="bold")
    titles = [title for title in _cells(status_pb2.WorkerStatus()) if title not in left_out]
    for title in titles:
        found.add_column(title, no_wrap=title != "last error")
    for row in rows:
        found.add_row(*(row[title] for title in titles))
    return found


def _cells(worker: status_pb2.WorkerStatus) -> dict[str, Text | str]:
    """By title, from left to right."""
    version, resources = worker.version, worker.resources
    silent = worker.state in ("ready", "starting") and worker.seconds_silent > _SILENT_SECONDS
    on_device = f" + {_memory(resources.device_bytes)}" if resources.device_bytes else ""
    return {
        "worker": worker.worker_id,
        "state": Text(worker.state, style=_STYLES.get(worker.state, "bold red")),
        "host": plain(worker.host),
        "pid": str(worker.pid or "-"),
        "incarnation": plain(worker.incarnation)[:8],
        "device": plain(worker.device) or "-",
        "version": f"{version.generation}.{version.update}" if worker.HasField("version") else "-",
        "steps/s": quantity(worker.steps_per_second),
        "heard": Text(clock(worker.seconds_silent), style="yellow" if silent else ""),
        "memory": _memory(resources.resident_bytes) + on_device,
        "restarts": str(worker.restarts),
        "last error": Text(_last_error(worker), style="red"),
    }


def _last_error(worker: status_pb2.WorkerStatus) -> str:
    error = plain(worker.last_error)
    return f"{clock(worker.seconds_since_error)} ago: {error}" if error else ""


def _last_errors(status: status_pb2.RunStatus) -> list[Text]:
    """A line for each worker that has had an error, where a column would be too narrow."""
    workers = sorted(status.workers, key=_order)
    errors = {worker.worker_id: _last_error(worker) for worker in workers}
    return [Text(f"{name}, {error}", style="red") for name, error in errors.items() if error]


def _log_messages(status: status_pb2.RunStatus) -> list[Text]:
    now = time.time()
    return [
        Text(
            f"{clock(max(0.0, now - each.time))} ago: {each.text}",
            style=_LEVELS.get(each.level, ""),
        )
        for each in status.log_messages[-_SHOWN_MESSAGES:]
    ]


def _order(worker: status_pb2.WorkerStatus) -> tuple[str, int]:
    index = worker.worker_id.rpartition("-")[2]
    return worker.role, int(index) if index.isdecimal() else -1


def _memory(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size else "-"
