"""The compliance suite that comes with the package dm-env-rpc: our server passes it by the
package's connection and by ours, and our connection passes it against a server of the package."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import connection, dm_env_rpc_pb2, error, message_utils
from google.rpc import status_pb2
from gymnasium import spaces
from support import compliance_cases
from support.package_simulator import Arena, Served

from juggler.envrunner.dm_env_rpc.server import GymServer
from juggler.envrunner.dm_env_rpc.simulator_connection import Connection, SimulatorRefused
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as ours


class Everything(gymnasium.Env[Any, Any]):
    """Observations and actions of every kind."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "body": spaces.Dict({"angle": spaces.Box(-np.inf, np.inf, (), np.float64)}),
            "small": spaces.Box(-3, 3, (2,), np.int16),
            "flags": spaces.MultiBinary((2, 2)),
            "where": spaces.Tuple((spaces.Discrete(5, start=-2), spaces.MultiDiscrete([2, 9]))),
        }
    )
    action_space = spaces.Dict(
        {
            "push": spaces.Box(np.float32([[-1, -2], [0, 0.1]]), np.float32([[1, 2], [3, 0.2]])),
            "free": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "turn": spaces.Discrete(3, start=-1),
            "keys": spaces.MultiBinary(4),
            "gears": spaces.MultiDiscrete([3, 4], start=[1, 0]),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {}


class _OfThePackage:
    """Dials with the package's own connection class."""

    address = ""

    def open_connection(self) -> Any:
        channel = grpc.insecure_channel(self.address)
        opened = connection.Connection(channel)
        self.addCleanup(channel.close)  # type: ignore[attr-defined]
        return opened


class OursForThePackage:
    """Our connection behind the interface of the package's."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._connection = self._run(self._open(address))

    @staticmethod
    async def _open(address: str) -> Connection:
        return Connection(address)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def send(self, request: Any) -> Any:
        packed, field = message_utils.pack_environment_request(request)
        sent = ours.EnvironmentRequest.FromString(packed.SerializeToString())
        try:
            (reply,) = self._run(self._connection.send(sent, deadline=10))
        except SimulatorRefused as refused:
            status = status_pb2.Status(code=refused.code, message=refused.text)
            raise error.DmEnvRpcError(status) from None
        whole = dm_env_rpc_pb2.EnvironmentResponse.FromString(reply.SerializeToString())
        return message_utils.unpack_environment_response(whole, field)

    def close(self) -> None:
        self._run(self._connection.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _OfOurs:
    address = ""

    def open_connection(self) -> Any:
        return OursForThePackage(self.address)


@pytest.fixture(scope="module")
def cartpole() -> Any:
    server = GymServer(functools.partial(gymnasium.make, "CartPole-v1"), "127.0.0.1:0")
    yield server
    assert server.close()


@pytest.fixture(scope="module")
def everything() -> Any:
    server = GymServer(Everything, "127.0.0.1:0")
    yield server
    assert server.close()


@pytest.fixture(scope="module")
def arena() -> Any:
    served = Served(Arena())
    yield served
    served.close()


class _CartPole(_OfThePackage):
    @pytest.fixture(autouse=True)
    def _serve(self, cartpole: GymServer) -> None:
        self.address = cartpole.address


class _Everything(_OfThePackage):
    @pytest.fixture(autouse=True)
    def _serve(self, everything: GymServer) -> None:
        self.address = everything.address


class _EverythingByOurs(_OfOurs):
    @pytest.fixture(autouse=True)
    def _serve(self, everything: GymServer) -> None:
        self.address = everything.address


class _Arena(_OfOurs):
    @pytest.fixture(autouse=True)
    def _serve(self, arena: Served) -> None:
        self.address = arena.address


class TestWorldsOfServeGym(_CartPole, compliance_cases.Worlds): ...


class TestJoiningServeGym(_CartPole, compliance_cases.Joining): ...


class TestResettingServeGym(_CartPole, compliance_cases.Resetting): ...


class TestResettingWorldsOfServeGym(_CartPole, compliance_cases.ResettingWorlds): ...


class TestSteppingServeGym(_CartPole, compliance_cases.Stepping): ...


class TestJoiningAServerOfEverySpace(_Everything, compliance_cases.Joining): ...


class TestSteppingAServerOfEverySpace(_Everything, compliance_cases.Stepping): ...


class TestOurConnectionAgainstOurServer(_EverythingByOurs, compliance_cases.Stepping): ...


class TestOurConnectionWithWorldsOfThePackage(_Arena, compliance_cases.Worlds): ...


class TestOurConnectionJoiningThePackage(_Arena, compliance_cases.Joining): ...


class TestOurConnectionResettingThePackage(_Arena, compliance_cases.Resetting): ...


class TestOurConnectionResettingWorldsOfThePackage(_Arena, compliance_cases.ResettingWorlds): ...


class TestOurConnectionSteppingThePackage(_Arena, compliance_cases.Stepping): ...
