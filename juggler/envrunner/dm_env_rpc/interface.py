"""The observations and actions of a simulator that an agent uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from juggler.envrunner.dm_env_rpc.layout import Layout, chosen
from juggler.envrunner.dm_env_rpc.options import SimulatorOptions
from juggler.envrunner.dm_env_rpc.simulator_connection import MAX_MESSAGE_BYTES
from juggler.envrunner.dm_env_rpc.tensors import Spec, TensorError, decode, encode
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from juggler.runtime.wire.trees import Path


@dataclass(frozen=True, slots=True)
class Interface:
    """Specs by their use.

    Attributes:
        observations: to learn from.
        actions: to choose.
        signals: reward and, if there is one, discount.
        requested: unique ids of all observations that a step asks for.
    """

    observations: Layout
    actions: Layout
    signals: Layout
    requested: tuple[int, ...]

    @classmethod
    def of(cls, specs: pb.ActionObservationSpecs, options: SimulatorOptions) -> Interface:
        """
        Raises:
            TensorError: nothing can be learned from it; names the tensor, and what to do.
        """
        signals = [options.reward]
        if any(spec.name == options.discount for spec in specs.observations.values()):
            signals.append(options.discount)
        try:
            signal_specs = chosen(specs.observations, signals, (), "observation")
        except TensorError as error:
            raise TensorError(f"{error}; env_kwargs.reward names the reward") from None
        for spec in signal_specs:
            if spec.size != 1:
                raise TensorError(f"{spec.name!r} must be one number, not {list(spec.shape)}")
        seen = chosen(specs.observations, options.observations, signals, "observation")
        if (size := sum(spec.size * spec.dtype.itemsize for spec in seen)) > MAX_MESSAGE_BYTES:
            raise TensorError(f"its observations have {size} bytes, over {MAX_MESSAGE_BYTES}")
        return cls._of(
            Layout.of_specs(seen, "observation"),
            Layout.of_specs(chosen(specs.actions, options.actions, (), "action"), "action"),
            Layout.of_specs(signal_specs, "observation"),
        )

    @classmethod
    def _of(cls, observations: Layout, actions: Layout, signals: Layout) -> Interface:
        requested = tuple(spec.uid for spec in (*observations.specs, *signals.specs))
        return cls(observations, actions, signals, requested)

    def adopt(self, specs: pb.ActionObservationSpecs) -> Interface:
        """The same spaces, from specs that were sent anew.

        Raises:
            TensorError: they no longer fit; names what has changed.
        """
        return self._of(
            self.observations.adopt(specs.observations, "observation"),
            self.actions.adopt(specs.actions, "action"),
            self.signals.adopt(specs.observations, "observation"),
        )

    def write_actions(self, arrays: Mapping[Path, Any], row: int, step: pb.StepRequest) -> None:
        """Put one environment's actions into a request.

        Floats are clipped to the bounds, which simulators check: those of a policy may exceed them
        by rounding, or by far if no connector clips them.

        Args:
            arrays: all environments' [N, ...].
            row: the environment.
            step: the request.
        """
        for path, spec in zip(self.actions.paths, self.actions.specs, strict=True):
            action = np.asarray(arrays[path][row], spec.dtype)  # [*spec.shape]
            if spec.dtype.kind == "f" and (spec.low is not None or spec.high is not None):
                action = np.clip(action, spec.low, spec.high)
            encode(step.actions[spec.uid], spec, action)

    def read_observations(self, step: pb.StepResponse, row: int, into: Mapping[Path, Any]) -> None:
        """Copy the observations of a reply into one row of arrays [N, ...].

        Raises:
            TensorError: something is missing, or not what its spec says.
        """
        for path, spec in zip(self.observations.paths, self.observations.specs, strict=True):
            into[path][row] = decode(_given(step, spec), spec)

    def read_signals(self, step: pb.StepResponse) -> list[float]:
        """Reward and, if there is one, discount.

        Raises:
            TensorError: one is missing, or not what its spec says.
        """
        return [float(decode(_given(step, spec), spec).item()) for spec in self.signals.specs]


def _given(step: pb.StepResponse, spec: Spec) -> pb.Tensor:
    if spec.uid not in step.observations:
        raise TensorError(f"{spec.name!r} was requested, and is not in the reply")
    return step.observations[spec.uid]
