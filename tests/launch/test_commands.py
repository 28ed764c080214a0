from __future__ import annotations

from pathlib import Path

import pytest

from juggler.launch.commands import Launch, LaunchError


def test_runs_of_the_same_name_in_other_directories_have_names_of_their_own() -> None:
    one, other = Launch(Path("/a/run"), ""), Launch(Path("/b/run"), "")
    assert one.tag.startswith("run-")
    assert one.tag != other.tag
    assert one.tag == Launch(Path("/a/run"), "cartpole").tag


def test_several_learners_are_allowed_where_gradients_may_be_plain() -> None:
    Launch(Path("run"), "").must_allow(1)
    Launch(Path("run"), "", plain_gradients=True).must_allow(2)
    Launch(Path("run"), "", insecure=True).must_allow(2)
    with pytest.raises(LaunchError, match="2 learners add up gradients without encryption"):
        Launch(Path("run"), "").must_allow(2)
