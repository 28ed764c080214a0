"""What the Docker image is built of, without a Docker engine."""

from __future__ import annotations

import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def is_sent(path: str) -> bool:
    """Whether .dockerignore's last matching line sends a file."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parents = [path, *map(str, Path(path).parents)]
        if any(fnmatch(each, pattern.replace("**/", "*")) for each in parents):
            sent = line.startswith("!")
    return sent


def build(into: Path) -> None:
    """Do the Dockerfile's COPY lines with this repository's files."""
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if not line.startswith("COPY "):
            continue
        *sources, target = line.split()[1:]
        at = into / target.removeprefix("/opt/source").strip("/")
        for source in sources:
            for path in [ROOT / source, *(ROOT / source).rglob("*")]:
                name = str(path.relative_to(ROOT))
                if path.is_dir() or not is_sent(name) or "__pycache__" in name:
                    continue
                is_tree = (ROOT / source).is_dir()
                to = at / (path.relative_to(ROOT / source) if is_tree else path.name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)


def test_the_image_has_all_that_a_simulator_in_another_language_needs(tmp_path: Path) -> None:
    build(tmp_path)
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    for to, patterns in tools["setuptools"]["data-files"].items():
        for pattern in patterns:
            here = {path.name for path in ROOT.glob(pattern)}
            there = {path.name for path in tmp_path.glob(pattern)}
            assert there == here != set(), f"{to} lacks {here - there}"
    assert not is_sent("examples/cartpole.py")
    assert not is_sent("examples/simulators/node/node_modules/a.js")
