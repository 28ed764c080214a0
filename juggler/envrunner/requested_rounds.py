"""The sample requests that are answered by playing once."""

from __future__ import annotations

from juggler.runtime.wire.v1 import training_pb2


class RequestedRound:
    """Gathers the requests of a round, which come one right after the other.

    Attributes:
        requests: those that have come, by command id.
    """

    def __init__(self) -> None:
        self.requests: dict[int, training_pb2.SampleRequest] = {}

    def add(self, command_id: int, request: training_pb2.SampleRequest) -> bool:
        """Take the next request. True: the round is complete.

        Raises:
            ValueError: it does not belong to the requests before.
        """
        for other in self.requests.values():
            if (other.round, other.requests_in_round) != (request.round, request.requests_in_round):
                raise ValueError(
                    f"a request of round {request.round} came before all "
                    f"{other.requests_in_round} of round {other.round}"
                )
            if other.module_id == request.module_id:
                raise ValueError(
                    f"round {request.round} has two requests for module {request.module_id!r}"
                )
        self.requests[command_id] = request
        return not request.round or len(self.requests) >= request.requests_in_round
