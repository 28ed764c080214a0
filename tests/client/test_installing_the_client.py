"""The client as its own distribution, without the rest of Juggler."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.gateway_world import GatewayWorld

ROOT = Path(__file__).parents[2]
SIMULATOR = """
import importlib.util, sys
from juggler_client import box, connect, discrete

def pole(place, speed, angle, push):
    speed += 0.2 * (push - 0.5) - 0.05 * angle
    return [place + 0.02 * speed, speed, angle + 0.02 * speed]

with connect(sys.argv[1], box([3]), discrete(2), name="pole") as session:
    state, steps, reward, fell = [0.0, 0.0, 0.1], 0, 0.0, False
    for _ in range(40):
        action = session.step(state, reward, fell)
        if fell:
            assert action is None
            state, steps, reward, fell = [0.0, 0.0, 0.1], 0, 0.0, False
            continue
        assert action in (0, 1)
        state, steps, reward = pole(*state, action), steps + 1, 1.0
        fell = steps == 9
there = ["torch", "gymnasium", "juggler", "ml_dtypes"]
print([name for name in there if importlib.util.find_spec(name)])
"""


@pytest.mark.long
def test_it_is_installed_and_plays_without_torch_gymnasium_or_the_rest(tmp_path: Path) -> None:
    # A copy: building writes beside the sources.
    shutil.copytree(ROOT / "client", tmp_path / "client", ignore=shutil.ignore_patterns("build"))
    (tmp_path / "juggler").symlink_to(ROOT / "juggler")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    wheels = tmp_path / "wheels"
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", wheels, tmp_path / "client")
    (wheel,) = wheels.glob("juggler_client-*.whl")
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in files} == {"juggler_client"}, (
        "beside the whole of Juggler, no file is there twice"
    )
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, *pip, "--python", python, "install", "--no-compile", wheel)
    with GatewayWorld(rows=1, steps=8) as world:
        world.ask(8)  # more than there will be: steps beyond the request wait
        assert run(python, "-I", "-c", SIMULATOR, world.address) == "[]\n"
        world.wait_for(4)
    ended = [episode for _, episodes in world.batches for episode in episodes]
    assert ended[:2] == [(9.0, 9)] * 2


def run(*command: object) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
