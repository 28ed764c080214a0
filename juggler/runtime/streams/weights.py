"""Weights from a learner to its EnvRunners: an EnvRunner's end of the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from juggler.runtime.actors.credentials import CallMetadata
from juggler.runtime.actors.endpoints import dial
from juggler.runtime.actors.tls import Tls
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.memory_reader import Reader
from juggler.runtime.streams.sharing import Dialled
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, Limits
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import episodes_pb2

SUBSCRIBE_METHOD = "/juggler.v1.Weights/Subscribe"


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and buffers: a tree module id -> name -> array, read-only."""

    version: Version
    tree: Tree


class WeightsSubscription:
    """The envrunner's end: a thread that always holds the newest weights it was sent.

    Dials again, every `retry_seconds`, when the stream breaks; until `close`. What else goes wrong
    in the thread ends it, and is raised at whoever asks for weights.

    Attributes:
        address: of the learner.
    """

    def __init__(
        self,
        address: str,
        metadata: CallMetadata,
        subscriber: str,
        limits: Limits,
        retry_seconds: float = 0.5,
        tls: Tls | None = None,
        module_id: str = DEFAULT_MODULE,
        inline: Callable[[str], None] | None = None,
    ) -> None:
        """Args:
        address: of the learner.
        metadata: of the call.
        subscriber: the worker's id.
        limits: of one version.
        retry_seconds: from the end of a stream to the next.
        tls: of this host; None: no TLS.
        module_id: of the module.
        inline: called with the reason, for people, if the learner is on this host and shares no
            memory.
        """
        self.address = address
        self._inline = inline
        self._module_id = module_id
        self._metadata = metadata
        self._subscriber = subscriber
        self._limits = limits
        self._retry_seconds = retry_seconds
        self._condition = threading.Condition()
        self._newest: Weights | None = None
        self._closed = threading.Event()
        self._error = ""
        self._failure: BaseException | None = None
        self._channel = dial(address, tls, one_thread=True)
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def newest(self) -> Weights | None:
        """The newest weights; None before there are any.

        Raises:
            Exception: of the thread, which brings no more.
        """
        if self._failure is not None:
            raise self._failure
        return self._newest

    def wait_for(self, version: Version, timeout: float) -> Weights:
        """The newest weights, as soon as they are at least `version`.

        Raises:
            TimeoutError: they did not come in time; says what was seen last.
            Exception: as for `newest`.
        """
        with self._condition:
            if not self._condition.wait_for(
                lambda: (newest := self.newest) is not None and newest.version >= version, timeout
            ):
                seen = self._newest.version if self._newest else "none"
                raise TimeoutError(
                    f"no weights of version {tuple(version)} from the learner at {self.address} "
                    f"within {timeout:.0f} s (newest: {seen}). {self._error}"
                )
            assert self._newest is not None
            return self._newest

    def close(self) -> None:
        self._closed.set()
        self._channel.close()

    def _run(self) -> None:
        try:
            self._receive()
        except BaseException as error:
            # Of a channel that was closed meanwhile nothing else is to be expected.
            if not self._closed.is_set():
                with self._condition:
                    self._failure = error
                    self._condition.notify_all()

    def _receive(self) -> None:
        subscribe: grpc.UnaryStreamMultiCallable[episodes_pb2.Subscription, bytes]
        subscribe = self._channel.unary_stream(
            SUBSCRIBE_METHOD,
            request_serializer=episodes_pb2.Subscription.SerializeToString,
            response_deserializer=None,
        )
        digests = not self.address.startswith("unix:")
        while not self._closed.is_set():
            shared = Dialled(self.address, Reader, self._inline)
            reader = FrameReader(
                episodes_pb2.WeightsHeader, self._limits, digests=digests, lease=shared.lease
            )
            metadata = shared.in_metadata(self._metadata)
            try:
                request = episodes_pb2.Subscription(
                    module_id=self._module_id, subscriber=self._subscriber
                )
                for message in subscribe(request, metadata=metadata, wait_for_ready=True):
                    frame = reader.feed(message)
                    shared.is_large(max(len(message), reader.unfinished_bytes))
                    if frame is not None:
                        self._take(Weights(Version.of(frame.header.version), frame.tree))
                    del frame
                    shared.hear()
            except grpc.RpcError as error:
                self._error = str(error.details() if hasattr(error, "details") else error)
            except WireError as error:
                self._error = f"bad weights: {error}"
            finally:
                shared.close()
            self._closed.wait(self._retry_seconds)

    def _take(self, weights: Weights) -> None:
        with self._condition:
            # A learner that restarted may offer older weights; nobody goes back to them.
            if self._newest is None or weights.version > self._newest.version:
                self._newest = weights
                self._condition.notify_all()
