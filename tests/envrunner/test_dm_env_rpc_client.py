"""Environments that are simulators elsewhere: the rules of the protocol, and what can go wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2, tensor_utils
from gymnasium import spaces
from network import free_address
from package_simulator import (
    BOARD,
    MOVE,
    PUSH,
    REWARD,
    Arena,
    Served,
    arena_specs,
    tensor_spec,
)

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc import agent, vector_env
from juggler.envrunner.environments import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed

SEEN = ["board", "agent.count"]


def dial(where: str, count: int = 1, deadline: float = 10.0, **options: Any) -> Any:
    config = EnvRunnerConfig(
        env=f"dm_env_rpc://{where}",
        env_kwargs=options,
        envs_per_runner=count,
        step_deadline_seconds=deadline,
    )
    return make_vector_env(config)


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def served(arena: Arena) -> Iterator[Served]:
    served = Served(arena)
    yield served
    served.close()


@pytest.fixture
def connect(served: Served) -> Iterator[Callable[..., Any]]:
    """Environments in the arena, by their number, deadline and options."""
    made = []

    def connect(count: int = 2, deadline: float = 10.0, where: str = "", **options: Any) -> Any:
        options = {"observations": SEEN, **options}
        made.append(dial(where or served.address, count, deadline, **options))
        return made[-1]

    yield connect
    for env in made:
        env.close()


def act(count: int, move: int = 1) -> dict[str, Any]:
    return {"move": np.full(count, move), "push": np.full((count, 2), 0.05, np.float32)}


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


def test_one_tensor_alone_is_its_space(connect: Any) -> None:
    env = connect(observations=["board"], actions=["move"])
    assert env.single_observation_space == spaces.Box(0, 100, (3, 4), np.float32)
    assert env.single_action_space == spaces.Discrete(3, start=-1)
    assert env.reset()[0].shape == (2, 3, 4)


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


def test_a_world_that_is_there_is_joined_and_stays(connect: Any, arena: Arena) -> None:
    worlds = {arena.new_world(), arena.new_world()}
    assert worlds == {"arena 1", "arena 2"}
    shared = connect(world="arena 1", join_world={"team": "red"})
    shared.reset()
    shared.close()
    with pytest.raises(EnvironmentFailed, match=r"environment 0 .* refused join_world.*arena 0"):
        connect(world="arena {index}")
    assert arena.worlds == worlds
    assert "create_world" not in arena.calls


def test_several_servers_take_turns(connect: Any, arena: Arena, served: Served) -> None:
    other = Served(second := Arena())
    env = connect(count=3, where=f"{served.address},{other.address}")
    assert (len(arena.worlds), len(second.worlds)) == (2, 1)
    env.close()
    other.close()


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observations": None}, "observation 'title' is of type STRING.*env_kwargs.observations"),
        ({"observations": ["view"]}, "has no observation 'view'; it has agent.count, board, disc"),
        ({"actions": ["jump"]}, "has no action 'jump'; it has move, push"),
        ({"reward": "score"}, "has no observation 'score'.*env_kwargs.reward names the reward"),
        ({"reward": "board"}, "'board' must be one number"),
    ],
)
def test_what_cannot_be_used_is_named(connect: Any, options: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        connect(**options)


def test_a_dimension_that_varies_is_named(connect: Any, arena: Arena) -> None:
    actions, observations = arena_specs()
    observations[20] = tensor_spec("points", dm_env_rpc_pb2.FLOAT, (-1, 3))
    arena.specs = lambda: (actions, observations)
    with pytest.raises(EnvironmentFailed, match=r"'points' has the shape \[-1, 3\], which varies"):
        connect(observations=["points"])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"env_kwargs": {"create": {}}}, "unknown field `create`; keys: create_world, world"),
        ({"env_kwargs": {"world": "a", "create_world": {"b": 1}}}, "has no create_world"),
        ({"env_kwargs": {"connect_seconds": 0}}, "connect_seconds must be"),
        ({"env": "dm_env_rpc://here"}, "'here' is no address"),
        ({"vectorize": "async"}, "simulators run elsewhere"),
    ],
)
def test_a_wrong_configuration_is_told(keys: dict[str, Any], words: str) -> None:
    config = EnvRunnerConfig(**{"env": "dm_env_rpc://127.0.0.1:1", **keys})
    with pytest.raises(ValueError, match=words):
        make_vector_env(config)


# -- specs that change ------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a, o: o.pop(BOARD), "the observation 'board' is gone"),
        (
            lambda a, o: o.update(
                {BOARD: tensor_spec("board", dm_env_rpc_pb2.FLOAT, (3, 5), 0.0, 100.0)}
            ),
            r"'board' \(float32 \[3, 4\].* is now 'board' \(float32 \[3, 5\]",
        ),
        (
            lambda a, o: a.update({MOVE: tensor_spec("move", dm_env_rpc_pb2.INT32, (), 0, 1)}),
            "the action 'move' .*min -1, max 1.* is now 'move' .*min 0, max 1",
        ),
    ],
)
def test_specs_that_no_longer_fit_are_named(
    connect: Any, arena: Arena, change: Any, words: str
) -> None:
    env = connect(count=1)
    env.reset()
    env.step(act(1))
    actions, observations = arena_specs()
    change(actions, observations)
    arena.specs = lambda: (actions, observations)
    with pytest.raises(EnvironmentFailed, match=words):
        env.reset()


# -- faults -----------------------------------------------------------------------------------


def _without_reward(response: Any, _: int) -> Any:
    del response.observations[REWARD]
    return response


def _with_board(value: Any) -> Callable[[Any, int], Any]:
    def change(response: Any, step: int) -> Any:
        if step:
            response.observations[BOARD].CopyFrom(tensor_utils.pack_tensor(value))
        return response

    return change


def _with_state(state: int) -> Callable[[Any, int], Any]:
    def change(response: Any, step: int) -> Any:
        response.state = state if step else response.state
        return response

    return change


def _raise(response: Any, step: int) -> Any:
    raise FileNotFoundError("no map there")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_reward, "'reward' was requested, and is not in the reply"),
        (_with_board(np.zeros((3, 4))), "'board' came as doubles, and its spec says floats"),
        (_with_board(np.zeros((4, 3), np.float32)), r"shape \[4, 3\], and its spec says \[3, 4\]"),
        (_with_state(0), "has the state 0"),
        (_raise, "refused step: INVALID_ARGUMENT: FileNotFoundError.*no map there"),
    ],
)
def test_a_reply_that_is_wrong_is_told(
    connect: Any, arena: Arena, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    monkeypatch.setattr(agent, "_FAREWELL_SECONDS", 20.0)
    monkeypatch.setattr(vector_env, "_CLOSING_SECONDS", 30.0)
    env = connect()
    env.reset()
    arena.change = change
    with pytest.raises(EnvironmentFailed, match=f"environment 0 .*{words}"):
        env.step(act(2))
    env.close()
    assert arena.worlds == set(), "left in order"


def test_sequences_that_end_at_once_do_not_go_on_forever(connect: Any, arena: Arena) -> None:
    env = connect(count=1)
    arena.length = 0
    with pytest.raises(EnvironmentFailed, match="8 sequences in a row ended in their first reply"):
        env.reset()


def test_a_hanging_simulator_is_told_at_its_deadline(connect: Any, arena: Arena) -> None:
    env = connect(count=2, deadline=2.0)
    env.reset()
    wait = threading.Event()
    arena.change = lambda response, step: (wait.wait(20), response)[1]
    before = time.monotonic()
    with pytest.raises(EnvironmentFailed, match=r"no reply to step within 2 s.*step_deadline_s"):
        env.step(act(2))
    env.close()
    assert time.monotonic() - before < 15
    wait.set()


def test_a_simulator_that_dies_is_told(connect: Any, served: Served) -> None:
    env = connect(count=2)
    env.reset()
    served.close()
    with pytest.raises(EnvironmentFailed, match=r"environment 0 .*the stream to the simulator"):
        env.step(act(2))


def test_a_simulator_that_comes_late_is_waited_for(
    arena: Arena, capfd: pytest.CaptureFixture[str]
) -> None:
    address = free_address()
    served: list[Served] = []
    said: list[str] = []

    def come_late() -> None:
        deadline = time.monotonic() + 20
        while "yet" not in "".join(said) and time.monotonic() < deadline:
            said.append(capfd.readouterr().err)
            time.sleep(0.05)
        served.append(Served(arena, int(address.rpartition(":")[2])))

    thread = threading.Thread(target=come_late)
    thread.start()
    env = dial(address, count=2, observations=SEEN)
    env.reset()
    env.close()
    thread.join()
    served[0].close()
    assert f"no simulator at {address} yet" in "".join(said)


def test_nobody_there_is_told_at_the_deadline() -> None:
    with pytest.raises(EnvironmentFailed, match=r"no simulator answers at 127.0.0.1:1.*running"):
        dial("127.0.0.1:1", connect_seconds=0.5)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"\xff\xfe\xfd", "is no message of dm_env_rpc v1"),
        (b"", "is one to nothing"),
        (dm_env_rpc_pb2.EnvironmentResponse(leave_world={}).SerializeToString(), "to leave_world"),
        (None, "UNIMPLEMENTED"),
    ],
)
def test_what_is_no_reply_is_told(reply: bytes | None, words: str) -> None:
    served = Served(reply=reply)
    with pytest.raises(EnvironmentFailed, match=words):
        dial(served.address)
    served.close()
