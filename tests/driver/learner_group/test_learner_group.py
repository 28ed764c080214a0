"""Modules over shards of devices, with real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.batches import MakeBatch
from support.learner_groups import LEARNERS, PATIENCE, Gate, alone, same, spec

import juggler
from juggler.learner.data.collate import collate
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.wire.trees import flatten


@pytest.mark.slow
def test_each_learns_what_it_would_learn_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    batches = {
        name: [[make_batch(seed=10 * n + update)] for update in range(3)]
        for n, name in enumerate(LEARNERS)
    }
    handles = [
        group.update_from_episodes(
            {name: own[update] for name, own in batches.items()}, async_update=True
        )
        for update in range(3)
    ]
    results = [handle.result(PATIENCE) for handle in handles]
    weights = group.get_weights()
    assert set(weights) == set(LEARNERS)
    for name, own in batches.items():
        learner = alone(name)
        for update, episodes in enumerate(own):
            learner.update_from_episodes(episodes)
            done = results[update][name]
            assert done.live_steps == episodes[0].live_steps
            assert done.updates == update + 1
        same(weights[name], learner.get_weights())
        assert done.metrics["lr"] == pytest.approx(LEARNERS[name].get("lr", 3e-4))


def test_episodes_may_change_as_soon_as_their_update_was_asked_for(
    group: juggler.LearnerGroup, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = EpisodeSender.send

    def kept(self: EpisodeSender, header: Any, tree: Any) -> None:
        sent.append(tree["main"])
        send(self, header, tree)

    monkeypatch.setattr(EpisodeSender, "send", kept)
    batch = make_batch()
    group.update_from_episodes({"main": [batch]})
    (tree,) = sent
    for (_, given), (_, other) in zip(flatten(batch.to_tree()), flatten(tree), strict=True):
        assert np.array_equal(given, other)
        assert not np.shares_memory(given, other)


def test_a_slow_shard_holds_up_its_own_modules_alone(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    slow = group.update_from_episodes({"gated": [make_batch()]}, async_update=True)
    behind = group.update_from_episodes({"target": [make_batch()]}, async_update=True)
    gate.wait_for_one()
    for _ in range(3):
        group.update_from_episodes({"main": [make_batch()], "short": [make_batch()]})
    assert not slow.done()
    assert not behind.done()
    gate.open()
    assert behind.result(PATIENCE)["target"].updates
    assert slow.done()


def test_one_update_too_many_waits_and_the_other_modules_are_asked_meanwhile(
    group: juggler.LearnerGroup, make_batch: MakeBatch, gate: Gate
) -> None:
    in_flight = [
        group.update_from_episodes({"gated": [make_batch()]}, async_update=True) for _ in range(2)
    ]
    before = group.save(["main"])["main"].extra["updates"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(
            group.update_from_episodes,
            {"gated": [make_batch()], "main": [make_batch()]},
            async_update=True,
        )
        while group.save(["main"])["main"].extra["updates"] == before:
            pass
        assert not asking.done()
        gate.open()
        assert asking.result(PATIENCE).result(PATIENCE).keys() == {"gated", "main"}
    assert all(handle.done() for handle in in_flight)


def test_a_module_begins_with_the_weights_or_goes_on_from_the_state_of_another(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    group.update_from_episodes({"main": [make_batch()]})
    state, weights = group.save(["main"])["main"], group.get_weights(["main"])["main"]
    group.add_module("main_1", spec(seed=1, **LEARNERS["main"]), state=state)
    group.add_module("other", spec(seed=1, algorithm="appo"), weights=weights)
    found = group.get_weights(["main_1", "other"])
    same(found["main_1"], weights)
    same(found["other"], weights)
    tree: Any = group.save(["other"])["other"].tree["default"]
    for name, array in tree["parameters"].items():
        assert np.array_equal(tree["extra"]["target"][name], array)
    done = group.update_from_episodes({"main_1": [make_batch()], "other": [make_batch()]})
    assert done["main_1"].updates == state.extra["updates"] + 1
    assert done["other"].updates == 1
    group.restore({"main_1": state})
    same(group.get_weights(["main_1"])["main_1"], weights)
    for name in ("main_1", "other"):
        group.remove_module(name)


def test_columns_are_learned_from_as_the_episodes_are_that_they_were_collated_from(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    for name in ("one", "other"):
        group.add_module(name, spec(algorithm="ppo"))
    batches = [make_batch(seed=1), make_batch(seed=2)]
    passes = {"minibatch_size": 10, "num_epochs": 2}
    one = group.update_from_episodes({"one": batches}, **passes)["one"]  # type: ignore[call-overload]
    handle = group.update_from_batch({"other": collate(batches)}, async_update=True, **passes)
    assert handle.result(PATIENCE)["other"] == one
    found = group.get_weights(["one", "other"])
    same(found["other"], found["one"])
    in_parts = group.update_from_batch({"other": collate(batches)}, num_epochs=1)["other"]
    assert group.update_from_episodes({"one": batches})["one"].metrics != in_parts.metrics
    columns = make_batch().to_tree()
    for wrong, words in (
        ({"other": {**columns, "reward": columns["rewards"]}}, "'reward': did you mean 'rewards'"),
        ({"other": {"rewards": columns["rewards"]}}, r"no column 'observations': \[N, T"),
        ({"othr": columns}, "no module 'othr': did you mean 'other'"),
        ({}, "no batch: give columns"),
    ):
        with pytest.raises(ValueError, match=words):
            group.update_from_batch(wrong)
    with pytest.raises(ValueError, match="num_epochs = 0: must be"):
        group.update_from_batch({"other": columns}, num_epochs=0)
    for name in ("one", "other"):
        group.remove_module(name)


def test_weights_from_elsewhere_are_taken_over_behind_the_updates_asked_for_before(
    group: juggler.LearnerGroup, make_batch: MakeBatch
) -> None:
    weights = group.get_weights(["target"])["target"]
    handle = group.update_from_episodes({"main": [make_batch()]}, async_update=True)
    group.set_weights({"main": weights})
    assert handle.done()
    same(group.get_weights(["main"])["main"], weights)
    updates = handle.result(PATIENCE)["main"].updates
    assert group.save(["main"])["main"].extra["updates"] == updates, "they are counted on"
    assert group.update_from_episodes({"main": [make_batch()]})["main"].updates == updates + 1
    before = group.get_weights(["main"])["main"]
    with pytest.raises(juggler.LearnerGroupError, match="no weights 'nothing'"):
        group.set_weights({"main": {"nothing": np.zeros(1, np.float32)}})
    same(group.get_weights(["main"])["main"], before)
    with pytest.raises(ValueError, match="no module 'mian': did you mean 'main'"):
        group.set_weights({"mian": weights})


def test_a_second_interrupt_of_close_ends_the_processes_and_nothing_is_left(
    local_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = juggler.LearnerGroup({"main": spec()}, devices="cpu")
    local = group._local
    (slot,) = local.supervisor._slots.values()
    process: Any = slot.process
    interrupts: list[Any] = []

    def interrupt(own: Any, name: str) -> None:
        """Ctrl-C, the next time this is called."""
        method = getattr(own, name)

        def interrupted(*_: object, **__: object) -> None:
            interrupts.append(own)
            monkeypatch.setattr(own, name, method)
            raise KeyboardInterrupt

        monkeypatch.setattr(own, name, interrupted)

    interrupt(group._changed, "wait_for")  # for requests
    interrupt(process, "join")
    with pytest.raises(KeyboardInterrupt):
        group.close()
    assert interrupts == [group._changed, process]
    assert not process.is_alive()
    assert not local._shares, "the forkserver is released"
    assert local.directory_is_gone()
