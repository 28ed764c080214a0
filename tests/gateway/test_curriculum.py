"""Simulators get seeds and parameters for the episodes that begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from support.gateway_world import (
    THREE,
    TWO_WAYS,
    AgentsWorld,
    GatewayWorld,
    RawSimulator,
    break_off,
    see,
    steps_of,
)

from juggler.client import play
from juggler.gateway.curriculum import Curriculum
from juggler.runtime.wire.v1 import simulator_pb2 as pb

WIND = {"wind": 0.5, "gravity": [(10, 1.0), (20, 3.0)]}


@pytest.mark.parametrize(
    ("steps", "gravity"), [(0, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (99, 3.0)]
)
def test_schedules_are_linear_between_their_points(steps: int, gravity: float) -> None:
    assert Curriculum(0, WIND, steps).parameters == {"wind": 0.5, "gravity": gravity}


def test_sessions_of_a_run_have_seeds_that_follow_from_its_own() -> None:
    def seeds(run: int, *dialed: str) -> list[int]:
        curriculum = Curriculum(run)
        curriculum.own = ["one", "two"]
        return [curriculum.session_seed(each) for each in dialed]

    ours = seeds(7, "one", "two", "elsewhere", "one", "elsewhere")
    assert len({*ours}) == 5
    assert all(0 <= seed < 2**31 for seed in ours)
    assert seeds(7, "two", "elsewhere", "one") == [ours[1], ours[2], ours[0]]
    assert seeds(8, "one") != ours[:1]


def test_each_episode_of_each_environment_has_a_seed_of_its_own() -> None:
    with GatewayWorld() as world, world.connect(environments=3) as session:
        first = session.welcome.seed
        assert [session.next_seed(each) for each in (0, 1, 2, 1, 1, 0)] == [
            first, first + 1, first + 2, first + 4, first + 7, first + 3
        ]  # fmt: skip
        session.welcome.ClearField("seed")
        assert session.next_seed() is None, "a gateway of an earlier version"


def test_parameters_come_with_the_welcome_and_when_they_have_changed() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, RawSimulator(world.address) as simulator:
        world.ask(100)
        assert dict(simulator.greet().welcome.parameters) == {"wind": 0.5, "gravity": 1.0}
        assert not simulator.step(steps_of(1)).actions.parameters
        curriculum.follow(9)
        assert not simulator.step(steps_of(2)).actions.parameters, "they are the same"
        curriculum.follow(15)
        answer = simulator.step(steps_of(3)).actions
        assert dict(answer.parameters) == {"wind": 0.5, "gravity": 2.0}
        assert answer.agents[0].actions[0].shape == [1]
        assert not simulator.step(steps_of(4)).actions.parameters


def test_a_session_that_is_resumed_has_the_parameters_of_now_and_its_seed() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, world.connect() as session:
        world.ask(100)
        session.step(see(0, 0, 0))
        seed = session.welcome.seed
        curriculum.follow(15)
        break_off(session)
        session.step(see(0, 0, 0))
        assert session.welcome.resumed
        assert session.welcome.seed == seed
        assert session.parameters == {"wind": 0.5, "gravity": 2.0}


def test_simulators_that_record_have_them_too() -> None:
    curriculum = Curriculum(0, WIND)
    with GatewayWorld(curriculum=curriculum) as world, world.connect(mode="logged") as session:
        world.ask(100)
        curriculum.follow(30)
        session.record(np.zeros((5, 3)), [0] * 4, [1.0] * 4, [-0.7] * 4, terminated=True)
        session.flush()
        assert session.parameters == {"wind": 0.5, "gravity": 3.0}


class Remembers(gymnasium.Env[Any, Any]):
    """Episodes of two steps."""

    observation_space, action_space = THREE, TWO_WAYS

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        self.resets.append(given)
        self.steps = 0
        return see(0, 0, 0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return see(0, 0, 1), 1.0, self.steps == 2, False, {}


def test_an_environment_of_gymnasium_is_reset_with_both() -> None:
    env = Remembers()
    with GatewayWorld(curriculum=Curriculum(3, WIND)) as world:
        world.ask(100)
        assert play(env, world.address, episodes=2) == [2.0, 2.0]
    options = {"wind": 0.5, "gravity": 1.0}
    assert env.resets == [
        {"seed": Curriculum(3).session_seed(""), "options": options},
        {"options": options},
    ]


def test_a_gateway_follows_the_steps_of_its_requests(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"*": "all"}, simulator_parameters=WIND)
    with world.connect("one") as session:
        assert session.parameters["gravity"] == 1.0
        world.begin()
        (request,) = world.requests(all=0)
        request.steps_trained = 18
        world.driver.tell(request)
        session.step({"one": see(0, 0)})
        session.step({"one": see(0, 1)}, {"one": 1.0})
        assert session.parameters["gravity"] == pytest.approx(2.6)


def test_the_fields_are_in_the_messages_that_simulators_read() -> None:
    assert pb.Welcome(seed=0).HasField("seed")
