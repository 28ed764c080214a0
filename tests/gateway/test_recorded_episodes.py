"""Whole episodes of simulators are recorded as these had them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.gateway_world import (
    PATIENCE,
    GatewayWorld,
    Played,
    RawSimulator,
    eventually,
    in_threads,
    play,
    steps_of,
)
from support.random_episodes import random_episodes

from juggler.gateway import episode_log
from juggler.gateway.episode_log import EpisodeLog, EpisodeWriter
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.episodes.version import Version

FILTERED = {"env_to_module": ["mean_std_filter"]}


def log_of(world: GatewayWorld) -> list[RecordedEpisode]:
    """The episodes that will be recorded there."""
    world.connect().close()  # tells the spaces
    player, found = world.player, []
    assert player is not None
    both = player.policy, player.interface.spaces[1]
    player.episode_log = EpisodeLog(*both, found.append)
    return found


def assert_are(
    found: list[RecordedEpisode], played: list[Played], *, all_is_sent: bool = False
) -> None:
    """The same episodes, in any order.

    Unless all is sent, clients send no observation after a step that terminated.
    """
    by_first = {tuple(np.float32(each.observations[0])): each for each in played}
    assert len(by_first) == len(played) == len(found)
    for episode in found:
        expected = by_first[tuple(episode.observations[0])]
        seen = np.array(expected.observations)
        if expected.terminated and not all_is_sent:
            seen[-1] = seen[-2]
        np.testing.assert_array_equal(episode.observations, seen)
        np.testing.assert_array_equal(episode.actions, expected.actions)
        np.testing.assert_allclose(episode.rewards, expected.rewards, rtol=1e-6)
        assert episode.terminated == expected.terminated


@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_policy_did_is_recorded_whichever_steps_are_learned_from(at_once: bool) -> None:
    with GatewayWorld(rows=3, steps=4, connectors=FILTERED) as world:
        found = log_of(world)
        world.ask(100)
        played = in_threads(4, lambda i: play(world, i, 40 + 10 * i, at_once))
        everything = [episode for each in played for episode in each]
        eventually(lambda: len(found) >= len(everything))
        assert_are(found, everything)


def test_a_last_observation_that_is_ignored_is_not_recorded_either() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        found = log_of(world)
        world.ask(10)
        finals = steps_of(1, ((float("nan"), 0, 0), (7, 7, 7))).agents[0].observations
        shown = ((1, 1, 1), (2, 2, 2))
        with RawSimulator(world.address) as simulator:
            simulator.greet(environments=2)
            simulator.step(steps_of(1, shown))
            ends: dict[str, Any] = {"terminated": [True, False], "truncated": [True, True]}
            last = {"final_rows": [0, 1], "final_observations": finals}
            simulator.step(steps_of(2, shown, **ends, **last))
        first, second = found
        assert first.observations.tolist() == [[1, 1, 1]] * 2
        assert second.observations.tolist() == [[2, 2, 2], [7, 7, 7]]


def test_what_others_did_is_recorded() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        found = log_of(world)
        world.use(1.0, Version(1, 0))
        world.ask(10)
        seen = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
        rest: dict[str, Any] = {"action_logp": [-0.5] * 2}
        with world.connect(mode="logged") as session:
            session.record(seen[:3], [0, 1], [1, 2], **rest)
            session.record(seen[2:5], [1, 1], [3, 4], starts=False, terminated=True, **rest)
            session.record(seen[5:8], [0, 0], [5, 6], truncated=True, **rest)
            session.record(seen[8:11], [0, 0], [5, 6], **rest)  # and leaves
        eventually(lambda: world.count("steps_recorded") == 8)
        expected = [
            Played(list(seen[:5]), [0, 1, 1, 1], [1, 2, 3, 4], terminated=True),
            Played(list(seen[5:8]), [0, 0], [5, 6], truncated=True),
        ]
        assert_are(found, expected, all_is_sent=True)


class SlowDisk:
    """Stands for `SampledEpisodes` on a disk that waits until it may write."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.written: list[Any] = []
        self.ended: list[str] = []
        self.refuses = False

    def add(self, episode: Any) -> None:
        assert self.may_write.wait(PATIENCE)
        if self.refuses:
            raise MemoryError
        self.written.append(episode)

    def complete_if_old(self) -> None:
        pass

    def complete(self) -> None:
        self.written.append("complete")

    def end(self, why: str) -> None:
        self.ended.append(why)


def test_no_turn_waits_for_the_disk_and_all_is_written_at_the_end() -> None:
    disk: Any = SlowDisk()
    writer = EpisodeWriter(disk)
    episodes = random_episodes([3] * 200)
    for episode in episodes:
        writer.add(episode)
    assert disk.written == []
    disk.may_write.set()
    writer.close()
    assert [*episodes, "complete"] == disk.written


def test_an_error_while_episodes_are_written_reaches_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode_log, "_MOST_BYTES", 1)
    disk: Any = SlowDisk()
    disk.refuses = True
    disk.may_write.set()
    writer = EpisodeWriter(disk)
    first, second = random_episodes([3] * 2)
    writer.add(first)
    with pytest.raises(MemoryError):
        writer.add(second)
    with pytest.raises(MemoryError):
        writer.close()


def test_a_disk_that_hangs_holds_neither_a_turn_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode_log, "_MOST_BYTES", 1)
    monkeypatch.setattr(episode_log, "_DISK_SECONDS", 0.01)
    disk: Any = SlowDisk()
    writer = EpisodeWriter(disk)
    first, *others = random_episodes([3] * 3)
    writer.add(first)
    for episode in others:
        writer.add(episode)
    (why,) = disk.ended
    assert "disk" in why
    with pytest.raises(TimeoutError, match="lost"):
        writer.close()
    disk.may_write.set()
    eventually(lambda: disk.written == [first, "complete"])
