"""Tables for machines with GPUs: `python benchmarks/gpu.py [TABLE …]`.

Without a GPU it runs on the CPU at a small size; those figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from commands import machine, script, steady_rate, table, train

from juggler.learner.process.devices import devices_here
from juggler.runtime.actors.processes import WorkerProgram, cool_down, start, warm_up

DEVICE = devices_here()[0]
ON_GPU = DEVICE != "cpu"
ENCODERS = ("nature_cnn", "impala_resnet")
#: Of an update and of a batch.
SIZES: tuple[object, ...] = (
    *("--device", DEVICE),
    *(("--steps", 16384, "--rows", 16, "--fragment", 64) if ON_GPU else ()),
    *(() if ON_GPU else ("--steps", 128, "--rows", 4, "--fragment", 16, "--block", 1)),
)


def end_to_end(seconds: float, pairs: int) -> str:
    """A learner fed over gRPC, compared with updates on samples already on the device."""
    rows = []
    for encoder in ENCODERS:
        for precision in ("float32", "bfloat16"):
            options = ("--encoder", encoder, "--precision", precision, *SIZES)
            options += ("--seconds", seconds)
            senders = ("--senders", 15 if ON_GPU else 1)
            found = [script("gpu_feed.py", *options, *senders) for _ in range(pairs)]
            there = statistics.median(each["on_device"] for each in found)
            fed = statistics.median(each["end_to_end"]["rate"] for each in found)
            shares = [each["end_to_end"]["rate"] / each["on_device"] for each in found]
            share = f"**{statistics.median(shares):.2f}** ({min(shares):.2f}–{max(shares):.2f})"
            spent = found[-1]["end_to_end"]["shares"].items()
            where = ", ".join(f"{name} {part:.0%}" for name, part in spent)
            versions = f"{found[-1]['end_to_end']['versions']:.1f}"
            rows.append([f"{encoder}, {precision}", f"{fed:.0f}", f"{there:.0f}", share])
            rows[-1] += ["≥ 0.95", versions, where]
    head = ["update", "fed over gRPC, steps/s", "on the device, steps/s", "share", "goal"]
    head += ["versions published/s", "where the learner's main thread is, receiving beside it"]
    return table("From gRPC to published weights", head, rows)


def passes(seconds: float, pairs: int) -> str:
    """bfloat16 and torch.compile against plain float32."""
    rows = []
    for encoder in ENCODERS:
        options = ("gpu_feed.py", "--only", "on_device", "--encoder", encoder, *SIZES)
        options += ("--seconds", seconds)
        plain = [script(*options)["on_device"] for _ in range(pairs)]
        variants: list[tuple[str, tuple[str, ...]]] = [("bfloat16", ("--precision", "bfloat16"))]
        if ON_GPU:
            variants += [
                ("compiled", ("--compile",)),
                ("bfloat16, compiled", ("--precision", "bfloat16", "--compile")),
            ]
        for name, more in variants:
            rates = [script(*options, *more)["on_device"] for _ in range(pairs)]
            ratio = statistics.median(rates) / statistics.median(plain)
            rows.append([f"{encoder}, {name}", f"{ratio:.2f}"])
    return table("Updates, times as fast as float32", ["update", "ratio"], rows)


def graphs(seconds: float, pairs: int) -> str:
    """Optimizer steps launched as CUDA graphs, and kernel by kernel."""
    rows = []
    for name, each in script("gpu_graphs.py", "--least", seconds / 40, "--rounds", pairs).items():
        ratio = f"**{each['ratio']:.2f}** ({each['least']:.2f}–{each['most']:.2f})"
        rows.append([name, f"{each['plain_us']:.0f}", f"{each['graph_us']:.0f}", ratio])
    head = ["optimizer step", "kernel by kernel, µs", "as graphs, µs", "times as fast"]
    return table("CUDA graphs", head, rows)


def several(seconds: float, pairs: int) -> str:
    """Separate learner processes on one GPU; and gradients of groups."""
    rows = []
    options = (sys.executable, "gpu_feed.py", "--only", "on_device", *SIZES)
    options += ("--seconds", seconds)
    alone = _together(1, options)
    for count in (2, 4):
        rates = _together(count, options)
        ratio = f"{sum(rates) / sum(alone):.2f}"
        rows.append([f"{count} learners on one device, rates added up, against one", ratio])
    for count, devices in ((2, DEVICE), (max(2, torch.cuda.device_count()), "auto")):
        found = script("all_reduce.py", "--learners", count, "--devices", devices)
        way = f"{found['reduction_ms']:.2f} ms, raw {found['all_reduce_ms']:.2f} ms"
        rows.append([f"1.7M gradients of {count} learners, {found['way']}", way])
    return table("Several learners", ["", ""], rows)


def _together(count: int, command: tuple[object, ...]) -> list[float]:
    """Steps a second of several processes at once."""
    import subprocess

    here = Path(__file__).parent
    words = [str(word) for word in command]
    started = [
        subprocess.Popen(words, cwd=here, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    outputs = [process.communicate()[0] for process in started]
    return [float(json.loads(output.splitlines()[-1])["on_device"]) for output in outputs]


def runners(seconds: float, pairs: int) -> str:
    """A whole run: Pong from ALE's vector, a runner on every core but one, and one learner."""
    cores = multiprocessing.cpu_count()
    runners = cores - 1 if ON_GPU else 1
    preset = "pong" if ON_GPU else "cartpole"
    summary, lines = train(
        *(preset, "--devices", DEVICE, "--num-env-runners", runners),
        *(("--batch-size", 512 * runners) if ON_GPU else ()),  # so that all of them sample
        *("--stop-return", 501, "--no-confirm", "--stop-seconds", 3 * seconds if ON_GPU else 8),
    )
    seconds = summary["seconds"]["learner"]
    total = sum(seconds.values())
    where = ", ".join(f"{name} {share / total:.0%}" for name, share in seconds.items())
    seconds = summary["seconds"]["envrunner"]
    total = sum(seconds.values())
    sampled = ", ".join(f"{name} {share / total:.0%}" for name, share in seconds.items())
    row = [f"{preset}, {runners} runners", f"{steady_rate(lines):.0f}", where, sampled]
    head = ["", "trained steps/s", "where the learner's time goes", "and the EnvRunners'"]
    return table("A whole run", head, [row])


