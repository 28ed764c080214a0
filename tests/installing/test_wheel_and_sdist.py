"""What is built of Juggler holds what programs in other languages are made from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.alone import ROOT, copy_of_the_checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip fetches what it builds with

TEMPLATES = ["balance.toml", "nim.toml", "cpp/CMakeLists.txt", "cpp/simulator.cc", "cpp/nim.cc"]
TEMPLATES += ["node/package.json", "node/simulator.js", "node/nim.js"]
FOR_OTHERS = {f"examples/simulators/{name}" for name in TEMPLATES}
FOR_OTHERS |= {str(path.relative_to(ROOT)) for path in ROOT.glob("proto/**/*.proto")}
OF_ITS_OWN = {"juggler/driver/configs/cartpole.toml"}
OF_ITS_OWN |= {str(path.relative_to(ROOT)) for path in ROOT.glob("juggler/driver/watching/page/*")}


def test_the_wheel_has_the_messages_and_the_templates_where_they_find_one_another(
    wheel: Path,
) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    share = "juggler-0.1.0.data/data/share/juggler"
    assert len(FOR_OTHERS) > 10
    assert {f"{share}/{name}" for name in FOR_OTHERS} | OF_ITS_OWN <= files
    assert {name.partition("/")[0] for name in files if name.endswith(".py")} == {"juggler"}


def test_the_source_distribution_has_them_and_builds_the_client_as_well(tmp_path: Path) -> None:
    source = copy_of_the_checkout(tmp_path / "source")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, at=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [name for name in {*FOR_OTHERS, *OF_ITS_OWN} if not (unpacked / name).exists()] == []
    run(
        sys.executable,
        *["-m", "pip", "wheel", "-q", "--no-deps", "-w", ".."],
        unpacked / "client",
        at=source,
    )
    (client,) = tmp_path.glob("juggler_client-*.whl")
    assert "juggler_client/wire/frames.py" in zipfile.ZipFile(client).namelist()


def run(*command: object, at: Path) -> None:
    done = subprocess.run([*map(str, command)], cwd=at, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
