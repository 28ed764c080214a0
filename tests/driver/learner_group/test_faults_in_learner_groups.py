"""Learner groups with faults, and with impossible requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.batches import MakeBatch
from support.learner_groups import LEARNERS, MODEL, PATIENCE, SPACES, Gate, alone, same, spec
from support.processes import eventually

import juggler
from juggler.driver import learner_group


@pytest.mark.slow
def test_what_a_module_cannot_begin_with_is_said_and_it_is_not_there(
    group: juggler.LearnerGroup,
) -> None:
    state = group.save(["main"])["main"]
    with pytest.raises(juggler.LearnerGroupError, match=r"module 'x': .* algorithm 'impala'"):
        group.add_module("x", spec(algorithm="ppo"), state=state)
    with pytest.raises(juggler.LearnerGroupError, match=r"no weights 'polcy_head\.weight': did"):
        group.add_module("x", spec(), weights={"polcy_head.weight": np.zeros(1, np.float32)})
    with pytest.raises(juggler.LearnerGroupError, match="cannot be imported: there is no Python"):
        group.add_module("x", {**spec(), "module": "nowhere_at_all:Module"})
    with pytest.raises(juggler.LearnerGroupError, match="restore of 'target'"):
        group.restore({"target": state})
    assert set(group.placement) == set(LEARNERS)


def test_a_module_that_cannot_update_tells_its_handle_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    before = group.get_weights()
    other_shape = make_batch(observation_size=5)
    largest = np.finfo(np.float32).max
    overflows = make_batch(rewards=np.full((3, 6), largest), ends=0.0)
    not_finite = make_batch(rewards=np.full((3, 6), np.nan, np.float32))
    handles = [
        group.update_from_episodes({"main": [make_batch(), other_shape]}, async_update=True),
        group.update_from_episodes(
            {"short": [overflows], "epochs": [make_batch()]}, async_update=True
        ),
        group.update_from_episodes({"short": [not_finite]}, async_update=True),
    ]
    with pytest.raises(juggler.UpdateFailed, match=r"'main': .*do not fit the space"):
        handles[0].result(PATIENCE)
    with pytest.raises(juggler.UpdateFailed, match=r"'short': .*gradients were not fin") as failed:
        handles[1].result(PATIENCE)
    with pytest.raises(juggler.UpdateFailed, match=r"'short': .*rewards in row 0 at"):
        handles[2].result(PATIENCE)
    assert set(failed.value.failures) == {"short"}
    assert failed.value.results["epochs"].live_steps == make_batch().live_steps
    after = group.get_weights()
    for name in ("main", "short"):
        same(after[name], before[name])
    assert group.update_from_episodes({"main": [make_batch()], "short": [make_batch()]})


@pytest.mark.slow
def test_a_killed_shard_comes_back_with_what_is_known_of_its_modules(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    learner = alone("target", seed=3)
    group.remove_module("target")
    group.add_module("target", spec(seed=3, **LEARNERS["target"]))
    for update in range(3):  # a snapshot is taken of the second
        group.update_from_episodes({"target": [make_batch(seed=update)]})
        if update < 2:
            learner.update_from_episodes([make_batch(seed=update)])
    victim = group._shards[2].worker
    others = [group._shards[shard].worker for shard in (0, 1)]
    assert victim is not None
    handle = group.update_from_episodes(
        {"gated": [make_batch()], "target": [make_batch()], "main": [make_batch()]},
        async_update=True,
    )
    gate.wait_for_one()
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(juggler.UpdateFailed, match=r"by SIGKILL\. .*update 2 of 3") as failed:
        handle.result(PATIENCE)
    assert set(failed.value.failures) == {"gated", "target"}
    assert isinstance(failed.value.failures["target"], juggler.ShardLost)
    assert set(failed.value.results) == {"main"}
    assert [group._shards[shard].worker for shard in (0, 1)] == others

    gate.open()
    learner.update_from_episodes([make_batch(seed=9)])
    done = group.update_from_episodes({"target": [make_batch(seed=9)], "gated": [make_batch()]})
    assert (done["target"].updates, done["gated"].updates) == (3, 1)
    same(group.get_weights(["target"])["target"], learner.get_weights())


@pytest.mark.slow
def test_a_restored_state_is_kept_for_the_next_process_though_another_module_fails(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    state, weights = group.save(["target"])["target"], group.get_weights(["target"])["target"]
    group.update_from_episodes({"target": [make_batch()]})
    group.save(["target"])
    with pytest.raises(juggler.LearnerGroupError, match="restore of 'main'"):
        group.restore({"target": state, "main": state})
    shard = group._shards[group.placement["target"].shard]
    victim = shard.worker
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: shard.worker not in (victim, None), "the next process")
    same(group.get_weights(["target"])["target"], weights)


@pytest.mark.slow
def test_a_group_that_cannot_start_leaves_no_process_and_another_one_alone(
    group: juggler.LearnerGroup,
) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with pytest.raises(juggler.LearnerGroupError, match=r"'bad': .* no 'Gatd': did you mean"):
        juggler.LearnerGroup(
            {"bad": {**spec(), "module": "support.learner_groups:Gatd"}}, devices="fake:1"
        )
    with pytest.raises(juggler.ShardLost, match=r"cuda:99 was lost(.|\n)*this host has"):
        juggler.LearnerGroup({"main": spec()}, devices="cuda:99")
    assert {each.pid for each in psutil.Process().children(recursive=True)} == before
    assert all(shard.worker for shard in group._shards)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learner": {"algorithm": "impla"}}, "'new': learner: algorithm ="),
        ({"learner": {"lr": "fast"}}, "'new': learner: lr: "),
        ({"learner": {"env": "CartPole-v1"}}, "'new': learner has no key 'env': known are"),
        ({"lerner": {}}, "'new': .* unexpected keyword"),
        ({"model": {"hidden_sizes": {8}}}, "'new': model.hidden_sizes must be a list"),
        ({"observation_space": None}, "'new': there is no encoding for"),
        ({"connectors": {"lerner": []}}, "connectors has no key 'lerner'"),
    ],
)
def test_a_spec_that_cannot_be_is_refused_before_anything_begins(
    group: juggler.LearnerGroup, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(juggler.ConfigError, match=message):
        group.add_module("new", {**spec(), **given})
    with pytest.raises(juggler.ConfigError, match=message):
        juggler.LearnerGroup({"new": {**spec(), **given}})


def test_what_makes_no_sense_is_refused(group: juggler.LearnerGroup, make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="no module 'mian': did you mean 'main'"):
        group.update_from_episodes({"mian": [make_batch()]})
    with pytest.raises(ValueError, match="no module 'mian'"):
        group.get_weights(["mian"])
    with pytest.raises(ValueError, match="no module 'mian'"):
        group.remove_module("mian")
    with pytest.raises(juggler.ConfigError, match="'main' is there already"):
        group.add_module("main", spec())
    with pytest.raises(juggler.ConfigError, match="weights or state, not both"):
        group.add_module("x", spec(), weights={}, state=group.save(["main"])["main"])
    with pytest.raises(juggler.ConfigError, match=r"missing .* 'action_space'"):
        group.add_module("x", {"observation_space": SPACES["observation_space"]})
    for episodes, message in [
        ({}, "no episodes: give"),
        ([make_batch()], "no episodes: give"),
        ({"main": []}, "'main' needs a list of EpisodeBatch"),
        ({"main": [{}]}, "'main' needs a list of EpisodeBatch"),
        ({"main": make_batch()}, "'main' needs a list of EpisodeBatch"),
        ({"main": [make_batch(actions=np.zeros((3, 6, *[1] * 18)))]}, "20 dimensions, limit 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            group.update_from_episodes(episodes)  # type: ignore[arg-type]


# Learner groups of which each test makes its own.


@pytest.mark.slow
@pytest.mark.usefixtures("one_forkserver")
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


@pytest.mark.usefixtures("one_forkserver")
@pytest.mark.slow
def test_a_shard_that_hangs_is_killed_and_another_one_is_started_for_another_module(
    make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = partial(learner_group.HubSettings, hang_seconds=4)
    monkeypatch.setattr(learner_group, "HubSettings", quick)
    gate = Gate(tmp_path / "gate")
    gated = {
        **spec(),
        "model": {**MODEL, "gate": str(gate.path)},
        "module": "support.learner_groups:Gated",
    }
    with juggler.LearnerGroup({"gated": gated}, devices="cpu") as group:
        with pytest.raises(
            juggler.UpdateFailed, match=r"was lost: killed by SIGKILL\.\nhung.*: no progress for"
        ):
            group.update_from_episodes({"gated": [make_batch()]})
        gate.open()
        group.add_module("second", spec())
        assert [place.shard for place in group.placement.values()] == [0, 1]
        done = group.update_from_episodes({"gated": [make_batch()], "second": [make_batch()]})
        assert (done["gated"].updates, done["second"].updates) == (1, 1)
    for call in (group.get_weights, lambda: group.add_module("third", spec())):
        with pytest.raises(RuntimeError, match="the learner group is closed"):
            call()
    gate.close()


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


@pytest.mark.usefixtures("one_forkserver")
@pytest.mark.slow
def test_a_script_needs_no_torch_and_leaves_no_process_though_it_closes_nothing(
    run_python: Callable[..., str],
) -> None:
    *names, pid = run_python("-c", _SCRIPT).split()
    assert "policy_head.weight" in names
    assert not psutil.pid_exists(int(pid))
