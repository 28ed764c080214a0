"""Serves Gymnasium environments over dm_env_rpc, one per client.

    pip install dm-env-rpc
    python serve_gym.py CartPole-v1 --bind 127.0.0.1:5010
    juggler train cartpole-ppo --env dm_env_rpc://127.0.0.1:5010

Observations and actions are one Box or Discrete space each. With `--tls DIRECTORY`, made by
`juggler certs`, clients need its certificates and its token.
"""

from __future__ import annotations

import argparse
import hmac
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import gymnasium
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc, spec_manager, tensor_spec_utils, tensor_utils
from google.rpc import code_pb2, status_pb2


class GymServer(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """Serves environments. Each stream has one world, which has one environment.

    Args:
        make: an environment.
        token: required from clients; "": none.
    """

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], token: str = "") -> None:
        self._make, self._token = make, token

    def Process(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}"):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        env = self._make()
        try:
            world = World(env)
            for request in requests:
                yield _answer(world, request)
        finally:
            env.close()


class World:
    """One environment. Each method answers the request of its name."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env, self._seed = env, None
        self._ended = True  # the next step begins an episode
        observation = _spec("observation", env.observation_space)
        reward = pb.TensorSpec(name="reward", dtype=pb.DOUBLE)
        self._specs = pb.ActionObservationSpecs(
            actions={1: _spec("action", env.action_space)}, observations={1: observation, 2: reward}
        )
        self._actions = spec_manager.SpecManager(self._specs.actions)
        self._observations = spec_manager.SpecManager(self._specs.observations)

    def create_world(self, request: Any) -> Any:
        self._begin(request.settings)
        return pb.CreateWorldResponse(world_name="world")

    def join_world(self, request: Any) -> Any:
        self._begin(request.settings)
        return pb.JoinWorldResponse(specs=self._specs)

    def reset(self, request: Any) -> Any:
        self._begin(request.settings)
        return pb.ResetResponse(specs=self._specs)

    def leave_world(self, _: Any) -> Any:
        return pb.LeaveWorldResponse()

    def destroy_world(self, _: Any) -> Any:
        return pb.DestroyWorldResponse()

    def step(self, request: Any) -> Any:
        reward, terminated, truncated = 0.0, False, False
        # The first step of an episode has no action. An environment that fails begins a new one.
        beginning, self._ended = self._ended, True
        if beginning:
            observation, _ = self._env.reset(seed=self._seed)
            self._seed = None
        else:
            action = self._actions.unpack(request.actions)["action"]
            observation, reward, terminated, truncated, _ = self._env.step(action)
        self._ended = bool(terminated or truncated)
        shown = self._observations.pack({"observation": observation, "reward": float(reward)})
        state = pb.TERMINATED if terminated else pb.INTERRUPTED if truncated else pb.RUNNING
        wanted = {uid: shown[uid] for uid in request.requested_observations}
        return pb.StepResponse(state=state, observations=wanted)

    def _begin(self, settings: Any) -> None:
        """Begin an episode with the next step, seeded by the settings."""
        values = {name: tensor_utils.unpack_tensor(value) for name, value in settings.items()}
        seed = values.pop("seed", None)
        if values:
            raise ValueError(f"there is no setting {min(values)!r} here; there is seed")
        self._ended, self._seed = True, self._seed if seed is None else int(seed)


def _answer(world: World, request: Any) -> Any:
    """Reply to a request, with an error if it fails."""
    kind = request.WhichOneof("payload")
    try:
        return pb.EnvironmentResponse(**{kind: getattr(world, kind)(getattr(request, kind))})
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return pb.EnvironmentResponse(error=status_pb2.Status(code=code_pb2.INTERNAL, message=text))


def _spec(name: str, space: Any) -> Any:
    """The tensor of a space's elements, with their bounds."""
    spec = pb.TensorSpec(
        name=name, shape=space.shape, dtype=tensor_utils.np_type_to_data_type(space.dtype)
    )
    if isinstance(space, gymnasium.spaces.Discrete):
        tensor_spec_utils.set_bounds(spec, space.start, space.start + space.n - 1)
    elif isinstance(space, gymnasium.spaces.Box):
        tensor_spec_utils.set_bounds(spec, space.low, space.high)
    else:
        raise TypeError(f"a Box or a Discrete space can be served, not {space}")
    return spec


def serve(server: GymServer, address: str, tls: Path | None = None) -> tuple[grpc.Server, str]:
    """Start a server, and return it with its address."""
    # A thread for each stream, so that a slow environment delays no other.
    serving = grpc.server(futures.ThreadPoolExecutor(1024))
    dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(server, serving)
    if tls is None:
        port = serving.add_insecure_port(address)
    else:
        ca, cert, key = ((tls / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key"))
        port = serving.add_secure_port(
            address, grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
        )
    serving.start()
    return serving, f"{address.rpartition(':')[0]}:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("env", help="a Gymnasium id")
    parser.add_argument("--bind", default="127.0.0.1:0", help="HOST:PORT; port 0: any free one")
    parser.add_argument("--tls", type=Path, help="a directory made by `juggler certs`")
    given = parser.parse_args()
    host = given.bind.rpartition(":")[0]
    if given.tls is None and host not in ("127.0.0.1", "[::1]", "localhost"):
        parser.error(f"--bind {given.bind}: beyond loopback, pass --tls")
    try:
        gymnasium.make(given.env).close()
    except gymnasium.error.Error as error:
        parser.error(str(error))
    token = "" if given.tls is None else (given.tls / "token").read_text().strip()
    server = GymServer(lambda: gymnasium.make(given.env), token)
    serving, address = serve(server, given.bind, given.tls)
    print(f"serving {given.env} at dm_env_rpc://{address}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serving.stop(2.0).wait()


if __name__ == "__main__":
    # Blocked in every thread, so that the main thread alone receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
