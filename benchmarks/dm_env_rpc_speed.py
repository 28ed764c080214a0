"""dm_env_rpc: the cost of an observation, and the speed of environments behind sockets.

Each figure is compared with that of the package dm-env-rpc.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import connection, dm_env_rpc_pb2, tensor_utils

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.tensors import Spec
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as ours
from juggler.envrunner.environments.vector import make_vector_env

_TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    _decoding(np.random.default_rng(0).random((84, 84, 4), np.float32), seconds / 10)
    with _served() as address:
        for count in (1, 16, 64):
            _stepping(address, count, seconds)


def _decoding(image: np.ndarray[Any, np.dtype[np.float32]], seconds: float) -> None:
    step = dm_env_rpc_pb2.StepResponse(state=dm_env_rpc_pb2.RUNNING)
    step.observations[1].CopyFrom(tensor_utils.pack_tensor(image))
    sent = dm_env_rpc_pb2.EnvironmentResponse(step=step).SerializeToString()
    spec = Spec(1, "image", image.shape, "floats", image.dtype)
    out = np.empty((16, *image.shape), image.dtype)  # [N, 84, 84, 4]

    def mine() -> None:
        response = ours.EnvironmentResponse.FromString(sent)
        out[3] = spec.decode(response.step.observations[1])

    def theirs() -> None:
        response = dm_env_rpc_pb2.EnvironmentResponse.FromString(sent)
        out[3] = tensor_utils.unpack_tensor(response.step.observations[1])

    for each in (mine, theirs):
        out[3] = 0
        each()
        assert out[3].tobytes() == image.tobytes()
    _show("84 × 84 × 4 floats, from message to array", "µs", mine, theirs, seconds, 1e6)


def _stepping(address: str, count: int, seconds: float) -> None:
    config = EnvRunnerConfig(env=f"dm_env_rpc://{address}", envs_per_runner=count)
    env = make_vector_env(config)
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, count)  # [N]
    channels = [grpc.insecure_channel(address) for _ in range(count)]
    clients = [_joined(channel) for channel in channels]

    def mine() -> None:
        env.step(actions)

    def theirs() -> None:
        for client, action in zip(clients, actions, strict=True):
            tensor = tensor_utils.pack_tensor(action)
            request = dm_env_rpc_pb2.StepRequest(actions={1: tensor}, requested_observations=[1, 2])
            response = client.send(request)
            for observation in response.observations.values():
                tensor_utils.unpack_tensor(observation)

    what = f"a step of CartPole served by examples/simulators/serve_gym.py, {count} environments"
    _show(what, "µs", mine, theirs, seconds, 1e6 / count)
    env.close()
    for channel in channels:
        channel.close()


def _joined(channel: grpc.Channel) -> connection.Connection:
    client = connection.Connection(channel)
    made = client.send(dm_env_rpc_pb2.CreateWorldRequest())
    client.send(dm_env_rpc_pb2.JoinWorldRequest(world_name=made.world_name))
    return client


def _show(
    what: str,
    unit: str,
    mine: Callable[[], None],
    theirs: Callable[[], None],
    seconds: float,
    scale: float,
) -> None:
    pairs = [(_time(mine, seconds), _time(theirs, seconds)) for _ in range(_TURNS)]
    a, b = (statistics.median(each) * scale for each in zip(*pairs, strict=True))
    ratios = [theirs_took / mine_took for mine_took, theirs_took in pairs]
    print(
        f"| {what} | {a:.0f} {unit} | {b:.0f} {unit} | **{statistics.median(ratios):.1f}** "
        f"({min(ratios):.1f}–{max(ratios):.1f}) |",
        flush=True,
    )


def _time(call: Callable[[], None], seconds: float) -> float:
    """The duration of one call, in seconds."""
    call()
    calls, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        call()
        calls += 1
    return spent / calls


@contextlib.contextmanager
def _served() -> Iterator[str]:
    command = [sys.executable, "examples/simulators/serve_gym.py", "CartPole-v1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"dm_env_rpc://(\S+)", server.stdout.readline())
    assert found is not None
    try:
        yield found[1]
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
