"""Errors that end sessions of simulators."""

from __future__ import annotations

from juggler.runtime.wire.v1 import simulator_pb2 as pb

Code = pb.Error


class SessionError(Exception):
    """An error that ends a session.

    The text includes the remedy.

    Attributes:
        code: one of `Error.Code`.
        seq: number of the batch concerned; 0: none.
        retryable: another session may succeed.
    """

    def __init__(
        self, code: pb.Error.Code, text: str, seq: int = 0, retryable: bool = False
    ) -> None:
        super().__init__(text)
        self.code, self.seq, self.retryable = code, seq, retryable

    @property
    def with_code(self) -> str:
        """Its text after the name of its code, for logs."""
        return f"{Code.Code.Name(self.code)}: {self}"

    def message(self) -> pb.ToSimulator:
        return pb.ToSimulator(
            error=pb.Error(
                code=self.code, message=str(self), seq=self.seq, retryable=self.retryable
            )
        )
