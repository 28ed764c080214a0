"""The Makefile's choice of torch in `make install`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.alone import ROOT

PYTHON = """#!/bin/sh
echo "$*" >> "$SAID_TO_PIP"
case "$*" in
  *"index versions"*) exit "$UNREACHABLE" ;;
  *"config list"*) echo "$CONFIGURED"; exit ;;
esac
echo "Collecting numpy>=1.26 (from juggler==0.2.0)"
echo "  Using cached numpy.whl"
echo "Installing collected packages: numpy"
"""
CPU = "https://download.pytorch.org/whl/cpu"


class Machine:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._script("venv/bin/python", PYTHON)

    def has_a_gpu(self, yes: bool) -> None:
        self._script("bin/nvidia-smi", f"#!/bin/sh\nexit {0 if yes else 9}\n")

    def install(
        self, *options: str, reachable: bool = True, configured: str = "global.timeout='60'"
    ) -> tuple[list[str], str]:
        """-> what pip is told, and what people are."""
        for name in ("venv/installed", "said"):
            (self._path / name).unlink(missing_ok=True)
        variables = {
            "PATH": f"{self._path / 'bin'}:{os.environ['PATH']}",
            "SAID_TO_PIP": str(self._path / "said"),
            "CONFIGURED": configured,
            "UNREACHABLE": "0" if reachable else "1",
        }
        venv = f"VENV={self._path / 'venv'}"
        make = ["make", "--no-print-directory", "-C", ROOT, venv, "install", *options]
        kept = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX"}
        done = subprocess.run(make, env={**kept, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        told = (self._path / "said").read_text().splitlines()
        return [line for line in told if " install " in line], done.stdout

    def _script(self, name: str, text: str) -> None:
        file = self._path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.long
def test_without_a_gpu_torch_is_that_for_the_cpu_and_the_other_one_is_named(
    machine: Machine,
) -> None:
    machine.has_a_gpu(False)
    (torch, juggler), said = machine.install()
    assert torch.endswith(f"--index-url {CPU} torch")
    assert juggler.endswith("-c constraints.txt -e .")
    assert "make clean install TORCH_INDEX=" in said
    assert said.splitlines()[-2:] == ["  numpy>=1.26", "  unpacking them"]


@pytest.mark.long
def test_with_a_gpu_or_where_that_is_asked_for_it_comes_from_the_usual_index(
    machine: Machine,
) -> None:
    machine.has_a_gpu(True)
    (torch, _), _ = machine.install()
    assert torch.endswith("-c constraints.txt torch")
    machine.has_a_gpu(False)
    (torch, _), _ = machine.install("TORCH_INDEX=")
    assert torch.endswith("-c constraints.txt torch")


@pytest.mark.long
@pytest.mark.parametrize("key", ["global.index-url", "install.find-links"])
def test_an_index_that_somebody_has_told_pip_is_not_overruled(machine: Machine, key: str) -> None:
    machine.has_a_gpu(False)
    (torch, _), said = machine.install(configured=f"{key}='https://packages.example'")
    assert torch.endswith("-c constraints.txt torch")
    assert CPU not in said


@pytest.mark.long
def test_an_index_that_cannot_be_reached_is_told_and_done_without(machine: Machine) -> None:
    machine.has_a_gpu(False)
    (torch, _), said = machine.install(reachable=False)
    assert torch.endswith("-c constraints.txt torch")
    assert f"no way to {CPU} from here" in said
