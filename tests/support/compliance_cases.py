"""The compliance suite of the package dm-env-rpc, for any server and any connection class.

Classes to inherit from, beside one that has `open_connection`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dm_env_rpc.v1 import compliance, dm_env_rpc_pb2, tensor_utils

UNKNOWN = {"invalid_setting": tensor_utils.pack_tensor(123)}


class _Connected:
    """A connection for each test."""

    connection: Any = None
    world_name: Any = None
    specs: Any = None

    def open_connection(self) -> Any:
        raise NotImplementedError

    def setUp(self) -> None:
        self.connection = self.open_connection()
        self.connect()
        super().setUp()  # type: ignore[misc]

    def tearDown(self) -> None:
        super().tearDown()  # type: ignore[misc]
        self.connection.close()

    def connect(self) -> None:
        """What a test finds done."""

    def make(self) -> None:
        response = self.connection.send(dm_env_rpc_pb2.CreateWorldRequest())
        self.world_name = response.world_name

    def join(self) -> Any:
        request = dm_env_rpc_pb2.JoinWorldRequest(world_name=self.world_name)
        self.specs = self.connection.send(request).specs
        return self.specs


class Worlds(_Connected, compliance.CreateDestroyWorld):
    required_world_settings: ClassVar[dict[str, Any]] = {}
    invalid_world_settings = UNKNOWN
    has_multiple_world_support = True


class Joining(_Connected, compliance.JoinLeaveWorld):
    invalid_join_settings = UNKNOWN

    def connect(self) -> None:
        self.make()


class Resetting(_Connected, compliance.Reset):
    def connect(self) -> None:
        self.make()

    def join_world(self) -> Any:
        return self.join()


class ResettingWorlds(_Connected, compliance.ResetWorld):
    def connect(self) -> None:
        self.make()


class Stepping(_Connected, compliance.Step):
    def connect(self) -> None:
        self.make()
        self.join()
