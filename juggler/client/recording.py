"""Sessions that report what was done, rather than ask what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from juggler.client.connection import Connection, GatewayError, OneAgentSession
from juggler.client.spaces import Values, tensor_of
from juggler.runtime.wire.v1 import simulator_pb2 as pb

Version = tuple[int, int]


class RecordingSession(OneAgentSession):
    """Sends episodes. As a context manager, it waits at its end until the gateway has accepted them
    all.

    Attributes:
        newest: generation and update of the newest weights that the gateway has announced.
        steps_recorded: number of accepted steps.
        steps_stale: number of steps in recordings that were too old, completely or from some step
            on.
    """

    def __init__(
        self,
        connection: Connection,
        observations: Values,
        actions: Values,
        environments: int | None,
    ) -> None:
        super().__init__(connection, observations, actions, environments)
        self._unanswered: dict[int, pb.FromSimulator] = {}  # recordings, by seq
        self._request: pb.FromSimulator | None = None  # for a policy
        self._policy = bytearray()  # the part of it that has arrived
        self.newest: Version = (0, 0)
        self.steps_recorded = self.steps_stale = 0

    def record(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        action_logp: Any = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        starts: bool = True,
        environment: int = 0,
        version: Version | None = None,
    ) -> None:
        """Send an episode, or a part of one. Waits if many are under way.

        Args:
            observations: [L + 1, ...] before each step and after the last one.
            actions: [L, ...] as the policy chose them.
            rewards: [L]
            action_logp: [L] log-probabilities of the actions, under the policy that chose them.
            terminated: the last step ended the episode.
            truncated: the last step cut the episode off, as a time limit does.
            starts: the first step begins an episode; otherwise it continues the last one.
            environment: number of the environment.
            version: of the gateway's weights that acted, if it was such weights.

        Raises:
            GatewayError: the session is over.
            ValueError: something does not fit the spaces.
        """
        seen, chosen = self._observations.arrays(observations), self._actions.arrays(actions)
        rewards = np.asarray(rewards, np.float32)  # [L]
        most = self.welcome.fragment_steps
        for begin in range(0, len(rewards), most):
            end = min(begin + most, len(rewards))
            last = end == len(rewards)
            self._send(
                pb.Recording(
                    environment=environment,
                    starts=starts and begin == 0,
                    terminated=terminated and last,
                    truncated=truncated and last,
                    observations=_some(seen, begin, end + 1),
                    actions=_some(chosen, begin, end),
                    rewards=rewards[begin:end],
                    action_logp=() if action_logp is None else np.ravel(action_logp)[begin:end],
                    version=as_version(version),
                )
            )

    def flush(self) -> None:
        """Wait until the gateway has accepted everything that was sent."""
        while self._unanswered:
            self._hear()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self.flush()
        finally:
            self.close()

    def _send(self, recording: pb.Recording) -> None:
        while len(self._unanswered) >= self.welcome.batches_in_flight:
            self._hear()
        self._seq += 1
        recording.seq = self._seq
        message = pb.FromSimulator(recording=recording)
        self._unanswered[self._seq] = message
        self._connection.send(message)

    def _hear(self) -> bytes | None:
        """Handle the next message; returns a policy if the message completes one."""
        unanswered: Sequence[pb.FromSimulator] = [*self._unanswered.values()]
        if self._request is not None:
            unanswered = [*unanswered, self._request]
        answer = self._connection.hear(unanswered)
        match answer.WhichOneof("message"):
            case "recorded":
                self._recorded(answer.recorded)
            case "new_policy":
                self._told(answer.new_policy.version)
            case "policy" if self._request is not None:  # it may come twice
                return self._piece(answer.policy)
        return None

    def _recorded(self, answer: pb.Recorded) -> None:
        message = self._unanswered.pop(answer.seq, None)
        if message is not None:
            steps = len(message.recording.rewards)
            self.steps_recorded += steps
            self.steps_stale += steps if answer.stale else 0
        self._told(answer.newest)

    def _told(self, version: pb.PolicyVersion) -> None:
        self.newest = max(self.newest, (version.generation, version.update))

    def _piece(self, chunk: pb.PolicyChunk) -> bytes | None:
        if chunk.offset == 0:  # of another policy, after a connection broke
            self._policy.clear()
        self._policy += chunk.data
        if len(self._policy) < chunk.size:
            return None
        model = bytes(self._policy)
        self._policy.clear()
        if hashlib.sha256(model).digest() != chunk.sha256:
            raise GatewayError("BAD_MESSAGE", "the policy is not what its digest says")
        self._request = None
        self._told(chunk.version)
        self.version: Version = (chunk.version.generation, chunk.version.update)
        return model


def _some(arrays: Any, begin: int, end: int) -> list[pb.NamedTensor]:
    return [tensor_of(path, array[begin:end]) for path, array in arrays.items()]


def as_version(version: Version | None) -> pb.PolicyVersion | None:
    return None if version is None else pb.PolicyVersion(generation=version[0], update=version[1])
