"""How the driver and the streams scale, with fake runners and learners: tables and a picture."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from commands import pairs, script, table
from matplotlib.figure import Figure

RUNNERS = (1, 16, 64, 256)
LEARNERS = (1, 2, 4, 8)
SENDERS = (1, 16, 64)
SUBSCRIBERS = (1, 16, 64, 256)
PAIRS = 3
BATCHES = 8  # of each learner in an update, by default

Figures = dict[str, Any]

#: Everybody takes time: runners 100 ms for a batch, every eighth of them 400 ms. By name: options.
AT_WORK = {
    "64 × 4": ("--runners", 64, "--learners", 4, "--update-ms", 5, "--batches", 4),
    "256 × 4": ("--runners", 256, "--learners", 4, "--update-ms", 5, "--batches", 4),
    "256 × 4, slow learners": (
        *("--runners", 256, "--learners", 4, "--update-ms", 20, "--batches", 4),
    ),
    "256 × 4, slow learners, `max_staleness` 16": (
        *("--runners", 256, "--learners", 4, "--update-ms", 20, "--batches", 4),
        *("--staleness", 16),
    ),
}
THOUSAND = ("--runners", 1000, "--learners", 64, "--slow-every", 8)


def measure(picture: Path) -> str:
    """The tables; draws the picture into `picture`."""
    capacity = {
        (runners, learners): _driver("--runners", runners, "--learners", learners)
        for learners in LEARNERS
        for runners in RUNNERS
    }
    at_work = {
        name: _driver(*options, "--sample-ms", 100, "--slow-every", 8, seconds=6)
        for name, options in AT_WORK.items()
    }
    # Here a batch takes 1 s or 4 s.
    times = ("--sample-ms", 1000, "--update-ms", 20, "--batches", 2)
    at_work["1000 × 64"] = _driver(*THOUSAND, *times, seconds=8)
    at_work["1000 × 64, at once"] = _driver(*THOUSAND, seconds=3)
    episodes = {count: _stream("episodes", count, 256 << 10) for count in SENDERS}
    weights = {count: _stream("weights", count, 1 << 20) for count in SUBSCRIBERS}
    _draw(capacity, weights, picture)
    return "\n".join(
        [
            _capacity_table(capacity),
            _parts_table(),
            _at_work_table(at_work),
            _episodes_table(episodes),
            _weights_table(weights),
        ]
    )


def _driver(*options: object, seconds: float = 2) -> Figures:
    print(".", end="", file=sys.stderr, flush=True)
    return script("driver_scaling.py", *options, "--seconds", seconds)


def _cost(batches: int) -> float:
    """Microseconds for each batch, if each learner uses `batches` in an update."""
    found = _driver("--runners", 256, "--learners", 8, "--batches", batches)
    return float(found["cpu_microseconds"])


def _stream(kind: str, count: int, size: int) -> Figures:
    print(".", end="", file=sys.stderr, flush=True)
    return script("stream_scaling.py", kind, "--count", count, "--bytes", size)


def _capacity_table(capacity: dict[tuple[int, int], Figures]) -> str:
    head = ["runners", *map(_learners, LEARNERS)]
    rows = [
        [
            str(runners),
            *(
                f"{found['receipts_per_second']:.0f}, {found['updates_per_second']:.0f}, "
                f"**{found['cpu_microseconds']:.0f} µs**"
                for found in (capacity[runners, learners] for learners in LEARNERS)
            ),
        ]
        for runners in RUNNERS
    ]
    title = "Driver: receipts/s, updates/s, CPU for each receipt"
    return table(title, head, rows)


def _parts_table() -> str:
    """The driver's costs of a batch, an update and a heartbeat."""
    idle = {
        runners: _driver("--runners", runners, "--sample-ms", 1e6)["cpu_share"]
        for runners in (1, 256, 1000)
    }
    # Each batch comes with one rank's share of an update, or an eighth of it.
    _, seldom, ratios = pairs(lambda: _cost(1), lambda: _cost(BATCHES), PAIRS)
    of_rank = seldom * (statistics.median(ratios) - 1) / (1 - 1 / BATCHES)
    of_batch = seldom - of_rank / BATCHES
    rows = [
        ["a batch: request, receipt, arrival", f"{of_batch:.0f}"],
        ["an update, for each rank", f"{of_rank:.0f}"],
    ]
    rows += [
        [
            f"a heartbeat, of {runners} idle runners",
            f"{1e6 * (idle[runners] - idle[1]) / (runners - 1):.0f}",
        ]
        for runners in (256, 1000)
    ]
    return table("Driver: parts", ["", "CPU, µs"], rows)


