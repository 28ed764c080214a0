"""The policy as ONNX models, for simulators that act by themselves."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from gymnasium import Space
from numpy.typing import NDArray

from juggler.gateway.step_batches import to_message
from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.acting.actor import Actor
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_CHUNK = 1 << 20
#: Versions that were handed out and are remembered. Older ones are long stale.
_MOST_GIVEN = 4096
_MODULE = "module."  # begins the names of a module's values in a graph


class Publisher:
    """Exports the policy once, in a thread, as it takes seconds.

    The models of other versions have the same graph with other weights.

    Args:
        policy: to export.
        observation_space: of the simulators.
        action_space: of the simulators.

    Attributes:
        failure: why there is no model; "": there is one, or will be.
    """

    def __init__(
        self, policy: Actor, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self.failure = ""
        self._policy = policy
        self._spaces = observation_space, action_space
        self._begun = False
        self._without_weights: Any = None  # an onnx.ModelProto
        self._names: list[str] = []  # of weights in it
        self._given: dict[Version, None] = {}
        self._model: tuple[Version, bytes] | None = None

    @property
    def ready(self) -> bool:
        return self._without_weights is not None

    def begin(self, done: Callable[[], None]) -> None:
        """Export the policy once in another thread, and call `done` there."""
        if self._begun:
            return
        self._begun = True
        try:
            graph = self._graph()
        except Exception as error:  # of user modules and connectors
            self.failure = _said(error)
            return
        arguments = graph, done
        threading.Thread(target=self._export, args=arguments, name="export", daemon=True).start()

    def _graph(self) -> ActingGraph:
        """Return a copy of the policy, with the spaces of simulators."""
        policy = self._policy
        assert policy.connectors is not None
        assert isinstance(policy.module, RLModule)
        module = deepcopy(policy.module)
        return ActingGraph(
            module, policy.connectors, policy.module_to_env, *self._spaces, explores=True
        )

    def _constants(self) -> dict[str, NDArray[Any]]:
        """Return the graph's values that change during a run, by name."""
        policy = self._policy
        assert policy.connectors is not None
        weights = {f"{_MODULE}{name}": array for name, array in policy.weights().items()}
        return {**weights, **policy.connectors.numbers()}

    def gave(self, version: Version) -> bool:
        """Whether these weights were handed out."""
        return version in self._given

    def chunks(self, version: Version) -> Iterator[pb.ToSimulator]:
        """Messages with the current policy.

        Args:
            version: of its weights.
        """
        if self._model is None or self._model[0] != version:
            self._model = version, self._with_weights()
        model = self._model[1]
        self._given.pop(version, None)
        self._given[version] = None
        while len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]
        digest = hashlib.sha256(model).digest()
        named = to_message(version)
        for offset in range(0, len(model), _CHUNK):
            yield pb.ToSimulator(
                policy=pb.PolicyChunk(
                    policy=DEFAULT_MODULE,
                    version=named,
                    size=len(model),
                    sha256=digest,
                    offset=offset,
                    data=model[offset : offset + _CHUNK],
                )
            )

    def _export(self, graph: ActingGraph, done: Callable[[], None]) -> None:
        try:
            model = to_onnx(graph, optimize=False).model_proto
            mine = {tensor.name: tensor for tensor in model.graph.initializer}
            ours = self._constants().keys()
            # Weights that only learners use are not in the model.
            odd = [name for name in mine if name.startswith(_MODULE) and name not in ours]
            odd += [name for name in ours - mine.keys() if not name.startswith(_MODULE)]
            if odd:
                raise ValueError(f"not under the names that they have here: {odd}")
            self._names = sorted(mine.keys() & ours)
            for name in self._names:
                model.graph.initializer.remove(mine[name])
            self._without_weights = model
        except Exception as error:  # of user modules and connectors
            self.failure = _said(error)
        finally:
            done()

    def _with_weights(self) -> bytes:
        """The whole model."""
        from onnx import numpy_helper  # installed, as the export used it

        model, constants = type(self._without_weights)(), self._constants()
        model.CopyFrom(self._without_weights)
        for name in self._names:
            model.graph.initializer.append(numpy_helper.from_array(constants[name], name))
        whole: bytes = model.SerializeToString()
        return whole


def _said(error: Exception) -> str:
    """The text of an error, with its class if that helps."""
    told = isinstance(error, ValueError | NotImplementedError) and str(error)
    return told or f"{type(error).__name__}: {error}"
