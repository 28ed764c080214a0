"""A dm_env_rpc server by the package dm_env_rpc, and streams that dial it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2, dm_env_rpc_pb2_grpc, tensor_spec_utils, tensor_utils
from google.rpc import status_pb2

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env

BOARD, COUNT, REWARD, DISCOUNT, TITLE = 10, 11, 12, 13, 14
MOVE, PUSH = 1, 2


def tensor_spec(name: str, dtype: int, shape: Any = (), low: Any = None, high: Any = None) -> Any:
    spec = dm_env_rpc_pb2.TensorSpec(name=name, dtype=dtype, shape=shape)
    tensor_spec_utils.set_bounds(spec, low, high)
    return spec


def arena_specs() -> tuple[dict[int, Any], dict[int, Any]]:
    actions = {
        MOVE: tensor_spec("move", dm_env_rpc_pb2.INT32, (), -1, 1),
        PUSH: tensor_spec("push", dm_env_rpc_pb2.FLOAT, (2,), -0.1, 0.1),
    }
    observations = {
        BOARD: tensor_spec("board", dm_env_rpc_pb2.FLOAT, (3, 4), 0.0, 100.0),
        COUNT: tensor_spec("agent.count", dm_env_rpc_pb2.INT64, (2,)),
        REWARD: tensor_spec("reward", dm_env_rpc_pb2.FLOAT),
        DISCOUNT: tensor_spec("discount", dm_env_rpc_pb2.DOUBLE),
        TITLE: dm_env_rpc_pb2.TensorSpec(name="title", dtype=dm_env_rpc_pb2.STRING),
    }
    return actions, observations


class Arena(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """Counts steps on a board; sequences end after `length` steps.

    Attributes:
        specs: actions and observations, by unique id; asked for at each join and reset.
        change: makes of each step's response another one; called with it and the step's number.
        barrier: all streams wait there in each step.
        worlds: that exist, by their names.
    """

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.specs: Callable[[], tuple[dict[int, Any], dict[int, Any]]] = arena_specs
        self.change: Callable[[Any, int], Any] = lambda response, step: response
        self.barrier: threading.Barrier | None = None
        self.calls: list[str] = []
        self.actions: list[dict[int, Any]] = []  # of steps that used them
        self.worlds: set[str] = set()
        self._made = 0

    def Process(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        session = _Session(self)
        for request in requests:
            kind = request.WhichOneof("payload")
            self.calls.append(kind)
            response = dm_env_rpc_pb2.EnvironmentResponse()
            try:
                reply = getattr(session, kind)(getattr(request, kind))
                getattr(response, kind).CopyFrom(reply)
            except Exception as error:
                response.error.CopyFrom(status_pb2.Status(code=3, message=repr(error)))
            yield response

    def new_world(self) -> str:
        self._made += 1
        self.worlds.add(name := f"arena {self._made}")
        return name


class _Session:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.joined = ""
        self.running, self.step_number, self.sequences = False, 0, 0

    def create_world(self, request: Any) -> Any:
        self._only(request.settings, {"seed"})
        return dm_env_rpc_pb2.CreateWorldResponse(world_name=self.arena.new_world())

    def join_world(self, request: Any) -> Any:
        self._only(request.settings, {"team"})
        if self.joined:
            raise RuntimeError("joined already")
        self._exists(request.world_name)
        self.joined, self.running = request.world_name, False
        return dm_env_rpc_pb2.JoinWorldResponse(specs=self._specs())

    def leave_world(self, _: Any) -> Any:
        self.joined = ""
        return dm_env_rpc_pb2.LeaveWorldResponse()

    def destroy_world(self, request: Any) -> Any:
        self._exists(request.world_name)
        self.arena.worlds.remove(request.world_name)
        return dm_env_rpc_pb2.DestroyWorldResponse()

    def reset(self, request: Any) -> Any:
        self._must_be_joined()
        self._only(request.settings, {"seed"})
        self.running = False
        return dm_env_rpc_pb2.ResetResponse(specs=self._specs())

    def reset_world(self, request: Any) -> Any:
        self._exists(request.world_name)
        self.running = False
        return dm_env_rpc_pb2.ResetWorldResponse()

    def step(self, request: Any) -> Any:
        self._must_be_joined()
        if self.arena.barrier is not None:
            self.arena.barrier.wait(60)
        actions, observations = self.arena.specs()
        if self.running:
            self.arena.actions.append(self._checked(actions, request.actions))
        self.step_number = self.step_number + 1 if self.running else 0
        over = self.step_number >= self.arena.length
        self.running, self.sequences = not over, self.sequences + over
        ends = (dm_env_rpc_pb2.INTERRUPTED, dm_env_rpc_pb2.TERMINATED)
        state = ends[self.sequences % 2] if over else dm_env_rpc_pb2.RUNNING
        response = dm_env_rpc_pb2.StepResponse(state=state)
        for uid in request.requested_observations:
            response.observations[uid].CopyFrom(self._observed(uid, observations[uid]))
        return self.arena.change(response, self.step_number)

    def _observed(self, uid: int, spec: Any) -> Any:
        name = spec.name
        value: Any = {
            "board": np.full((3, 4), self.step_number, np.float32),
            "agent.count": np.array([self.step_number, -1]),
            "reward": np.float32(self.step_number / 2),
            "discount": np.float64(0.5),
            "title": "arena",
        }.get(name, np.zeros(spec.shape))
        if name == "title":
            return tensor_utils.pack_tensor(value)
        compress = name == "board" and self.step_number % 2 == 0  # one element for all
        return tensor_utils.pack_tensor(value, dtype=spec.dtype, try_compress=compress)

    def _checked(self, specs: dict[int, Any], given: Any) -> dict[int, Any]:
        values = {}
        for uid, tensor in given.items():
            spec = specs[uid]
            value = np.asarray(tensor_utils.unpack_tensor(tensor))
            bounds = tensor_spec_utils.bounds(spec)
            if value.shape != tuple(spec.shape) or len(tensor.shape) != len(spec.shape):
                raise ValueError(f"shape {value.shape}")
            if tensor_utils.get_tensor_type(tensor) != tensor_utils.data_type_to_np_type(
                spec.dtype
            ):
                raise ValueError("dtype")
            if np.any(value < bounds.min) or np.any(value > bounds.max):
                raise ValueError(f"{spec.name} out of bounds: {value}")
            values[uid] = value
        return values

    def _specs(self) -> Any:
        actions, observations = self.arena.specs()
        specs = dm_env_rpc_pb2.ActionObservationSpecs()
        for field, each in ((specs.actions, actions), (specs.observations, observations)):
            for uid, spec in each.items():
                field[uid].CopyFrom(spec)
        return specs

    def _must_be_joined(self) -> None:
        if not self.joined:
            raise RuntimeError("join a world first")

    def _exists(self, world: str) -> None:
        if world not in self.arena.worlds:
            raise KeyError(world)

    @staticmethod
    def _only(settings: Any, known: set[str]) -> None:
        if set(settings) - known:
            raise ValueError(f"unknown settings {set(settings) - known}")


class Served:
    """Serves the package on loopback, or given replies, as bytes."""

    def __init__(self, servicer: Any = None, port: int = 0, reply: bytes | None = None) -> None:
        self._pool = futures.ThreadPoolExecutor(32)
        self.server = grpc.server(self._pool)
        if servicer is not None:
            dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(servicer, self.server)
        if reply is not None:
            handler = grpc.stream_stream_rpc_method_handler(
                lambda requests, context: (reply for _ in requests)
            )
            self.server.add_generic_rpc_handlers(
                (
                    grpc.method_handlers_generic_handler(
                        "dm_env_rpc.v1.Environment", {"Process": handler}
                    ),
                )
            )
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.server.start()

    def close(self) -> None:
        self.server.stop(None).wait(60)
        self._pool.shutdown()


SEEN = ["board", "agent.count"]


def dial(where: str, count: int = 1, deadline: float = 10.0, **options: Any) -> Any:
    config = EnvRunnerConfig(
        env=f"dm_env_rpc://{where}",
        env_kwargs=options,
        envs_per_runner=count,
        step_deadline_seconds=deadline,
    )
    return make_vector_env(config)


def act(count: int, move: int = 1) -> dict[str, Any]:
    return {"move": np.full(count, move), "push": np.full((count, 2), 0.05, np.float32)}