def _at_work_table(at_work: dict[str, Figures]) -> str:
    head = ["runners × learners", "receipts/s", "updates/s", "driver's CPU"]
    head += ["each fast runner served", "each slow one", "reply to next request, ms"]
    head += ["batches open (admitted)", "driver, MB", "a metrics line"]
    rows = []
    for name, found in at_work.items():
        waits = "p50 {wait_p50_ms:.1f}, p99 {wait_p99_ms:.0f}, most {wait_max_ms:.0f}"
        rows.append(
            [
                name,
                f"{found['receipts_per_second']:.0f}",
                f"{found['updates_per_second']:.1f}",
                f"{found['cpu_share']:.0%}",
                *("{least}–{most}, Jain {jain:.3f}".format(**found[k]) for k in ("fast", "slow")),
                waits.format(**found),
                f"{found['most_open']} ({found['admitted']})",
                f"{found['megabytes']:.0f} ({found['megabytes_more']:+.1f})",
                "{metrics_line_kilobytes:.0f} KB, {metrics_line_ms:.1f} ms".format(**found),
            ]
        )
    return table("Driver: at work", head, rows)


def _episodes_table(episodes: dict[int, Figures]) -> str:
    rows = [
        [
            str(count),
            f"{found['megabytes_per_second']:.0f}",
            f"{found['cpu_seconds_per_gigabyte']:.2f}",
            f"{found['least']}–{found['most']}",
            str(found["threads"]),
            f"{found['megabytes_more']:.0f}",
            f"{found['threads_of_each_sender']:.1f}",
        ]
        for count, found in episodes.items()
    ]
    head = ["senders", "MB/s", "learner's CPU, s/GB", "batches of each", "threads", "memory, MB"]
    return table("Episodes to one learner, 256 KB each", [*head, "a sender's threads"], rows)


def _weights_table(weights: dict[int, Figures]) -> str:
    rows = [
        [
            str(count),
            f"{1e3 * found['cpu_seconds_per_version']:.1f}",
            f"{1e3 * found['cpu_seconds_per_version'] / count:.2f}",
            f"{found['megabytes_per_second']:.0f}",
            str(found["threads"]),
            f"{found['megabytes_more']:.0f}",
        ]
        for count, found in weights.items()
    ]
    head = ["subscribers", "learner's CPU, ms a version", "for each", "MB/s", "threads"]
    return table("Weights from one learner, 1 MB", [*head, "memory, MB"], rows)


def _draw(
    capacity: dict[tuple[int, int], Figures], weights: dict[int, Figures], picture: Path
) -> None:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    rate, cpu, fan = figure.subplots(1, 3)
    colours = ("#0072b2", "#009e73", "#e69f00", "#d55e00")
    for learners, colour in zip(LEARNERS, colours, strict=True):
        for axes, key in ((rate, "receipts_per_second"), (cpu, "cpu_microseconds")):
            values = [capacity[runners, learners][key] for runners in RUNNERS]
            label = _learners(learners)
            axes.plot(RUNNERS, values, color=colour, label=label, lw=1.5, marker="o", ms=3)
    of_each = [1e3 * weights[count]["cpu_seconds_per_version"] / count for count in SUBSCRIBERS]
    fan.plot(SUBSCRIBERS, of_each, color="#404040", lw=1.5, marker="o", ms=3)
    _label(rate, "runners", "receipts booked per second", RUNNERS)
    _label(cpu, "runners", "driver's CPU for each, µs", RUNNERS)
    _label(fan, "subscribers", "learner's CPU for 1 MB to each, ms", SUBSCRIBERS)
    rate.legend(frameon=False)
    figure.savefig(picture, dpi=110)


def _learners(count: int) -> str:
    return f"{count} learner{'s' * (count > 1)}"


def _label(axes: Any, x: str, y: str, counts: Iterable[int]) -> None:
    axes.set_xscale("log", base=4)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


if __name__ == "__main__":
    print(measure(Path(__file__).with_name("scaling.png")))
