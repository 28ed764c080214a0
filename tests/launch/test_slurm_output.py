"""What `juggler launch slurm` shows of the driver's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from juggler.launch import slurm
from juggler.launch.engine import ROLES, Launch
from juggler.launch.slurm import SlurmRun


@pytest.mark.slow
def test_each_character_is_shown_once_and_nothing_of_the_launch_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *_: "")  # nothing is in the queue
    launch = Launch(tmp_path / "run", "cartpole", insecure=True)
    log = launch.directory / "logs" / "driver.log"
    log.parent.mkdir(parents=True)
    log.write_text("what the first life of the run has said\n")
    run = SlurmRun(launch, dict.fromkeys(ROLES, 1), lambda _: None)
    run.submit()
    for part in (b"return 500 \xc2", b"\xb1 0\n"):
        with log.open("ab") as file:
            file.write(part)
        run.poll()
    run.stop_showing()
    assert capfd.readouterr().out == "return 500 ± 0\n"
