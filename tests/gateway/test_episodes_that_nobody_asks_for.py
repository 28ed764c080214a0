"""A simulator goes on while nobody asks for samples: its episodes add up, and are bounded."""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
import pytest
from google.protobuf import any_pb2
from support.gateway_world import GatewayWorld

from juggler.driver.workers.worker_events import read
from juggler.gateway import sessions
from juggler.gateway.sessions import MOST_UNREPORTED
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.wire.v1 import training_pb2

MANY = 8192  # environments


def taken(ended: Collection[tuple[float, int]]) -> training_pb2.Receipt:
    """What a driver reads in a receipt without a step of its own."""
    receipt = training_pb2.Receipt()
    receipt.episode_returns.extend(each[0] for each in ended)
    receipt.episode_lengths.extend(each[1] for each in ended)
    body = any_pb2.Any()
    body.Pack(receipt)
    return read(body, training_pb2.Receipt())


def test_of_more_episodes_than_a_driver_takes_the_newest_are_told_and_the_simulator_hears_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "juggler.client")
    shown, over = np.zeros((MANY, 3)), np.ones(MANY, np.bool_)
    with (
        GatewayWorld(rows=1, steps=1) as world,
        world.connect(environments=MANY, real_time=True) as session,
    ):
        for step in range(2 + MOST_UNREPORTED // MANY):
            session.step(shown, np.full(MANY, step), over if step else ~over, False, shown)
        assert world.count("episodes") == MOST_UNREPORTED + MANY
        assert world.count("episodes_untold") == MANY
        while "65,536 are counted, the newest" not in caplog.text:
            session.step(shown, np.zeros(MANY))
        world.ask()
        for _ in range(2):
            session.step(shown, np.zeros(MANY))
        world.wait_for(1)
        _, ended = world.batches[0]
    receipt = taken(ended)
    assert len(receipt.episode_returns) == MOST_UNREPORTED
    assert min(receipt.episode_returns) == 2  # those of return 1 ended first


def test_episodes_of_several_agents_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_UNREPORTED", 3)
    ended = [(float(k), 1) for k in range(5)]
    assert sessions.forget_oldest(ended) == 2
    assert ended == [(2.0, 1), (3.0, 1), (4.0, 1)]
    assert sessions.forget_oldest(ended) == 0


def test_returns_fit_the_receipt_whatever_finite_rewards_a_simulator_gives() -> None:
    with GatewayWorld(rows=1, steps=4) as world, world.connect() as session:
        world.ask(100)
        for _ in range(4):
            session.step(np.zeros(3), MOST_REWARD)
        session.step(np.zeros(3), MOST_REWARD, True)
        session.step(np.zeros(3))
        world.wait_for(1)
    assert taken(world.batches[0][1]).episode_returns[0] == pytest.approx(4 * MOST_REWARD, rel=1e-6)
