"""How the page words numbers, in its own JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

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


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_a_duration_is_rounded_before_it_is_split() -> None:
    words = resources.files("juggler") / "driver/watching/page/words.js"
    code = (
        f"const {{ duration }} = await import({json.dumps(str(words))});"
        f"console.log(JSON.stringify({json.dumps(list(DURATIONS))}.map(duration)));"
    )
    command = [NODE or "", "--input-type=module", "--eval", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert dict(zip(DURATIONS, json.loads(done.stdout), strict=True)) == DURATIONS
