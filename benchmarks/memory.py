"""Memory of a whole run: the sum of the proportional set sizes of all its processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jb-") as directory:
        command = [sys.executable, "-m", "juggler", "train", "cartpole", "--stop-return", "501"]
        command += [
            "--no-confirm",
            "--num-env-runners",
            str(given.runners),
            "--run-dir",
            f"{directory}/run",
        ]
        run = subprocess.Popen(
            [*command, "--progress", "off"], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        time.sleep(given.seconds)
        parent = psutil.Process(run.pid)
        sizes = {}
        for process in [parent, *parent.children(recursive=True)]:
            name = " ".join(process.cmdline())[:60]
            sizes[f"{process.pid} {name}"] = pss(process.pid)
        run.send_signal(signal.SIGTERM)
        run.wait(10)
    print(json.dumps({"processes": sizes, "megabytes": sum(sizes.values())}))


def pss(pid: int) -> float:
    """A process's own memory, and its share of memory held with others, in megabytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1000
    raise RuntimeError(f"no Pss of {pid}")


if __name__ == "__main__":
    main()
