"""Tables for machines with GPUs: `python benchmarks/gpu.py [TABLE …]`.

On a GPU each table is meant to take at most ten minutes. Without one, tables run on the CPU at a
small size; those figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from beside_peers import PEERS, peer_rate
from commands import machine, script, steady_rate, table, train
from recovery import only_learner

from juggler.driver.config_files import load_config_and_keys
from juggler.learner.process.learner_program import devices_here
from juggler.runtime.actors.processes import WorkerProgram, cool_down, warm_up

DEVICE = devices_here()[0]
ON_GPU = DEVICE != "cpu"
ENCODERS = ("nature_cnn", "impala_resnet")
#: Of an update and of a batch.
SIZES: tuple[object, ...] = (
    *("--device", DEVICE),
    *(("--steps", 16384, "--rows", 16, "--fragment", 64) if ON_GPU else ()),
    *(() if ON_GPU else ("--steps", 128, "--rows", 4, "--fragment", 16, "--block", 1)),
)

#: Of a run with images on a CPU.
SMALL: tuple[object, ...] = ("--envs-per-runner", 4, "--fragment-steps", 8, "--batch-size", 32)
#: A run that its time alone ends.
ENDLESS: tuple[object, ...] = ("--stop-return", 501, "--no-confirm")


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
        *("--stop-seconds", 3 * seconds if ON_GPU else 8, *ENDLESS),
    )
    spent = [_shares(summary, role) for role in ("learner", "envrunner")]
    row = [f"{preset}, {runners} runners", f"{steady_rate(lines):.0f}", *spent]
    head = ["", "trained steps/s", "where the learner's time goes", "and the EnvRunners'"]
    return table("A whole run", head, [row])


def _shares(summary: dict[str, Any], role: str) -> str:
    spent = summary["seconds"][role]
    total = sum(spent.values()) or 1.0
    return ", ".join(f"{name} {share / total:.0%}" for name, share in spent.items())


def forks(seconds: float, pairs: int) -> str:
    """Workers of the forkserver can all use the device, because it has not touched CUDA."""
    rows = []
    for count in (1, 4):
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        begin = time.perf_counter()
        warm_up()
        for index in range(count):
            WorkerProgram("gpu:use_device", queue).start(f"bench {index}")
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


def images(seconds: float, pairs: int) -> str:
    """A learner fed by EnvRunners that play Pong in ALE's native vector."""
    rows = []
    for encoder in ENCODERS:
        for precision in ("float32", "bfloat16"):
            learned = ("--encoder", encoder, "--precision", precision)
            there = script("gpu_feed.py", "--only", "on_device", *SIZES, *learned)["on_device"]
            for runners in (1, 4) if ON_GPU else (1,):
                summary, lines = train(
                    *("pong", "--devices", DEVICE, "--num-env-runners", runners),
                    *("--model", json.dumps({"encoder": encoder}), "--precision", precision),
                    *(
                        ("--envs-per-runner", 64, "--batch-size", 2048 * runners)
                        if ON_GPU
                        else SMALL
                    ),
                    *("--stop-seconds", seconds if ON_GPU else 40, *ENDLESS),
                )
                fed = steady_rate(lines)
                spent = [_shares(summary, role) for role in ("learner", "envrunner")]
                name = f"{encoder}, {precision}, {runners} EnvRunners"
                rows.append([name, f"{fed:.0f}", f"{there:.0f}", f"{fed / there:.2f}", *spent])
    head = ["", "fed, steps/s", "on the device, steps/s", "share"]
    head += ["where the learner's time goes", "and the EnvRunners'"]
    return table("Fed by EnvRunners with images", head, rows)


