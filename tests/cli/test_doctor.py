"""`juggler doctor`, on this machine and on one with defects."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.place import status_of

from juggler.cli import doctor as checks
from juggler.cli.findings import Finding
from juggler.runtime.actors import resources, temporary


def only(check: Callable[[], Iterator[Finding]]) -> dict[str, Finding]:
    return {found.name: found for found in check()}


@pytest.mark.slow
def test_it_says_what_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("doctor", "--json") == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert torch.__version__ in found["torch"]["said"]
    assert {found[name]["state"] for name in ("gRPC", "sockets", "processes", "python")} == {"ok"}
    assert "cryptography" in found["extra certs"]["said"]
    assert {each["state"] for each in found.values()} <= {"ok", "absent", "warning"}
    for each in found.values():
        assert (each["state"] in ("warning", "problem")) <= bool(each["advice"]), each


def test_a_problem_is_told_with_what_to_do_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "CHECKS", (checks._python, checks._sockets))
    assert status_of("doctor") == 0
    assert "To start: juggler train cartpole" in capsys.readouterr().out

    def refuses() -> None:
        raise PermissionError(13, "Permission denied", "/tmp")

    monkeypatch.setattr(temporary, "HeldDirectory", refuses)
    assert status_of("doctor") == 1
    said = capsys.readouterr().out
    assert "problem  sockets" in said
    assert "→ make /" in said
    assert "Runs may not work here" in said


@pytest.mark.long
def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_TORCH", "raise ImportError('libcudart.so is not there')")
    found = only(checks._torch)["torch"]
    assert (found.state, found.said) == ("problem", "ImportError: libcudart.so is not there")
    assert "-m pip install torch" in found.advice


@pytest.mark.parametrize(("build", "told"), [("", "no CUDA"), ("12.8", "torch sees none")])
def test_a_gpu_that_torch_does_not_see_is_a_warning(
    build: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    monkeypatch.setattr(checks, "_GPUS", tmp_path)
    (found,) = checks._gpus([], build)
    assert found.state == "warning"
    assert told in found.said
    (found,) = checks._gpus(["NVIDIA H100"], "12.8")
    assert (found.state, found.said) == ("ok", "NVIDIA H100")


def test_a_port_that_is_taken_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(checks, "_PORT", taken.getsockname()[1])
        assert only(checks._ports)["ports"].state == "warning"


def test_a_python_without_files_in_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(checks._shared_memory)["files in memory"].state == "ok"
    monkeypatch.delattr(os, "memfd_create")
    found = only(checks._shared_memory)
    assert found["files in memory"].state == "warning"
    assert "built without os.memfd_create" in found["files in memory"].said
    assert "shared memory" in found


@pytest.mark.parametrize(("minor", "package"), [(13, "pygame"), (14, "pygame-ce")])
def test_an_extra_needs_what_it_brings_with_this_version_of_python(
    monkeypatch: pytest.MonkeyPatch, minor: int, package: str
) -> None:
    requirements = [
        'imageio-ffmpeg>=0.5; extra == "video"',
        'pygame>=2.1.3; python_version < "3.14" and extra == "video"',
        'pygame-ce>=2.5.6; python_version >= "3.14" and extra == "video"',
    ]
    monkeypatch.setattr(checks.metadata, "requires", lambda _: requirements)
    monkeypatch.setattr(checks.sys, "version_info", (3, minor, 1))
    monkeypatch.setattr(checks, "_version", lambda name: "0.6" if "ffmpeg" in name else "")
    found = only(checks._extras)["extra video"]
    assert (found.state, found.said) == ("absent", f"without {package}")
    assert "[video]" in found.advice


def test_a_check_that_breaks_is_a_problem_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def _broken_glass() -> Iterator[Finding]:
        raise OSError("no such call in this sandbox")
        yield

    monkeypatch.setattr(checks, "CHECKS", (_broken_glass, checks._python))
    broken, python, _ = checks.findings()
    assert (broken.name, broken.state) == ("broken glass", "problem")
    assert "no such call in this sandbox" in broken.said
    assert python.state == "ok"


def test_cores_and_memory_are_those_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited = resources.usable_cores()
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert resources.usable_cores() == unlimited or unlimited < resources.usable_cores()
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 20}\n")
    assert resources.usable_cores() == 0.5
    assert resources.usable_memory() == 2 << 20
    assert only(checks._cores)["cores"].state == "warning"
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("25000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert resources.usable_cores() == 0.25


@pytest.mark.parametrize("line", ["0::/outer/inner", "4:cpu,cpuacct:/outer/inner"])
def test_cores_are_those_of_the_cgroups_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    first = "cpu" in line
    outer = tmp_path.joinpath(*["cpu"] * first, "outer")
    outer.mkdir(parents=True)
    (outer / "cpu.max").write_text("50000 100000\n")
    (outer / "cpu.cfs_quota_us").write_text("50000\n")
    (outer / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    read = resources._text
    own = Path("/proc/self/cgroup")
    monkeypatch.setattr(resources, "_text", lambda path: line if path == own else read(path))
    assert resources.usable_cores() == 0.5


def test_files_that_the_kernel_keeps_in_the_memory_of_a_container_are_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.stat").write_text(
        f"anon {1 << 20}\nshmem 4096\ninactive_file {1 << 19}\nactive_file {1 << 20}\n"
    )
    assert resources.usable_memory() == 3 << 19
    first = tmp_path / "memory"
    first.mkdir()
    (first / "memory.limit_in_bytes").write_text(f"{2 << 20}\n")
    (first / "memory.usage_in_bytes").write_text(f"{2 << 20}\n")
    below = f"total_inactive_file {1 << 18}\ntotal_active_file {1 << 19}\n"
    (first / "memory.stat").write_text(f"inactive_file 0\nactive_file 0\n{below}")
    assert resources.usable_memory() == 3 << 18
