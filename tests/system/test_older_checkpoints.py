"""A run that an earlier version of Juggler wrote, kept as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.place import Place, assert_books_balance, summary

#: CartPole by IMPALA, 2 updates, written under version 2 of the protocol: one module, whose id is
#: "default" in the tree and stands nowhere else.
KEPT = Path(__file__).parents[1] / "support" / "run_of_protocol_2"


def test_an_older_checkpoint_resumes_and_plays(place: Place) -> None:
    before = summary(KEPT)
    shutil.copytree(KEPT, place.path / "run")
    evaluate = ("evaluate", "run", "--episodes", 3)
    answers = place.run_in_turn(evaluate, ("train", "--resume", "run", "--stop-steps", 9000))
    assert [status for status, _ in answers] == [0, 0], answers
    assert "3 episodes" in answers[0][1]
    after = summary(place.path / "run")
    assert_books_balance(place.path / "run")
    assert after["updates"] > before["updates"]
    assert after["env_steps_trained"] >= 9000
    assert after["weights_version"][0] == before["weights_version"][0] + 1
    assert "restart" in after["env_steps_dropped"], "what was in flight at the cut"
