"""Runs whose environments are simulators elsewhere, and `juggler serve-gym`, which is one."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import grpc
import pytest
from dm_env_rpc.v1 import connection, dm_env_rpc_pb2, error, tensor_utils
from support.network import free_address
from support.place import Command, Place, assert_books_balance, eventually, summary, trained_steps

from juggler.runtime.actors.certificates import make_certificates

SMALL = ["--envs-per-runner", 4, "--fragment-steps", 16, "--batch-size", 60]
ONE_RUNNER = ["--num-env-runners", 1, "--run-dir", "run"]

SIMULATORS = '''
import gymnasium, numpy as np

class Robot(gymnasium.Env):
    """Falls over where it is told to."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where="", size=3):
        self.where, self.steps = where, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = np.zeros(3, np.float32)
        if self.steps == 5 and self.where == "raise":
            raise ZeroDivisionError("the robot fell over")
        if self.steps == 5 and self.where == "nan":
            observation[1] = np.nan
        return observation, 1.0, self.steps % 20 == 0, False, {}
'''


def serve(place: Place, env: str = "CartPole-v1", *options: object) -> tuple[Command, str]:
    """A server, and what `--env` takes to dial it."""
    server = place.start("serve-gym", env, *options)
    server.wait_for("serving", seconds=60)
    found = re.search(r"dm_env_rpc://\S+", server.output)
    assert found is not None, server.output
    return server, found[0]


def stop(server: Command) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0, server.output


@pytest.mark.long
def test_the_package_plays_with_what_is_served(place: Place) -> None:
    place.write("robots.py", SIMULATORS)
    server, address = serve(place, "robots:Robot", "--env-kwargs", '{"size": 4}', "--setting=where")
    clients = []
    for _ in range(2):
        channel = grpc.insecure_channel(address.removeprefix("dm_env_rpc://"))
        clients.append((channel, client := connection.Connection(channel)))
        settings = {"where": tensor_utils.pack_tensor("nan")}
        made = client.send(dm_env_rpc_pb2.CreateWorldRequest(settings=settings))
        joined = client.send(dm_env_rpc_pb2.JoinWorldRequest(world_name=made.world_name))
        assert [spec.name for spec in joined.specs.actions.values()] == ["action"]
        (uid,) = (uid for uid, spec in joined.specs.observations.items() if spec.name != "reward")
        for _ in range(6):
            step = client.send(dm_env_rpc_pb2.StepRequest(requested_observations=[uid]))
        assert str(tensor_utils.unpack_tensor(step.observations[uid])) == "[ 0. nan  0.]"
        with pytest.raises(
            error.DmEnvRpcError, match=r"no setting .*size.* here; there are seed, where"
        ):
            client.send(
                dm_env_rpc_pb2.CreateWorldRequest(settings={"size": tensor_utils.pack_tensor(1)})
            )
    for channel, client in clients:
        client.close()
        channel.close()
    stop(server)
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_run_trains_on_what_is_served_with_tls_and_a_token(place: Place) -> None:
    make_certificates(place.path / "tls", (), 1.0)
    server, address = serve(place, "CartPole-v1", "--tls", "tls")
    kwargs = json.dumps({"tls": "tls", "seed_setting": "seed"})
    options = ["--env", address, "--env-kwargs", kwargs, "--stop-steps", 600]
    run = place.run("train", *SMALL, *ONE_RUNNER, *options)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    played = place.run("evaluate", "run", "--episodes", 3)
    assert "3 episodes: return" in played.output, played.output
    stop(server)
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_a_server_that_is_killed_is_waited_for_and_the_run_goes_on(place: Place) -> None:
    directory = place.path / "run"
    bound = ["--bind", free_address()]
    server, address = serve(place, "CartPole-v1", *bound)
    run = place.start("train", *SMALL, *ONE_RUNNER, "--env", address)
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: run.output)
    server.process.kill()
    server.wait(30)
    run.wait_for("the stream to the simulator broke", seconds=60)
    # Whichever had not been answered when the server went.
    failed = rf"environment [0-3] \({re.escape(address)}\) failed in step: "
    assert re.search(failed, run.output), run.output
    run.wait_for("no simulator at", seconds=60)
    server, _ = serve(place, "CartPole-v1", *bound)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached + 600, 60, lambda: run.output)
    run.interrupt()
    assert run.wait(30) == 130, run.output
    assert_books_balance(directory)
    assert summary(directory)["restarts"] >= 1
    stop(server)
    place.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nan", "observations of environment"),
        ("raise", "refused step: INTERNAL: ZeroDivisionError: the robot fell over"),
    ],
)
def test_what_a_simulator_does_wrong_is_named(place: Place, where: str, words: str) -> None:
    place.write("robots.py", SIMULATORS)
    server, address = serve(place, "robots:Robot", "--setting", "where")
    kwargs = json.dumps({"create_world": {"where": where}})
    run = place.run("train", *SMALL, *ONE_RUNNER, "--env", address, "--env-kwargs", kwargs)
    assert run.status == 1, run.output
    assert words in run.output
    assert summary(place.path / "run")["reason_for_stop"] == "no_envrunner"
    assert_books_balance(place.path / "run")
    stop(server)
    place.assert_nothing_is_left()


@pytest.mark.long
def test_cartpole_is_learned_through_sockets(place: Place) -> None:
    server, address = serve(place)
    kwargs: Any = json.dumps({"seed_setting": "seed"})
    options = ["--env", address, "--env-kwargs", kwargs, "--stop-return", 450, "--run-dir", "run"]
    run = place.run("train", "cartpole-ppo", *options, seconds=220)
    assert run.status == 0, run.output
    end = summary(place.path / "run")
    assert end["solved"], run.output
    assert end["episode_return_mean"] >= 450
    assert_books_balance(place.path / "run")
    stop(server)
    place.assert_nothing_is_left()
