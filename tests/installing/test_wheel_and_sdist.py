"""Built distributions include the files for other languages."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support.alone import ROOT, copy_of_the_checkout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # pip fetches what it builds with

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = ["balance.toml", "nim.toml", "cpp/CMakeLists.txt", "cpp/simulator.cc", "cpp/nim.cc"]
TEMPLATES += ["node/package.json", "node/simulator.js", "node/nim.js"]
FOR_OTHERS = {f"examples/simulators/{name}" for name in TEMPLATES}
FOR_OTHERS |= {str(path.relative_to(ROOT)) for path in ROOT.glob("proto/**/*.proto")}
#: Everything in the package, data files among it.
PACKAGE = {
    str(path.relative_to(ROOT))
    for path in ROOT.glob("juggler/**/*")
    if path.is_file() and "__pycache__" not in path.parts
}


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (file,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        about = email.message_from_bytes(packed.read(file))
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert about["Requires-Python"] == ">=3.11"
    classifiers = about.get_all("Classifier") or []
    versions = {each.rpartition(" ")[2] for each in classifiers if ":: 3." in each}
    assert versions == {"3.11", "3.12", "3.13", "3.14"}, "the tested ones"
    assert about["Version"] == PROJECT["version"]
    assert set(about.get_all("Provides-Extra") or []) == PROJECT["optional-dependencies"].keys()


@pytest.mark.long
def test_the_wheel_has_the_whole_package_and_what_other_languages_need_where_it_is_found(
    wheel: Path,
) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    share = f"juggler-{PROJECT['version']}.data/data/share/juggler"
    assert len(FOR_OTHERS) > 10
    assert {f"{share}/{name}" for name in FOR_OTHERS} <= files
    assert {"juggler/py.typed", "juggler/driver/configs/cartpole.toml"} <= PACKAGE
    assert {"juggler/templates/project/train.toml"} <= PACKAGE
    assert PACKAGE - files == set()
    assert {name.partition("/")[0] for name in files if name.endswith(".py")} == {"juggler"}


@pytest.mark.long
def test_the_source_distribution_has_all_of_it_and_builds_the_client_as_well(
    tmp_path: Path,
) -> None:
    source = copy_of_the_checkout(tmp_path / "source")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, at=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [
        name for name in {*FOR_OTHERS, *PACKAGE, "CHANGELOG.md"} if not (unpacked / name).exists()
    ] == []
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
