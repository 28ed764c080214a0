"""Gymnasium environments, served over dm_env_rpc."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
import gymnasium
import numpy as np

from juggler.envrunner.dm_env_rpc.tensors import TensorError, setting_value
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.envrunner.dm_env_rpc.worlds import Offer, World
from juggler.envrunner.failures import EnvironmentFailed
from juggler.runtime.actors.credentials import why_not_admitted
from juggler.runtime.actors.endpoints import bind, make_server
from juggler.runtime.actors.tls import Tls

#: Makes an environment from the settings of a world.
Make = Callable[..., Any]

SEED: Final = "seed"
_SERVICE: Final = "dm_env_rpc.v1.Environment"
_MOST_CLIENTS: Final = 1024
#: Of one client.
_MOST_WORLDS: Final = 64
_GRACE_SECONDS: Final = 2.0


class GymServer:
    """Serves environments until `close`. Each client makes its own worlds, one environment in each;
    they end with its stream.

    One environment is made and closed at the start, to find errors and to see its spaces.

    Args:
        make: an environment.
        settings: names of the keywords of `make` that clients may set when they make a world.
        address: where to listen.
        token: that clients must show; "": none.
        tls: of this host; None: connections are plain.
        insecure: listen beyond loopback even without TLS or without a token.

    Attributes:
        address: the one that was bound.

    Raises:
        EndpointError: it cannot or must not listen there.
        EnvironmentFailed: an environment could not be made.
        TensorError, UnsupportedSpace: spaces of the environment cannot be sent.
    """

    def __init__(
        self,
        make: Make,
        address: str,
        *,
        settings: tuple[str, ...] = (),
        token: str = "",
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        self._make, self._settings, self._token = make, settings, token
        _try(make)
        self._clients = 0  # whose environments are not closed
        self._changed = threading.Condition()
        self._names = (f"world-{number}" for number in itertools.count())
        # Channels of one process to one address share a connection unless they are told not to.
        self._server = make_server(_MOST_CLIENTS, _MOST_CLIENTS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.EnvironmentRequest.FromString,
            response_serializer=pb.EnvironmentResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler}),)
        )
        self.address = bind(self._server, address, token=token, tls=tls, insecure=insecure)
        self._server.start()

    def close(self) -> bool:
        """Hang up on all clients, and close their environments.

        Returns:
            False if the thread of one did not end within a few seconds.
        """
        self._server.stop(_GRACE_SECONDS).wait(2 * _GRACE_SECONDS)
        with self._changed:
            return self._changed.wait_for(lambda: self._clients == 0, _GRACE_SECONDS)

    def _process(
        self, requests: Iterator[pb.EnvironmentRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.EnvironmentResponse]:
        if reason := why_not_admitted(tuple(context.invocation_metadata()), self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
        client = _Client(self._make, self._settings, self._names)
        self._count(1)
        try:
            for request in requests:
                yield client.answer(request)
        finally:
            client.close()
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._changed:
            self._clients += more
            self._changed.notify_all()


def _try(make: Make) -> None:
    try:
        first = make()
    except Exception as error:
        raise EnvironmentFailed.during("the environment", "constructor", error) from None
    if not isinstance(first, gymnasium.Env):
        raise ValueError(f"a gymnasium.Env can be served, not a {type(first).__name__}")
    try:
        Offer(first)
    finally:
        first.close()


class _Refused(Exception):
    """A request that cannot be carried out, with a code and a reason for the client."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Client:
    """One stream: the worlds that it made, and the one that it has joined.

    Args:
        make: an environment.
        settings: names of the settings of environments.
        names: for worlds.
    """

    def __init__(self, make: Make, settings: tuple[str, ...], names: Iterator[str]) -> None:
        self._make, self._settings, self._names = make, settings, names
        self._worlds: dict[str, tuple[World, Offer]] = {}
        self._joined = ""  # the name of a world
        self._answers: dict[str, Callable[[Any], Any]] = {
            "create_world": self._create_world,
            "join_world": self._join_world,
            "step": self._step,
            "reset": self._reset,
            "reset_world": self._reset_world,
            "leave_world": self._leave_world,
            "destroy_world": self._destroy_world,
        }

    def answer(self, request: pb.EnvironmentRequest) -> pb.EnvironmentResponse:
        """The reply to a request; an error if it cannot be carried out."""
        kind = request.WhichOneof("payload") or "nothing"
        try:
            if kind not in self._answers:
                raise _Refused(
                    grpc.StatusCode.UNIMPLEMENTED,
                    f"{kind} is not served; {', '.join(self._answers)} are",
                )
            reply = self._answers[kind](getattr(request, kind))
            return pb.EnvironmentResponse(**{kind: reply})
        except _Refused as error:
            return _error(error.code, str(error))
        except TensorError as error:
            return _error(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception as error:  # the environment's own, whatever it is
            trace = traceback.format_exc()
            print(f"juggler serve-gym: {kind} failed\n{trace}", file=sys.stderr)
            text = f"{type(error).__name__}: {error}\n{trace}"
            return _error(grpc.StatusCode.INTERNAL, text)

    def close(self) -> None:
        """Close the environments of all its worlds."""
        while self._worlds:
            _, (world, _) = self._worlds.popitem()
            world.close()

    # -- requests -------------------------------------------------------------------------------

    def _create_world(self, request: pb.CreateWorldRequest) -> pb.CreateWorldResponse:
        if len(self._worlds) >= _MOST_WORLDS:
            raise _Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_WORLDS} worlds are the most"
            )
        seed, settings = _read(request.settings, self._settings)
        env = self._make(**settings)
        try:
            offer = Offer(env)
        except BaseException:
            env.close()
            raise
        name = next(self._names)
        self._worlds[name] = (World(env, offer, seed), offer)
        return pb.CreateWorldResponse(world_name=name)

    def _join_world(self, request: pb.JoinWorldRequest) -> pb.JoinWorldResponse:
        if self._joined:
            raise _Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this stream is in {self._joined!r}: leave it first, or open another stream",
            )
        world, offer = self._world(request.world_name)
        seed, _ = _read(request.settings, ())
        world.restart(seed)
        self._joined = request.world_name
        return pb.JoinWorldResponse(specs=offer.message)

    def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        world, _ = self._world_joined()
        return world.step(request)

    def _reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        world, offer = self._world_joined()
        seed, _ = _read(request.settings, ())
        world.restart(seed)
        return pb.ResetResponse(specs=offer.message)

    def _reset_world(self, request: pb.ResetWorldRequest) -> pb.ResetWorldResponse:
        world, _ = self._world(request.world_name)
        seed, _ = _read(request.settings, ())
        world.interrupt(seed)
        return pb.ResetWorldResponse()

    def _leave_world(self, _: pb.LeaveWorldRequest) -> pb.LeaveWorldResponse:
        self._joined = ""
        return pb.LeaveWorldResponse()

    def _destroy_world(self, request: pb.DestroyWorldRequest) -> pb.DestroyWorldResponse:
        world, _ = self._world(request.world_name)
        if request.world_name == self._joined:
            raise _Refused(
                grpc.StatusCode.FAILED_PRECONDITION, f"{self._joined!r} is joined: leave it first"
            )
        del self._worlds[request.world_name]
        world.close()
        return pb.DestroyWorldResponse()

    def _world(self, name: str) -> tuple[World, Offer]:
        if name not in self._worlds:
            known = ", ".join(self._worlds) or "none yet: create one"
            raise _Refused(
                grpc.StatusCode.NOT_FOUND,
                f"this stream has no world {name[:100]!r}; it has made {known}",
            )
        return self._worlds[name]

    def _world_joined(self) -> tuple[World, Offer]:
        if not self._joined:
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, "no world has been joined")
        return self._worlds[self._joined]


def _read(settings: Any, allowed: tuple[str, ...]) -> tuple[int | None, dict[str, Any]]:
    """The seed among settings, and the others."""
    if unknown := sorted(set(settings) - {SEED, *allowed}):
        raise TensorError(
            f"there is no setting {unknown[0][:100]!r} here; there are "
            f"{', '.join((SEED, *allowed))}"
        )
    values = {name: setting_value(name, tensor) for name, tensor in settings.items()}
    seed = values.pop(SEED, None)
    if seed is not None and (type(seed) is not int or not 0 <= seed < np.iinfo(np.int64).max):
        raise TensorError("the setting 'seed' must be an integer of at least 0")
    return seed, values


def _error(code: grpc.StatusCode, text: str) -> pb.EnvironmentResponse:
    number: int = code.value[0]
    return pb.EnvironmentResponse(error=pb.Status(code=number, message=text))
