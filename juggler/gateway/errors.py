"""What a simulator did that its session cannot survive."""

from __future__ import annotations

from juggler.runtime.wire.v1 import simulator_pb2 as pb

Code = pb.Error


class SessionError(Exception):
    """Ends a session. The text says what happened, where, and what to do, fit for its simulator.

    Attributes:
        code: one of `Error.Code`.
        seq: of the batch that it is about; 0: none.
        retryable: another session may fare better.
    """

    def __init__(
        self, code: pb.Error.Code, text: str, seq: int = 0, retryable: bool = False
    ) -> None:
        super().__init__(text)
        self.code, self.seq, self.retryable = code, seq, retryable

    def message(self) -> pb.ToSimulator:
        return pb.ToSimulator(
            error=pb.Error(
                code=self.code, message=str(self), seq=self.seq, retryable=self.retryable
            )
        )
