"""Our connection passes the compliance suite of the package dm-env-rpc, against its server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2, error, message_utils
from google.rpc import status_pb2
from support import compliance_cases
from support.package_simulator import Arena, Served

from juggler.envrunner.dm_env_rpc.agent import Connection, SimulatorRefused
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as ours


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
def arena() -> Any:
    served = Served(Arena())
    yield served
    served.close()


class _Arena(_OfOurs):
    @pytest.fixture(autouse=True)
    def _serve(self, arena: Served) -> None:
        self.address = arena.address


class TestOurConnectionWithWorldsOfThePackage(_Arena, compliance_cases.Worlds): ...


class TestOurConnectionJoiningThePackage(_Arena, compliance_cases.Joining): ...


class TestOurConnectionResettingThePackage(_Arena, compliance_cases.Resetting): ...


class TestOurConnectionResettingWorldsOfThePackage(_Arena, compliance_cases.ResettingWorlds): ...


class TestOurConnectionSteppingThePackage(_Arena, compliance_cases.Stepping): ...
