"""Prints the tables of the pages in benchmarks/: `python benchmarks/run.py [TABLE …]`.

Every figure is a ratio to something that runs in the same minute, as the median of alternating
pairs, because absolute figures drift from machine to machine and from hour to hour.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from commands import machine, pairs, script, steady_rate, table, train

PAIRS = 3
SECONDS = 8


def trained_rate(envs: int, runners: int = 1, *options: object) -> float:
    """Steps of CartPole that a run trains on per second."""
    # An update has the live steps of one batch of each runner, without steps that only reset.
    batch_size = int(envs * runners * 32 * 0.92)
    _, lines = train(
        *("cartpole", "--stop-return", 501, "--no-confirm", "--stop-seconds", SECONDS + 4),
        *("--num-env-runners", runners, "--envs-per-runner", envs),
        *("--batch-size", batch_size, *options),
    )
    return steady_rate(lines)


def _row(name: str, ours: float, theirs: float, ratios: list[float], goal: str) -> list[str]:
    spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
    ratio = f"**{statistics.median(ratios):.2f}** ({spread})"
    return [name, f"{ours / 1e3:.0f}k", f"{theirs / 1e3:.0f}k", ratio, goal]


def throughput() -> str:
    """Trained steps a second against a single-process torch loop."""
    head = ["configuration", "Juggler, steps/s", "beside it, steps/s", "ratio", "goal"]
    rows = []
    for envs, goal in ((64, "≥ 2.2"), (256, "≥ 2.2")):
        loop = ("single_process.py", "--envs", envs, "--seconds", SECONDS)
        measured = pairs(
            lambda envs=envs: trained_rate(envs),  # type: ignore[misc]
            lambda loop=loop: script(*loop)["steps_per_second"],  # type: ignore[misc]
            PAIRS,
        )
        rows.append(_row(f"1 runner × {envs}, single-process loop", *measured, goal))
    measured = pairs(
        lambda: trained_rate(64, 1, "--vectorize", "sync"),
        lambda: script("bare_environment.py", "--seconds", SECONDS)["steps_per_second"],
        PAIRS,
    )
    rows.append(_row("1 × 64 SyncVectorEnv, the bare environment", *measured, "≥ 0.80"))
    measured = pairs(lambda: trained_rate(64, 2), lambda: trained_rate(64, 1), PAIRS)
    rows.append(_row("2 × 64, one runner", *measured, "≥ 1.3"))
    return table("Trained steps per second", head, rows)


def ppo() -> str:
    """PPO's four epochs of four minibatches, and the time to a return of 475."""
    loop = ("ppo.py", "--envs", 64, "--seconds", SECONDS)
    measured = pairs(
        lambda: trained_rate(64, 1, "--algorithm", "ppo"),
        lambda: script(*loop)["steps_per_second"],
        PAIRS,
    )
    head = ["configuration", "Juggler, steps/s", "beside it, steps/s", "ratio", "goal"]
    row = _row("1 runner × 64, a single-file PPO", *measured, "≥ 1.6")
    return table("PPO, trained steps per second", head, [row]) + "\n" + _solved(475, "ppo")


def solved() -> str:
    """From the command to a return of 450."""
    return _solved(450, "impala")


def _solved(goal: int, algorithm: str) -> str:
    options = ("cartpole", "--algorithm", algorithm, "--stop-return", goal, "--no-confirm")
    summaries = [train(*options, "--seed", seed)[0] for seed in range(5)]
    times = [summary["wall_seconds_to_solved"] for summary in summaries]
    first = [summary["wall_seconds_to_first_update"] for summary in summaries]
    rows = [
        [
            f"command to {goal}",
            *(f"{each:.1f}" for each in times),
            f"**{statistics.median(times):.1f}**",
        ],
        ["first update", *(f"{each:.1f}" for each in first), f"**{statistics.median(first):.1f}**"],
    ]
    head = ["seconds", *(f"seed {seed}" for seed in range(5)), "median"]
    return table(f"Command to solved, {algorithm}", head, rows)


