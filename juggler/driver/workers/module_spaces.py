"""What a module sees and does."""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.json_format import MessageToDict

from juggler.runtime.wire.v1 import spaces_pb2, training_pb2

_LONGEST_TEXT = 1000  # about spaces or modules, for people


@dataclass(frozen=True, slots=True)
class Spaces:
    """What one module sees and does, as the first EnvRunner found it.

    Attributes:
        observation: of the observations in batches, behind the connectors.
        action: of the actions in batches.
        environment_observation: the environment's; an empty message if it has no encoding.
        environment_action: the same.
        critic: of what the value function sees beside observations; an empty message if nothing.
    """

    observation: spaces_pb2.Space
    action: spaces_pb2.Space
    environment_observation: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)
    environment_action: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)
    critic: spaces_pb2.Space = field(default_factory=spaces_pb2.Space)

    @classmethod
    def of(cls, ready: training_pb2.Ready.Module) -> Spaces:
        return cls(
            ready.observation_space,
            ready.action_space,
            ready.environment_observation_space,
            ready.environment_action_space,
            ready.critic_space,
        )

    @property
    def in_batches(self) -> dict[str, spaces_pb2.Space]:
        """Those of what batches hold, by name."""
        spaces = {"observation": self.observation, "action": self.action, "critic": self.critic}
        return {name: space for name, space in spaces.items() if space.ByteSize()}

    def __str__(self) -> str:
        size = sum(space.ByteSize() for space in self.in_batches.values())
        if size >= _LONGEST_TEXT:
            return f"spaces of {size} bytes"
        return str({name: MessageToDict(space) for name, space in self.in_batches.items()})

    def to_json(self) -> dict[str, object]:
        """The environment's spaces, for a checkpoint; {}: they have no encoding."""
        if not self.environment_action.ByteSize():
            return {}
        return {
            "observation": MessageToDict(self.environment_observation),
            "action": MessageToDict(self.environment_action),
        }
