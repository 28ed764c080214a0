"""A run with frequent faults needs no more at its end."""

from __future__ import annotations

import json
import sys

import pytest
from support.place import REPOSITORY, Place


@pytest.mark.long
def test_nothing_grows_while_workers_come_and_go(place: Place) -> None:
    soak = [str(REPOSITORY / "benchmarks" / "soak.py"), "--minutes", "2"]
    run = place.start_program([sys.executable, *soak])
    assert run.wait(280) == 0, run.output
    found = json.loads(run.output.splitlines()[-1])
    faults = {
        "SIGKILL envrunner 1",
        "SIGSTOP envrunner 1",
        "SIGKILL learner 1",
        "SIGSTOP learner 1",
    }
    assert set(found["faults"]) == faults
    assert found["restarts"] >= 8, "the last may be too late to be noticed"
    assert found["books_balance"]
    lasting = {"driver", "learner 0", "envrunner 0"}
    assert lasting <= set(found["processes"])
    for name in lasting:
        growth = found["processes"][name]
        for key in ("descriptors", "threads"):
            # A worker that is there takes some of them that one that is not does not.
            assert growth[key]["last_third"] <= growth[key]["first_third"] + 3, (name, growth)
        # Allocators have not settled within two minutes, so that only a flood shows: 20 minutes of
        # the script say more.
        assert growth["rss"]["last_third"] <= growth["rss"]["first_third"] + 40, (name, growth)
