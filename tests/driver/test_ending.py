"""What people are told while a run that is to end waits for its last checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_events_world import SHAPE, WorkersWorld

from juggler.driver.config import RunConfig
from juggler.driver.driver import Ending


def told_at_the_end(directory: Path, reason: str) -> list[str]:
    """By a run whose learner, asked for its state, says that it lives, and no more."""
    world = WorkersWorld(directory)
    world.ask_for_a_snapshot()
    world.resident["learner-0"] = 1
    local = SimpleNamespace(stop_restarting=lambda: None, keep_failing=lambda _: False)
    world.parts.local = cast(Any, local)
    nothing_comes = SimpleNamespace(drain=lambda seconds, done: None)
    upkeep = SimpleNamespace(
        standstill=SimpleNamespace(hung_runners=lambda _: ""), write_line=lambda: {}
    )
    ending = Ending(
        world.parts,
        cast(Any, nothing_comes),
        cast(Any, upkeep),
        world.parts.hub,
        cast(Any, SimpleNamespace(path=directory)),
    )
    world.parts.end.stop(reason)
    ending.wind_down()
    return [text for text in world.told.messages if "waiting for the last checkpoint" in text]


@pytest.mark.parametrize(
    ("reason", "way_out"),
    [
        ("interrupted", "a second Ctrl-C leaves without it"),
        ("terminated", "a second Ctrl-C leaves without it"),
        ("stop_steps", "Ctrl-C twice leaves without it"),
        ("solved", "Ctrl-C twice leaves without it"),
    ],
)
def test_people_are_told_once_how_to_leave_without_the_last_checkpoint(
    tmp_path: Path, reason: str, way_out: str
) -> None:
    assert told_at_the_end(tmp_path, reason) == [f"waiting for the last checkpoint; {way_out}"]


def test_a_run_in_a_thread_says_nothing_of_ctrl_c_which_is_the_programs(tmp_path: Path) -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(told_at_the_end(tmp_path, "solved")))
    thread.start()
    thread.join()
    assert told == ["waiting for the last checkpoint"]


@pytest.mark.parametrize(
    ("env", "how"),
    [
        ("CartPole-v1", "juggler train --resume "),
        ("__main__:Maze", "juggler.resume("),
    ],
)
def test_a_run_that_needs_a_script_is_not_said_to_go_on_by_a_command(
    tmp_path: Path, env: str, how: str
) -> None:
    world = WorkersWorld(tmp_path)
    world.parts.only_local = True
    world.parts.config = RunConfig.from_flat({**SHAPE, "env": env})
    world.parts.core = cast(Any, SimpleNamespace(has_updated=True))
    directory = SimpleNamespace(path=tmp_path, newest_checkpoint=lambda: None)
    nothing = cast(Any, None)
    ending = Ending(world.parts, nothing, nothing, world.parts.hub, cast(Any, directory))
    ending._newest_update = lambda: 7  # type: ignore[method-assign]
    assert ending.how_to_go_on().startswith(f"\nTo go on from update 7: {how}")
