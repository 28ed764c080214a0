"""What a module costs: memory and CPU time of runs with 1 and with many modules.

    python benchmarks/modules.py --modules 1 16 --updates 40

16 agents play CartPole beside each other, and share the modules evenly, so that each run samples
the same. Memory is the proportional set size of all processes of the run, when each module has made
so many updates. CPU time is theirs for 1,000 trained agent steps from then on.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from commands import environment, table
from memory import pss

AGENTS = 16


def config(modules: int) -> str:
    agents = [f'cart_{a} = "module_{a * modules // AGENTS}"' for a in range(AGENTS)]
    return "\n".join(
        [
            'env = "juggler:CartPoles"',
            f"env_kwargs = {{num_agents = {AGENTS}, max_episode_steps = 100}}",
            'algorithm = "impala"',
            "num_env_runners = 1",
            "envs_per_runner = 16",
            "fragment_steps = 16",
            f"batch_size = {16 * 16 * AGENTS // modules // 2}",
            "[agents]",
            *agents,
        ]
    )


def newest(run: Path) -> dict[str, Any]:
    """The newest line of metrics; {} before the first."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1]) if whole else {}


def updates(line: dict[str, Any]) -> int:
    """The updates of the module that has made the fewest."""
    of_each = [module["updates"] for module in line.get("by_module", {}).values()]
    return min(of_each, default=line.get("updates", 0))


def wait(run: Path, process: subprocess.Popen[bytes], count: int) -> dict[str, Any]:
    while updates(line := newest(run)) < count:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended by itself with status {process.returncode}")
        time.sleep(0.2)
    return line


def cpu(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def measured(modules: int, count: int) -> dict[str, float]:
    """Memory in MB and milliseconds of CPU time for 1,000 steps."""
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        run, file = Path(directory, "run"), Path(directory, "config.toml")
        file.write_text(config(modules))
        command = [sys.executable, "-m", "juggler", "train", str(file), "--run-dir", str(run)]
        process = subprocess.Popen([*command, "--progress", "off"], env=environment())
        try:
            first = wait(run, process, count)
            parent = psutil.Process(process.pid)
            all_of_them = [parent, *parent.children(recursive=True)]
            began = cpu(all_of_them)
            megabytes = sum(pss(each.pid) for each in all_of_them)
            second = wait(run, process, 2 * count)
            spent = cpu(all_of_them) - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    steps = second["env_steps_trained"] - first["env_steps_trained"]
    return {"megabytes": megabytes, "cpu_ms": spent / steps * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--updates", type=int, default=40, help="before the measurement, and in it")
    said = parser.parse_args()
    rows = []
    for modules in said.modules:
        found = measured(modules, said.updates)
        rows.append([str(modules), f"{found['megabytes']:.0f}", f"{found['cpu_ms']:.0f}"])
        print(json.dumps({"modules": modules, **found}), flush=True)
    print(table("modules", ["modules", "memory, MB", "CPU, ms for 1,000 steps"], rows))


if __name__ == "__main__":
    main()
