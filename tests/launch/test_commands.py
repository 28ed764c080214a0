from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from juggler.cli import learner
from juggler.launch.commands import Launch
from juggler.learner.process import learner_worker
from juggler.learner.process.program import LearnerProgram


def test_runs_of_the_same_name_in_other_directories_have_names_of_their_own() -> None:
    one, other = Launch(Path("/a/run"), ""), Launch(Path("/b/run"), "")
    assert one.tag.startswith("run-")
    assert one.tag != other.tag
    assert one.tag == Launch(Path("/a/run"), "cartpole").tag


def test_names_of_runs_are_names_for_engines() -> None:
    label = Launch(Path("/runs/My run_of.2026: très longue, much too long"), "").label
    assert re.fullmatch("juggler-my-run-of-2026-tr-s-long-[0-9a-f]{8}", label)
    assert re.fullmatch("juggler-[0-9a-f]{8}", Launch(Path("/runs/___"), "").label)


@pytest.mark.parametrize(
    ("options", "advertised"),
    [
        (["--bind", "0.0.0.0:0"], f"{socket.gethostname()}:0"),
        (["--bind", "0.0.0.0:5006", "--advertise", "gpu1:5006"], "gpu1:5006"),
        (["--bind", "127.0.0.1:0"], ""),
    ],
)
def test_a_learner_that_listens_everywhere_is_dialed_at_the_name_of_its_host(
    monkeypatch: pytest.MonkeyPatch, options: list[str], advertised: str
) -> None:
    programs: list[LearnerProgram] = []
    monkeypatch.setattr(learner_worker, "main", programs.append)
    assert learner.run(["--driver", "127.0.0.1:1", "--reattach-seconds", "0", *options]) == 0
    assert [each.advertise for each in programs] == [advertised]
