"""Learner groups of which each test makes its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.group_specs import MODEL, spec

import juggler
from juggler.runtime.episodes.batch import EpisodeBatch

MakeBatch = Callable[..., EpisodeBatch]
pytestmark = pytest.mark.usefixtures("one_forkserver")
PATIENCE = 60.0  # seconds until a test fails; nothing takes as long


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"devices": "gpu"}, "'gpu' is not a device; expected"),
        ({"devices": "auto,cpu"}, "auto stands alone"),
        ({"updates_in_flight": 0}, "updates_in_flight = 0"),
        ({"snapshot_updates": 0}, "snapshot_updates = 0"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_a_group_that_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(juggler.ConfigError, match=message):
        juggler.LearnerGroup({"main": spec()}, **keys)
    with pytest.raises(juggler.ConfigError, match="at least one module"):
        juggler.LearnerGroup({})


@pytest.mark.long
def test_a_killed_learner_of_one_module_does_not_hold_up_the_updates_of_another(
    make_batch: MakeBatch,
) -> None:
    with juggler.LearnerGroup({"main": spec(), "rival": spec()}, devices="fake:2") as group:
        assert [place.shard for place in group.placement.values()] == [0, 1]
        group.update_from_episodes({"main": [make_batch()], "rival": [make_batch()]})
        ours, theirs = group._shards
        worker, victim = ours.worker, theirs.worker
        assert victim is not None
        psutil.Process(victim.pid).kill()
        with group._changed:
            assert group._changed.wait_for(lambda: not theirs.set_up, PATIENCE)
        meanwhile = 0
        for update in range(2, 7):
            done = group.update_from_episodes({"main": [make_batch(seed=update)]})
            assert done["main"].updates == update
            meanwhile += not theirs.set_up
        assert meanwhile >= 1, "while the rival had no process, or one that was not set up"
        done = group.update_from_episodes({"main": [make_batch()], "rival": [make_batch()]})
        assert (done["main"].updates, done["rival"].updates) == (7, 1)
        assert ours.worker is worker
        assert "by SIGKILL. Module 'rival' goes back to update 0 of 1." in theirs.lost
        group.close()
        with pytest.raises(RuntimeError, match="the learner group is closed"):
            group.update_from_episodes({"main": [make_batch()]})


@pytest.mark.slow
def test_a_shard_that_hangs_is_killed_and_another_one_is_started_for_another_module(
    make_batch: MakeBatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gated = {
        **spec(),
        "model": {**MODEL, "gate": str(gate)},
        "module": "support.gated_module:Gated",
    }
    with juggler.LearnerGroup({"gated": gated}, devices="cpu", hang_seconds=4) as group:
        with pytest.raises(juggler.UpdateFailed, match="lost: hung: no progress for"):
            group.update_from_episodes({"gated": [make_batch()]})
        gate.touch()
        group.add_module("second", spec())
        assert [place.shard for place in group.placement.values()] == [0, 1]
        done = group.update_from_episodes({"gated": [make_batch()], "second": [make_batch()]})
        assert (done["gated"].updates, done["second"].updates) == (1, 1)


_SCRIPT = """
import sys
import juggler
from gymnasium import spaces

spec = juggler.LearnerSpec(
    observation_space=spaces.Box(-1, 1, (2,)), action_space=spaces.Discrete(2)
)
group = juggler.LearnerGroup({"main": spec})
print(*group.get_weights()["main"])
assert "torch" not in sys.modules
print(group._shards[0].worker.pid)
"""


@pytest.mark.slow
def test_a_script_needs_no_torch_and_leaves_no_process_though_it_closes_nothing(
    run_python: Callable[..., str],
) -> None:
    *names, pid = run_python("-c", _SCRIPT).split()
    assert "policy_head.weight" in names
    assert not psutil.pid_exists(int(pid))
