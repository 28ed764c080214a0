"""Workers in containers of one host, which have networks and processes of their own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import psutil
import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    trained_steps,
)

from juggler.runtime.streams.memory_sockets import MemorySocket
from juggler.runtime.streams.shared_directory import shared_address

OWN_PROCESSES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _shared(process: psutil.Process) -> set[str]:
    """The shared memories that a process has mapped, by their inodes."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:juggler" in line}


@pytest.mark.long
def test_a_shared_directory_lets_containers_share_memory_and_outlives_a_killed_learner(
    place: Place, two_hosts: tuple[list[str], list[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs the unshare command (Debian: util-linux)")
    first, second, host = two_hosts
    directory, shared = place.path / "run", place.path / "shared"
    shared.mkdir(mode=0o700)
    juggler = [sys.executable, "-m", "juggler"]
    secret = ["--token-file", str(place.write("token", "a secret\n"))]
    # Whatever its size, a batch goes through shared memory.
    variables = {"JUGGLER_SHARED_DIR": str(shared), "JUGGLER_SHARED_MEMORY": "0"}
    options = ["--run-dir", "run", "--stop-return", "501", "--checkpoint-seconds", "1"]
    options += ["--bind", "0.0.0.0:5005", "--insecure"]
    driver = place.start_program([*first, *juggler, "driver", "cartpole", *options, *secret])
    driver.wait_for("waiting for workers at", 60)
    dial = ["--driver", f"{host}:5005", *secret]

    def learner() -> Command:
        data = ["--bind", "0.0.0.0:0", "--advertise", f"{host}:0", "--insecure"]
        program = [*first, *juggler, "learner", *dial, *data, "--receivers", "1"]
        return place.start_program(program, **variables)

    def runner() -> Command:
        program = [*second, *OWN_PROCESSES, *juggler, "envrunner", *dial]
        return place.start_program(program, **variables)

    workers = [learner(), runner(), runner()]

    def said() -> str:
        return "\n".join(each.output for each in (driver, *workers))

    def all_share() -> bool:
        learns, *play = map(place.worker, ("learner 0", "envrunner 0", "envrunner 1"))
        try:
            return all(_shared(each) & _shared(learns) for each in play)
        except FileNotFoundError:  # one has just ended
            return False

    eventually(lambda: trained_steps(directory) and env_runners(directory) == 2, 90, said)
    eventually(all_share, 60, said)
    place.worker("learner 0").kill()
    driver.wait_for("learner-0 left", 30)
    reached = trained_steps(directory)
    workers[0] = learner()
    eventually(lambda: trained_steps(directory) > reached, 90, said)
    eventually(all_share, 60, said)
    assert "sockets what could lie in shared memory" not in said()
    assert "shares no memory" not in said()
    assert "reads weights from the learner itself" not in said()

    driver.process.terminate()
    for each, status in ((driver, 143), *((worker, 0) for worker in workers)):
        assert each.wait(60) == status, said()
    assert_books_balance(directory)
    place.assert_nothing_is_left()
    monkeypatch.setenv("JUGGLER_SHARED_DIR", str(shared))
    MemorySocket(shared_address("next")).close()  # what the next process does that starts
    assert list(shared.iterdir()) == [], "sockets of killed processes are gone"


@pytest.mark.long
def test_a_worker_says_that_its_shared_directory_cannot_be_used(place: Place) -> None:
    started = place.run("envrunner", "--driver", "127.0.0.1:1", JUGGLER_SHARED_DIR="/nowhere")
    assert started.status == 1
    assert "JUGGLER_SHARED_DIR=/nowhere: No such file or directory" in started.output
