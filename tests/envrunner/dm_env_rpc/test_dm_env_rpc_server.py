"""Gymnasium environments served over dm_env_rpc, beside what the compliance suite asks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import connection, dm_env_rpc_pb2
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from juggler.cli import serve_gym
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.layout import Layout
from juggler.envrunner.dm_env_rpc.server import GymServer
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.tls import read_tls

Make = Callable[..., Any]


class Counting(gymnasium.Env[Any, Any]):
    """Shows its steps and the number drawn at its reset; sequences are cut after three."""

    observation_space = spaces.Box(0, 1e6, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,), np.float16)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.drawn, self.steps = self.np_random.integers(1 << 20), 0
        return np.array([self.drawn, 0.0]), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float16
        if action[0] < 0:
            raise RuntimeError("it fell over")
        self.steps += 1
        return np.array([self.drawn, self.steps]), self.steps / 3, False, self.steps == 3, {}

    def close(self) -> None:
        Counting.closed += 1


@pytest.fixture
def serve() -> Iterator[Callable[..., GymServer]]:
    servers: list[GymServer] = []

    def serve(make: Make, **options: Any) -> GymServer:
        servers.append(GymServer(make, "127.0.0.1:0", **options))
        return servers[-1]

    yield serve
    for server in servers:
        assert server.close()


def dial(
    server: GymServer, count: int = 1, deadline: float = 10.0, **options: Any
) -> VectorEnv[Any, Any, Any]:
    return make_vector_env(
        EnvRunnerConfig(
            env=f"dm_env_rpc://{server.address}",
            env_kwargs={"connect_seconds": 10.0, **options},
            envs_per_runner=count,
            step_deadline_seconds=deadline,
        )
    )


def test_an_environment_comes_across_as_it_is(serve: Any) -> None:
    """The same seeds and actions give the same numbers, bit by bit."""
    env = dial(serve(functools.partial(gymnasium.make, "CartPole-v1")), 2, seed_setting="seed")
    here = [gymnasium.make("CartPole-v1") for _ in range(2)]
    assert env.single_action_space == here[0].action_space
    assert env.single_observation_space == here[0].observation_space
    observations, _ = env.reset(seed=7)
    expected = [each.reset(seed=7 + i)[0] for i, each in enumerate(here)]
    over = np.zeros(2, np.bool_)
    for step in range(60):
        np.testing.assert_array_equal(observations, expected)
        actions = np.array([step % 2, step % 3 == 0], int)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for i, each in enumerate(here):
            if over[i]:
                expected[i], over[i] = each.reset()[0], False
                continue
            expected[i], reward, ends, cut, _ = each.step(actions[i])
            over[i] = ends or cut
            assert (rewards[i], terminated[i], truncated[i]) == (reward, ends, cut)
    env.close()


def test_a_truncated_episode_is_interrupted_and_keeps_its_last_observation(serve: Any) -> None:
    env = dial(serve(Counting), seed_setting="seed")
    env.reset(seed=1)
    for steps in (1, 2, 3):
        observations, rewards, terminated, truncated, _ = env.step(np.ones((1, 1), np.float32))
        assert observations[0, 1] == steps
        assert rewards[0] == steps / 3, "a double, exactly"
        assert (terminated[0], truncated[0]) == (False, steps == 3)
    first = env.reset(seed=1)[0].copy()
    assert env.reset(seed=2)[0][0, 0] != first[0, 0]
    assert env.reset(seed=1)[0][0, 0] == first[0, 0]
    env.close()


def test_what_an_environment_raises_reaches_the_client_and_the_server_goes_on(
    serve: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    server = serve(Counting)
    env = dial(server)
    env.reset()
    with pytest.raises(EnvironmentFailed, match="INTERNAL: RuntimeError: it fell over"):
        env.step(-np.ones((1, 1), np.float32))
    assert 'raise RuntimeError("it fell over")' in capfd.readouterr().err
    assert env.reset()[0][0, 1] == 0
    env.close()


def test_an_environment_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("juggler.envrunner.dm_env_rpc.server._GRACE_SECONDS", 0.1)
    go_on = threading.Event()

    class Hanging(Counting):
        def step(self, action: Any) -> Any:
            go_on.wait(20)
            return super().step(action)

    server = GymServer(Hanging, "127.0.0.1:0")
    env = dial(server, deadline=2.0)
    env.reset()
    with pytest.raises(EnvironmentFailed, match=r"no reply to step within 2 s"):
        env.step(np.ones((1, 1)))
    env.close()
    assert not server.close()
    go_on.set()


def test_worlds_are_gone_with_the_stream(serve: Any) -> None:
    server = serve(Counting)
    before = Counting.closed
    env = dial(server, 3)
    assert Counting.closed == before
    env.close()
    assert Counting.closed == before + 3


def test_many_clients_of_one_process_do_not_wait_for_each_other(serve: Any) -> None:
    server = serve(Counting)
    with grpc.insecure_channel(server.address) as channel:
        clients = [connection.Connection(channel) for _ in range(40)]
        for client in clients:
            assert client.send(dm_env_rpc_pb2.CreateWorldRequest()).world_name
        for client in clients:
            client.close()


def test_a_world_that_is_reset_interrupts_its_agent(serve: Any) -> None:
    server = serve(Counting)
    with grpc.insecure_channel(server.address) as channel:
        client = connection.Connection(channel)
        world = client.send(dm_env_rpc_pb2.CreateWorldRequest()).world_name
        client.send(dm_env_rpc_pb2.JoinWorldRequest(world_name=world))
        states = [client.send(dm_env_rpc_pb2.StepRequest()).state for _ in range(2)]
        client.send(dm_env_rpc_pb2.ResetWorldRequest(world_name=world))
        states += [client.send(dm_env_rpc_pb2.StepRequest()).state for _ in range(3)]
        client.close()
    running, interrupted = dm_env_rpc_pb2.RUNNING, dm_env_rpc_pb2.INTERRUPTED
    assert states == [running, running, interrupted, running, running]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 2), np.float32),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(np.float32([0, -np.inf]), np.float32([1, np.inf])),
        spaces.Box(-np.inf, np.inf, (), np.float64),
        spaces.Discrete(5, start=-2),
        spaces.MultiBinary((2, 3)),
        spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "c": spaces.Box(0, 1, (1,))}),
    ],
)
def test_a_space_that_was_offered_is_read_back(space: Any) -> None:
    layout = Layout.of_space(space, "observation")
    messages = {}
    for spec in layout.specs:
        spec.write(message := pb.TensorSpec())
        messages[spec.uid] = message
    assert (
        Layout.of_specs(layout.adopt(messages, "observation").specs, "observation").space == space
    )


def test_actions_of_several_numbers_are_multi_discrete() -> None:
    space = spaces.MultiDiscrete([3, 4], start=[1, 0])
    specs = Layout.of_space(space, "action").specs
    assert Layout.of_specs(specs, "action").space == space
    wide = Layout.of_space(spaces.Box(0, 1 << 20, (2,), np.int32), "action").specs
    with pytest.raises(ValueError, match="'action' is an integer without bounds, or of more than"):
        Layout.of_specs(wide, "action")


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(5), "strings of varying length"),
        (spaces.Dict({"a.b": spaces.Discrete(2)}), "'a.b' .* has a period"),
        (spaces.Dict({"reward": spaces.Discrete(2), "b": spaces.Discrete(2)}), "key 'reward'"),
    ],
)
def test_a_space_that_cannot_be_offered_is_named(space: Any, words: str) -> None:
    class Env(Counting):
        observation_space = space

    with pytest.raises(ValueError, match=words):
        GymServer(Env, "127.0.0.1:0")


def test_a_client_needs_the_token_and_certificates(serve: Any, tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", (), 1.0)
    tls, token = read_tls(str(tmp_path / "tls")), (tmp_path / "tls" / "token").read_text().strip()
    server = serve(Counting, tls=tls, token=token)
    env = dial(server, tls=str(tmp_path / "tls"))
    env.reset()
    env.close()
    with pytest.raises(EnvironmentFailed, match=f"simulator at {server.address} speaks TLS"):
        dial(server)
    (tmp_path / "other").write_text("another")
    with pytest.raises(EnvironmentFailed, match="UNAUTHENTICATED: the token is missing or wrong"):
        dial(server, tls=str(tmp_path / "tls"), token_file=str(tmp_path / "other"))
    plain = serve(Counting, token="secret")
    with pytest.raises(EnvironmentFailed, match="UNAUTHENTICATED"):
        dial(plain)
    (tmp_path / "secret").write_text("secret")
    dial(plain, token_file=str(tmp_path / "secret")).close()


def test_a_token_of_the_run_is_shown_to_no_simulator(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUGGLER_TOKEN", "secret")
    with pytest.raises(EnvironmentFailed, match="UNAUTHENTICATED"):
        dial(serve(Counting, token="secret"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["CartPol-v1"], "Nearest: CartPole-v"),
        (["CartPole-v1", "--bind", "0.0.0.0:0"], "refusing to listen on 0.0.0.0:0"),
        (["CartPole-v1", "--env-kwargs", '{"size": 3}'], "failed in constructor: TypeError"),
        (["collections:Counter"], "a gymnasium.Env can be served, not a Counter"),
    ],
)
def test_what_cannot_be_served_is_told(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_gym.run(options) == 1
    assert words in capsys.readouterr().err