def forks(seconds: float, pairs: int) -> str:
    """Workers of the forkserver can all use the device, because it has not touched CUDA."""
    rows = []
    for count in (1, 4):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        begin = time.perf_counter()
        warm_up()
        for index in range(count):
            start(WorkerProgram("gpu:use_device", queue), f"bench {index}")
        found = [queue.get(timeout=120) for _ in range(count)]
        seconds = time.perf_counter() - begin
        cool_down()
        rows.append([str(count), f"{seconds:.1f}", ", ".join(sorted(set(found)))])
    head = ["processes", "seconds until all have computed", "where"]
    return table("The forkserver and the device", head, rows)


def use_device(queue: Any) -> None:
    """In a worker: work that needs a CUDA context of its own."""
    x = torch.ones(1000, 1000, device=DEVICE)  # [1000, 1000]
    queue.put(f"{x.device}: {(x @ x).sum().item():.0f}")


TABLES = {
    "end_to_end": end_to_end,
    "passes": passes,
    "graphs": graphs,
    "several": several,
    "runners": runners,
    "forks": forks,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES])
    parser.add_argument("--seconds", type=float, default=20 if ON_GPU else 5, help="of a figure")
    parser.add_argument("--pairs", type=int, default=3 if ON_GPU else 1)
    given = parser.parse_args()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"On {machine()}; {', '.join(gpus) or 'no GPU: the figures mean nothing'}.\n")
    for name in given.tables or list(TABLES):
        print(TABLES[name](given.seconds, given.pairs), flush=True)


if __name__ == "__main__":
    main()
