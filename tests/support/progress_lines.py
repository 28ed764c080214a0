"""What a run that is shown is like."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from juggler.driver.record.live_progress import LiveProgress

CONFIG = {
    "env": "CartPole-v1",
    "algorithm": "impala",
    "seed": 3,
    "stop_return": 475.0,
    "stop_steps": 2_000_000,
    "stop_seconds": None,
}
SUMMARY = {
    "solved": True,
    "episode_return_mean": 480.25,
    "env_steps_trained": 312_000,
    "wall_time": 9.4,
    "reason_for_stop": "solved",
    "run_dir": "runs/cartpole",
    "checkpoint": "runs/cartpole/checkpoints/000000300",
}


def metrics_line(wall_time: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "wall_time": wall_time,
        "env_steps_sampled": 104_096,
        "env_steps_trained": 100_000,
        "env_steps_dropped": {},
        "updates": 1200,
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "episode_return_mean": 237.5,
        "evaluation_return_mean": None,
        "steps_per_second": 51_234.5,
        "num_env_runners": 2,
        "num_learners": 1,
        "restarts": 0,
        **changes,
    }


@contextmanager
def live_display(
    width: int, config: dict[str, Any] = CONFIG
) -> Iterator[tuple[LiveProgress, io.StringIO]]:
    """A live display in a terminal of that width, stopped in any case."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=30, force_terminal=True, color_system=None)
    progress = LiveProgress(console)
    progress.start(config)
    try:
        yield progress, screen
    finally:
        progress._live.stop()


def panel(progress: LiveProgress, width: int) -> str:
    """What the display shows now."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(progress)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