def replay_share() -> str:
    """Environment steps until a task is solved, with and without old steps beside new ones."""
    rows = []
    for name, new, envs, batch_size, shares in (
        ("cartpole", 2048, 64, 1900, (0.0, 0.5)),
        ("cartpole", 1024, 32, 950, (0.0, 0.5)),
        ("acrobot", 512, 8, 500, (0.0, 0.5, 0.75)),
    ):
        options = ("--envs-per-runner", envs, "--batch-size", batch_size, "--no-confirm")
        for share in shares:
            found = [
                train(name, *options, "--replay-share", share, "--seed", seed)
                for seed in range(PAIRS)
            ]
            steps = [summary["env_steps_trained"] for summary, _ in found]
            ages = [summary["modules"]["default"].get("replay_age", 0.0) for summary, _ in found]
            cells = [f"{each / 1e3:.0f}k" for each in (*steps, statistics.median(steps))]
            sizes = [str(new), str(share), str(round(new / (1 - share)))]
            rows.append([name, *sizes, *cells, f"{statistics.median(ages):.1f}"])
    head = ["", "new steps in an update", "`replay_share`", "all steps in an update"]
    head += [*(f"seed {seed}" for seed in range(PAIRS)), "median", "`replay_age`"]
    return table("Old steps beside new ones: environment steps until solved", head, rows)


def stays() -> str:
    """Does a solved CartPole stay solved?"""
    from stays import measure

    return measure()


def shares() -> str:
    """How each process spends its time."""
    endless = ("--stop-return", 501, "--no-confirm")
    summary, _ = train("cartpole", *endless, "--stop-seconds", SECONDS + 4)
    rows = []
    for role, seconds in sorted(summary["seconds"].items()):
        total = sum(seconds.values())
        parts = ", ".join(
            f"{name} {share / total:.0%}"
            for name, share in sorted(seconds.items(), key=lambda item: -item[1])
        )
        rows.append([role, parts])
    return table("Where the time goes", ["processes", "shares"], rows)


def acting() -> str:
    """A vector step of a policy, in torch and in NumPy."""
    found = script("acting.py")
    rows = []
    for count, times in found["acts"].items():
        row = [count, *(f"{statistics.median(each):.0f}" for each in times.values())]
        for other in ("torch", "by_hand"):
            ratios = [a / b for a, b in zip(times["numpy"], times[other], strict=True)]
            spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
            row.append(f"**{statistics.median(ratios):.2f}** {spread}")
        rows.append(row)
    head = ["rows", "torch, µs", "NumPy, µs", "by hand, µs", "NumPy to torch", "to by hand (≤ 1.4)"]
    text = table("A vector step of a policy", head, rows)
    kinds = ("environment", "inference", "connectors", "frames")
    rows = [
        [name, *(f"{each[kind]:.0f}" for kind in kinds), f"{sum(each.values()):.0f}"]
        for name, each in found["parts"].items()
    ]
    return text + "\n" + table("A runner's step with 64 rows, µs", ["", *kinds, "together"], rows)


def memory() -> str:
    """Two runners, a learner, the driver and the forkserver together."""
    found = script("memory.py")
    rows = [[name, f"{size:.0f}"] for name, size in found["processes"].items()]
    rows.append(["**together**", f"**{found['megabytes']:.0f}** (goal ≤ 450)"])
    return table("Memory (PSS)", ["process", "MB"], rows)


def receipts() -> str:
    """The driver with fake runners that answer at once."""
    rows = []
    for runners in (16, 64, 256):
        found = [script("driver_receipts.py", "--runners", runners) for _ in range(PAIRS)]
        rate = statistics.median(each["receipts_per_second"] for each in found)
        cpu = statistics.median(each["cpu_microseconds"] for each in found)
        rows.append([str(runners), f"{rate:.0f}", f"{cpu:.0f}"])
    return table("Driver", ["runners", "receipts/s", "driver CPU for each, µs"], rows)