def _atari(name: str, algorithm: str, runners: int) -> tuple[object, ...]:
    """Options for a game as it ships, with 16 environments a runner, by any algorithm."""
    config = load_config_and_keys(name)[0].flat()
    keys = ("env_kwargs", "connectors", "model")
    return (
        *("--env", config["env"], "--algorithm", algorithm, "--devices", DEVICE),
        *(word for key in keys for word in (f"--{key}".replace("_", "-"), json.dumps(config[key]))),
        *("--num-env-runners", runners, "--envs-per-runner", 16, "--fragment-steps", 32),
    )


def game(name: str, algorithm: str, goal: float, seconds: float, pairs: int) -> str:
    """One run until its goal, or for as long as a table may take."""
    runners = multiprocessing.cpu_count() - 1 if ON_GPU else 1
    summary, lines = train(
        *_atari(name, algorithm, runners),
        *("--batch-size", 512 * runners, "--stop-return", goal, "--no-confirm"),
        *("--stop-seconds", 500 if ON_GPU else 40),
    )
    returns = [line["episode_return_mean"] for line in lines if line.get("episode_return_mean")]
    best = f"{max(returns):.1f}" if returns else "-"
    minutes, steps = lines[-1]["wall_time"] / 60, summary["env_steps_trained"]
    solved = "reached" if summary["solved"] else "not reached"
    # A step has four frames of the game.
    row = [f"{name} by {algorithm}", solved, best, f"{minutes:.1f}", f"{4 * steps / 1e6:.2f}"]
    head = ["", "goal", "best mean return", "minutes", "million frames", "trained steps/s"]
    return table("A whole run", head, [[*row, f"{steady_rate(lines):.0f}"]])


