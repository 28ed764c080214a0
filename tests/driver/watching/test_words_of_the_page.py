"""How the page words numbers and tells what they are of, in its own JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

NODE = shutil.which("node")
DURATIONS = {
    0: "0.0 s",
    9.94: "9.9 s",
    9.96: "10 s",
    59.4: "59 s",
    59.6: "1 min 0 s",
    119.7: "2 min 0 s",
    3599.4: "59 min 59 s",
    3599.6: "1 h 0 min",
    7259: "2 h 1 min",
    172_800: "2 days",
}


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_a_duration_is_rounded_before_it_is_split() -> None:
    code = f"{json.dumps(list(DURATIONS))}.map(duration)"
    assert dict(zip(DURATIONS, said("words.js", "duration", code), strict=True)) == DURATIONS


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_a_number_of_the_environment_is_told_apart_from_the_agent_that_gave_it() -> None:
    keys = ["by_agent/b/10/x", "by_agent/b/9/x", "info/b/10/far/off/mean", "info/b/9/far/off/mean"]
    told = {"seen": "", "all": True, "keys": [*keys, "info/a/b/mean"], "rows": [[1, 1, 1, 1, 1]]}
    code = f"(() => {{ const c = new Curves(); c.take({json.dumps(told)}); return c.numbers() }})()"
    assert said("curves.js", "Curves", code) == [
        {"key": "b/10/far/off", "title": "far/off", "agent": "b/10", "part": 1},
        {"key": "b/9/far/off", "title": "far/off", "agent": "b/9", "part": 0},
        {"key": "a/b", "title": "a/b"},
    ]


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_a_number_is_of_the_agent_whose_whole_name_it_begins_with() -> None:
    keys = ["by_agent/a/x", "by_agent/a/b/x", "info/a/b/far/mean", "info/a/far/mean"]
    told = {"seen": "", "all": True, "keys": keys, "rows": [[1, 1, 1, 1]]}
    code = f"(() => {{ const c = new Curves(); c.take({json.dumps(told)}); return c.numbers() }})()"
    assert said("curves.js", "Curves", code) == [
        {"key": "a/b/far", "title": "far", "agent": "a/b", "part": 1},
        {"key": "a/far", "title": "far", "agent": "a", "part": 0},
    ]


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_an_activity_has_the_same_colour_in_whatever_order_it_comes() -> None:
    learner = ["waiting", "collate", "update", "publish", "receive", "connectors"]
    runner = ["waiting", "environment", "inference", "frames", "connectors"]
    for activities in (learner, runner, ["messages", "gathering", "inference"]):
        places = said("details.js", "placeOf", f"{json.dumps(activities)}.map(placeOf)")
        assert len(set(places)) == len(activities), "those of a process are told apart"
        assert max(places) < 14
    assert 0 <= said("details.js", "placeOf", '["anything"].map(placeOf)')[0] < 14


@pytest.mark.long
@pytest.mark.skipif(NODE is None, reason="Node is not installed")
@pytest.mark.parametrize("width", [180, 240, 420, 900])
def test_the_first_and_the_last_number_are_always_below_a_chart(width: int) -> None:
    place = f"(x) => 52 + (x - 640) * {(width - 62) / (65123 - 640)}"
    found = said("charts.js", "labels", f"labels([640, 65123], {place}, {6 if width > 420 else 3})")
    assert (found[0][1], found[-1][1]) == ("640", "65.1k")
    places = [at for at, *_ in found]
    assert places == sorted(places)
    assert len(found) > 2 or width < 300


def said(file: str, name: str, code: str) -> Any:
    """What an expression is, with a name that a file of the page exports."""
    path = resources.files("juggler") / "driver/watching/page" / file
    code = (
        f"const {{ {name} }} = await import({json.dumps(str(path))});"
        f"console.log(JSON.stringify({code}));"
    )
    command = [NODE or "", "--input-type=module", "--eval", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
