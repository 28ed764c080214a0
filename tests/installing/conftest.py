from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.alone import copy_of_the_checkout, install_juggler


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Juggler, as pip builds it."""
    directory = tmp_path_factory.mktemp("wheel")
    source = copy_of_the_checkout(directory / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", directory, source], check=True, timeout=300)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Juggler and all that it needs, without any extra."""
    directory = tmp_path_factory.mktemp("installed")
    install_juggler(wheel, directory)
    return directory
