"""Environments that `juggler.client.play` plays against gateways that die."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.gateway_world import PATIENCE, THREE, TWO_WAYS, GatewayWorld
from support.network import free_address

from juggler.client import GatewayError, play
from juggler.client.playing import _play


class Deadly(gymnasium.Env[Any, Any]):
    """Episodes of four steps; something happens in the sixth step of all."""

    observation_space, action_space = THREE, TWO_WAYS

    def __init__(self, happen: Any) -> None:
        self.episodes = self.steps = 0
        self._happen = happen

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.episodes += 1
        self._left = 4
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self._left -= 1
        if self.steps == 6:
            self._happen()
        return np.ones(3, np.float32), 1.0, self._left == 0, False, {}


def serve(address: str) -> None:
    with GatewayWorld(rows=1, address=address) as world:
        world.ask(1000)
        threading.Event().wait()


@pytest.mark.usefixtures("local_workers")
def test_play_goes_on_with_the_gateway_that_takes_the_place_of_a_dead_one() -> None:
    address = free_address()
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=serve, args=(address,))
    first.start()
    with ExitStack() as stack:

        def replace() -> None:
            first.kill()
            first.join()
            stack.enter_context(GatewayWorld(rows=1, address=address)).ask(1000)

        env = Deadly(replace)
        try:
            assert play(env, address, episodes=3) == [4, 4, 4]
        finally:
            first.kill()
            first.join()
    assert env.episodes == 4, "the episode that ran when the gateway died began again"
    assert env.steps == 3 * 4 + 2


def test_play_ends_with_the_run_and_tells_of_anything_else() -> None:
    with GatewayWorld(rows=1) as world:
        world.ask(1000)
        assert play(Deadly(world.close), world.address) == [4]
    refused = pytest.raises(GatewayError, match="UNAUTHENTICATED")
    with GatewayWorld(rows=1, token="a secret") as world, refused:
        play(Deadly(print), world.address, timeout=PATIENCE)


class OneArray(gymnasium.Env[Any, Any]):
    """Writes each observation into the same array; every step is truncated."""

    def __init__(self) -> None:
        self.seen = np.zeros(1)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.seen += 1
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.reset()[0], 0.0, False, True, {}


def test_the_last_observation_of_an_episode_is_not_that_of_the_next_one() -> None:
    finals: list[float] = []

    class Heard:
        parameters: Mapping[str, float] = {}

        def step(self, observation: Any, *told: Any, **_: Any) -> int:
            if len(told) == 4:
                finals.append(float(told[3][0]))
            return 0

    _play(OneArray(), Heard(), 3, 0, [])  # type: ignore[arg-type]
    assert finals == [2.0, 4.0]
