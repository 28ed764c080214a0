"""A run of an earlier version of Juggler, unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.place import assert_books_balance, status_of, summary

#: CartPole by IMPALA, 2 updates, written under version 2 of the protocol: one module, whose id is
#: "default" in the tree and stands nowhere else.
KEPT = Path(__file__).parents[1] / "support" / "run_of_protocol_2"


@pytest.mark.usefixtures("local_workers")
def test_an_older_checkpoint_resumes_and_plays(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, run = summary(KEPT), in_a_directory / "run"
    shutil.copytree(KEPT, run)
    assert status_of("evaluate", "run", "--episodes", 3) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert status_of("train", "--resume", "run", "--stop-steps", 9000) == 0
    after = summary(run)
    assert_books_balance(run)
    assert after["updates"] > before["updates"]
    assert after["env_steps_trained"] >= 9000
    assert after["weights_version"][0] == before["weights_version"][0] + 1
    assert "restart" in after["env_steps_dropped"], "what was in flight at the cut"
