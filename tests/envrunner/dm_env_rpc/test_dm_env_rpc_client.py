"""Environments that are simulators elsewhere: the rules of the protocol."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2
from gymnasium import spaces
from support.package_simulator import MOVE, PUSH, SEEN, Arena, Served, act, arena_specs, tensor_spec

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed


def test_spaces_are_those_of_the_specs(connect: Any) -> None:
    env = connect()
    assert env.single_action_space == spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "push": spaces.Box(np.float32(-0.1), np.float32(0.1), (2,)),
        }
    )
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert env.single_observation_space == spaces.Dict(
        {
            "agent": spaces.Dict({"count": spaces.Box(low, high, (2,), np.int64)}),
            "board": spaces.Box(0, 100, (3, 4), np.float32),
        }
    )
    assert env.observation_space.contains(env.reset()[0])


def test_a_step_behind_an_end_begins_the_next_sequence(connect: Any, arena: Arena) -> None:
    """And its actions are used by nobody; sequences end terminated and interrupted in turn."""
    env = connect(count=1)
    env.reset()
    seen = []
    for _ in range(8):
        observations, rewards, terminated, truncated, infos = env.step(act(1))
        step = int(observations["agent"]["count"][0, 0])
        assert (observations["board"] == step).all(), "one element stands for all"
        seen.append((step, rewards[0], bool(terminated[0]), bool(truncated[0])))
        assert infos["discount"].tolist() == [0.5]
    assert seen == [
        (1, 0.5, False, False),
        (2, 1.0, False, False),
        (3, 1.5, True, False),
        (0, 0.0, False, False),
        (1, 0.5, False, False),
        (2, 1.0, False, False),
        (3, 1.5, False, True),
        (0, 0.0, False, False),
    ]
    assert len(arena.actions) == 6
    assert arena.actions[0][MOVE] == 1
    np.testing.assert_array_equal(arena.actions[0][PUSH], np.float32([0.05, 0.05]))


def test_all_requests_are_out_before_any_reply_is_read(connect: Any, arena: Arena) -> None:
    """As in a world whose agents act together: none gets a reply before all have acted."""
    arena.barrier = threading.Barrier(4)
    env = connect(count=4)
    env.reset()
    for _ in range(5):
        env.step(act(4))


def test_a_notebook_has_an_event_loop_of_its_own(connect: Any) -> None:
    async def cell() -> float:
        env = connect(count=2)
        env.reset()
        rewards = env.step(act(2))[1]
        env.close()
        return float(rewards[1])

    assert asyncio.run(cell()) == 0.5


def test_floats_are_cut_to_bounds(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    env.reset()
    env.step({"move": np.zeros(1, int), "push": np.array([[-7.0, 0.1]])})
    np.testing.assert_array_equal(arena.actions[0][PUSH], np.float32([-0.1, 0.1]))


def test_a_reset_gives_up_what_runs_and_sends_the_seed(connect: Any, arena: Arena) -> None:
    env = connect(count=1, seed_setting="seed")
    env.reset(seed=5)
    env.step(act(1))
    observations, _ = env.reset(seed=6)
    assert observations["agent"]["count"][0, 0] == 0
    assert arena.calls.count("reset") == 2
    env.step(act(1))
    env.reset()
    assert arena.calls.count("reset") == 3


def test_worlds_are_left_and_destroyed(connect: Any, arena: Arena) -> None:
    env = connect(count=3)
    assert len(arena.worlds) == 3
    env.close()
    assert arena.worlds == set()
    assert arena.calls.count("leave_world") == 3


def test_env_runners_share_servers_among_them(arena: Arena, served: Served) -> None:
    other = Served(second := Arena())
    both = EnvRunnerConfig(
        env=f"dm_env_rpc://{served.address},{other.address}",
        env_kwargs={"observations": SEEN},
        envs_per_runner=1,
    )
    made = [make_vector_env(both, runner=runner) for runner in range(3)]
    assert (len(arena.worlds), len(second.worlds)) == (2, 1)
    for env in made:
        env.close()
    other.close()


def test_an_env_runner_joins_the_worlds_of_its_number(arena: Arena, served: Served) -> None:
    worlds = [arena.new_world() for _ in range(2)]
    assert worlds == ["arena 1", "arena 2"]
    kwargs = {"observations": SEEN, "world": "arena {runner}"}
    config = EnvRunnerConfig(
        env=f"dm_env_rpc://{served.address}", env_kwargs=kwargs, envs_per_runner=2
    )
    make_vector_env(config, runner=2).close()
    with pytest.raises(EnvironmentFailed, match=r"refused join_world.*arena 3"):
        make_vector_env(config, runner=3)


def test_settings_reach_the_simulator(connect: Any) -> None:
    connect(create_world={"seed": {"dtype": "int32", "value": 3}})
    with pytest.raises(EnvironmentFailed, match=r"refused create_world.*unknown settings.*'level'"):
        connect(create_world={"level": "maze"})
    with pytest.raises(EnvironmentFailed, match=r"refused join_world.*unknown settings.*'hat'"):
        connect(join_world={"hat": [1, 2]})


def test_specs_may_get_other_ids_and_others_beside_them(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    env.reset()
    before = arena_specs()
    actions = {uid + 50: spec for uid, spec in before[0].items()}
    observations = {uid + 70: spec for uid, spec in before[1].items()}
    observations[1] = tensor_spec("heat", dm_env_rpc_pb2.FLOAT, (2,))
    arena.specs = lambda: (actions, observations)
    env.reset(seed=1)
    _, rewards, *_ = env.step(act(1, -1))
    assert rewards[0] == 0.5
    assert arena.actions[-1][MOVE + 50] == -1