def streams() -> str:
    """Episodes and weights compared with raw gRPC bytes."""
    rows = []
    for size, name in ((256 << 10, "256 KB"), (4 << 20, "4 MB")):
        for kind in ("episodes", "weights"):
            found = script("streams.py", kind, "--bytes", size, "--turns", 4 * PAIRS)
            ratios = [ours / raw for ours, raw in zip(found["ours"], found["raw"], strict=True)]
            medians = (f"{statistics.median(found[each]):.0f}" for each in ("ours", "raw"))
            spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
            ratio = f"**{statistics.median(ratios):.2f}** {spread}"
            rows.append([f"{kind}, {name}", *medians, ratio, "≥ 0.90"])
    head = ["stream", "Juggler, MB/s", "raw gRPC bytes, MB/s", "ratio", "goal"]
    return table("Streams, process to process", head, rows)


def lag() -> str:
    """The cost of staleness: the return over --max-staleness, and a picture."""
    from lag import measure

    return measure(Path(__file__).with_name("lag.png"))


def scaling() -> str:
    """The driver and the streams with up to a thousand fake runners, and a picture."""
    from scaling import measure

    return measure(Path(__file__).with_name("scaling.png"))


def atari() -> str:
    """Pong from single frames compared with stacked ones."""
    from atari import measure

    return measure()


def sample_efficiency() -> str:
    """PPO compared with Stable-Baselines3's, and a picture."""
    from sample_efficiency import measure

    return measure(Path(__file__).with_name("sample_efficiency.png"))


def population() -> str:
    """Sixteen learning rates at once compared with sixteen learners in turn."""
    rows = []
    for envs, steps, hidden in ((4, 16, (32,)), (8, 32, (32,)), (8, 32, (64, 64)), (64, 32, (64,))):
        found = script(
            *("population.py", "--envs", envs, "--steps", steps, "--hidden", *hidden),
        )
        pairs = zip(found["in_turn"], found["together"], strict=True)
        ratios = [in_turn / together for in_turn, together in pairs]
        times = [statistics.median(found[name]) for name in ("in_turn", "together")]
        ratio = f"**{statistics.median(ratios):.1f}** ({min(ratios):.1f}–{max(ratios):.1f})"
        sizes = " × ".join(map(str, hidden))
        rows.append([f"{envs * steps} steps, {sizes}", *(f"{x:.1f}" for x in times), ratio])
    head = ["an update, hidden layers", "in turn, ms", "together, ms", "times as fast"]
    return table("Sixteen learning rates on one stream of data", head, rows)


def all_reduce() -> str:
    """The reduction of a learner group compared with a raw all-reduce of the same size."""
    rows = []
    for parameters, name in ((10_000, "2×64 tanh"), (1_700_000, "Nature CNN")):
        for learners in (2, 4):
            options = ("--learners", learners, "--parameters", parameters, "--turns", 200)
            found = [script("all_reduce.py", *options) for _ in range(PAIRS)]
            keys = ("all_reduce_ms", "sum_ms", "reduction_ms")
            times = [statistics.median(each[key] for each in found) for key in keys]
            row = [f"{learners} learners, {name}", *(f"{each:.2f}" for each in times)]
            for key in ("sum_ratio", "reduction_ratio"):
                ratios = [each[key] for each in found]
                spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
                row.append(f"**{statistics.median(ratios):.2f}** {spread}")
            rows.append(row)
    head = ["a group over gloo", "raw all-reduce, ms", "the same vector by learners, ms"]
    head += ["gradients, packed and unpacked, ms", "ratio (≤ 1.2)", "ratio"]
    return table("Gradients of several learners", head, rows)


TABLES = {
    "throughput": throughput,
    "ppo": ppo,
    "solved": solved,
    "replay_share": replay_share,
    "stays": stays,
    "shares": shares,
    "acting": acting,
    "memory": memory,
    "receipts": receipts,
    "streams": streams,
    "lag": lag,
    "scaling": scaling,
    "atari": atari,
    "sample_efficiency": sample_efficiency,
    "population": population,
    "all_reduce": all_reduce,
}


def main() -> None:
    names = sys.argv[1:] or list(TABLES)
    if unknown := set(names) - TABLES.keys():
        raise SystemExit(f"no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    print(f"On {machine()}.\n")
    for name in names:
        print(TABLES[name](), flush=True)


if __name__ == "__main__":
    main()
