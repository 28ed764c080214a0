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
#: Of an update, of a batch, processes that send, and how long to measure.
SIZES: tuple[object, ...] = (
    *("--device", DEVICE),
    *(("--steps", 16384, "--rows", 16, "--fragment", 64) if ON_GPU else ()),
    *(() if ON_GPU else ("--steps", 128, "--rows", 4, "--fragment", 16, "--block", 1)),
    *("--seconds", 20 if ON_GPU else 5),
)
PAIRS = 3 if ON_GPU else 1


def end_to_end() -> str:
    """A learner fed over gRPC, compared with updates on samples already on the device."""
    rows = []
    for encoder in ENCODERS:
        for precision in ("float32", "bfloat16"):
            options = ("--encoder", encoder, "--precision", precision, *SIZES)
            senders = ("--senders", 15 if ON_GPU else 1)
            found = [script("gpu_feed.py", *options, *senders) for _ in range(PAIRS)]
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


def passes() -> str:
    """bfloat16, torch.compile and CUDA graphs against plain float32."""
    rows = []
    for encoder in ENCODERS:
        options = ("gpu_feed.py", "--only", "on_device", "--encoder", encoder, *SIZES)
        plain = [script(*options)["on_device"] for _ in range(PAIRS)]
        variants: list[tuple[str, tuple[str, ...]]] = [("bfloat16", ("--precision", "bfloat16"))]
        if ON_GPU:
            variants += [
                ("compiled", ("--compile",)),
                ("bfloat16, compiled", ("--precision", "bfloat16", "--compile")),
            ]
        for name, more in variants:
            rates = [script(*options, *more)["on_device"] for _ in range(PAIRS)]
            ratio = statistics.median(rates) / statistics.median(plain)
            rows.append([f"{encoder}, {name}", f"{ratio:.2f}"])
        if ON_GPU:
            rows.append([f"{encoder}, a CUDA graph of gradients", f"{_graph_ratio(encoder):.2f}"])
    return table("Updates, times as fast as float32", ["update", "ratio"], rows)


def _graph_ratio(encoder: str) -> float:
    """The speed-up of gradients by a CUDA graph: an experiment, which learners do not use."""
    from gpu_feed import ACTIONS, FRAMES, image_batch

    from juggler.learner.algorithms.impala.config import ImpalaConfig
    from juggler.learner.algorithms.registry import build_learner

    learner = build_learner(
        ImpalaConfig(), None, FRAMES, ACTIONS, {"encoder": encoder}, device=DEVICE
    )
    sample = learner.sample_from_episodes([image_batch(16, 64, seed) for seed in range(16)])

    def gradients() -> None:
        learner.core.grads(learner.state, sample)

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            gradients()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()
    return _seconds(gradients) / _seconds(graph.replay)


def _seconds(work: Any, times: int = 30) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def several() -> str:
    """Separate learner processes on one GPU; and gradients of groups."""
    rows = []
    options = (sys.executable, "gpu_feed.py", "--only", "on_device", *SIZES)
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


def runners() -> str:
    """A whole run: Pong from ALE's vector, a runner on every core but one, and one learner."""
    cores = multiprocessing.cpu_count()
    runners = cores - 1 if ON_GPU else 1
    preset = "pong" if ON_GPU else "cartpole"
    summary, lines = train(
        *(preset, "--devices", DEVICE, "--num-env-runners", runners),
        *("--stop-return", 501, "--no-confirm", "--stop-seconds", 60 if ON_GPU else 8),
    )
    seconds = summary["seconds"]["learner"]
    total = sum(seconds.values())
    where = ", ".join(f"{name} {share / total:.0%}" for name, share in seconds.items())
    row = [f"{preset}, {runners} runners", f"{steady_rate(lines):.0f}", where]
    return table("A whole run", ["", "trained steps/s", "where the learner's time goes"], [row])


def forks() -> str:
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
    "several": several,
    "runners": runners,
    "forks": forks,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES])
    names = parser.parse_args().tables or list(TABLES)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"On {machine()}; {', '.join(gpus) or 'no GPU: the figures mean nothing'}.\n")
    for name in names:
        print(TABLES[name](), flush=True)


if __name__ == "__main__":
    main()