def peers(seconds: float, pairs: int) -> str:
    """Pong's trained steps a second beside peers with the same network and environments."""
    envs = 128 if ON_GPU else 16
    _, lines = train(
        *_atari("pong", "ppo", envs // 16),
        *("--batch-size", 32 * envs, "--epochs", 1, "--minibatches", 1),
        *("--stop-seconds", 2 * seconds if ON_GPU else 15, *ENDLESS),
    )
    ours = steady_rate(lines)
    rows = [["Juggler", f"{ours:.0f}", ""]]
    if python := os.environ.get("SAMPLE_FACTORY"):
        path, _ = PEERS["Sample Factory"]
        options = ("--game", "pong", "--device", DEVICE.partition(":")[0])
        rate = peer_rate(python, path, envs, seconds, *options)
        rows.append(["Sample Factory", f"{rate:.0f}", f"**{ours / rate:.2f}**"])
    if command := os.environ.get("SINGLE_FILE"):
        rate = _single_file(command.split(), 2 * seconds)
        rows.append([command.split()[1], f"{rate:.0f}", f"**{ours / rate:.2f}**"])
    return table("Beside peers", ["Pong", "trained steps/s", "ratio (goal ≥ 1.5)"], rows)


def _single_file(command: list[str], seconds: float) -> float:
    """The last rate that a script of CleanRL ("SPS: N") or LeanRL ("speed: N sps") prints.

    Raises:
        RuntimeError: it printed none.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30 + seconds)
        process.kill()
        process.wait()
        printed.seek(0)
        said = printed.read()
    found = re.findall(r"(?:SPS|speed):\s*([\d.]+)", said)
    if not found:
        raise RuntimeError(f"{' '.join(command)} printed no rate:\n{said[-4000:]}")
    return float(found[-1])


def tensors(seconds: float, pairs: int) -> str:
    """Environments in tensors, beside a loop in one file on the same device."""
    rows, envs = [], 4096 if ON_GPU else 64
    for name, options in (("CartPoles", ()), ("FineCartPoles", ("--fine",))):
        size = ("--envs", envs, "--seconds", seconds)
        theirs = [
            script("tensor_cartpole.py", *size, *options)["steps_per_second"] for _ in range(pairs)
        ]
        ours = []
        for _ in range(pairs):
            _, lines = train(
                *("--env", f"tensor_cartpole:{name}", "--algorithm", "impala", "--lr", 1e-3),
                *("--devices", DEVICE, "--num-env-runners", 1, "--envs-per-runner", envs),
                *("--fragment-steps", 32, "--batch-size", 32 * envs),
                *("--stop-seconds", seconds + 4, *ENDLESS),
            )
            ours.append(steady_rate(lines))
        shares = [a / b for a, b in zip(ours, theirs, strict=True)]
        share = f"**{statistics.median(shares):.2f}** ({min(shares):.2f}–{max(shares):.2f})"
        rates = [f"{statistics.median(each):.0f}" for each in (ours, theirs)]
        rows.append([f"{envs} {name}", *rates, share])
    head = ["", "trained steps/s (goal ≥ 1M)", "a loop in one file", "share (goal ≥ 0.90)"]
    return table("Tensors as environments", head, rows)


def fractions(seconds: float, pairs: int) -> str:
    """Modules that share a device in a LearnerGroup, and its process killed in the middle."""
    from gpu_feed import ACTIONS, FRAMES, image_batch

    import juggler

    spec = juggler.LearnerSpec(
        observation_space=FRAMES,
        action_space=ACTIONS,
        model={"encoder": "nature_cnn"},
        learner={"algorithm": "impala", "max_staleness": 1_000_000},
    )
    batch = image_batch(16, 64) if ON_GPU else image_batch(4, 16)
    rows = []
    for count in (1, 2, 4):
        modules = {f"module_{index}": spec for index in range(count)}
        with juggler.LearnerGroup(modules, devices=DEVICE, snapshot_updates=10) as group:
            episodes = {module_id: [batch] for module_id in modules}
            group.update_from_episodes(episodes)
            updates, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds / 2:
                group.update_from_episodes(episodes)
                updates += count
            rate = updates / (time.perf_counter() - begin)
            row = [str(count), f"{rate:.1f}", f"{rate / count:.1f}"]
            rows.append([*row, f"{_killed(group, episodes):.1f}"])
    head = ["modules on one device", "updates/s", "of each", "seconds from a kill to an update"]
    return table("Fractions of a device", head, rows)


def _killed(group: Any, episodes: Any) -> float:
    """Kill the learner's process while it updates; returns the seconds to the next result.

    Raises:
        RuntimeError: the update did not fail.
    """
    import juggler

    handle = group.update_from_episodes(episodes, async_update=True)
    begin = time.perf_counter()
    for child in psutil.Process().children(recursive=True):
        if "learner" in " ".join(child.cmdline()):
            child.kill()
    try:
        handle.result(timeout=120)
    except juggler.UpdateFailed:  # with the ShardLost of each module
        group.update_from_episodes(episodes)
    else:
        raise RuntimeError("no learner was killed in its update")
    return time.perf_counter() - begin


def killed(seconds: float, pairs: int) -> str:
    """A run whose only learner is killed with work on the device."""
    found = only_learner(pairs, "--devices", DEVICE)
    cells = [
        f"{statistics.median(each):.1f} ({max(each):.1f})" for each in zip(*found, strict=True)
    ]
    head = ["", "seconds without an update: median (worst)", "to full strength"]
    return table("A killed learner", head, [["cartpole", *cells]])


def league(seconds: float, pairs: int) -> str:
    """Twelve policies with thirty copies on one device."""
    found = script("league_scale.py", "--devices", DEVICE, "--seconds", 2 * int(seconds))
    rows = [[name.replace("_", " "), str(value)] for name, value in found.items()]
    return table("A league of twelve on one device", ["", ""], rows)


TABLES = {
    "end_to_end": end_to_end,
    "passes": passes,
    "graphs": graphs,
    "several": several,
    "runners": runners,
    "forks": forks,
    "images": images,
    "pong_impala": partial(game, "pong", "impala", 18),
    "pong_ppo": partial(game, "pong", "ppo", 18),
    "breakout": partial(game, "breakout", "ppo", 300),
    "peers": peers,
    "tensors": tensors,
    "fractions": fractions,
    "killed": killed,
    "league": league,
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
