"""A policy that acts in the simulator's process, and its steps."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.client.spaces import Arrays, as_tensors
from juggler.runtime.wire.v1 import simulator_pb2 as pb

Version = tuple[int, int]  # generation and update
_Row = tuple[Arrays, int]  # one row of arrays [R, ...]


@dataclass(slots=True)
class _Steps:
    """Unsent steps of an episode, all by one version of the weights.

    There is one observation more than rewards. The last action may have no reward yet.
    """

    version: Version
    observations: list[_Row]
    starts: bool = True
    actions: list[_Row] = field(default_factory=list)
    action_logp: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[float] = field(default_factory=list)  # numbers of each reward


class LocalPolicy:
    """Acts in N environments, and turns its steps into recordings.

    Args:
        count: N.
        seed: seed for drawing actions; None: random.
    """

    def __init__(self, count: int, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)
        self._steps: list[_Steps | None] = [None] * count  # None: not in an episode
        self._rewards = np.zeros(count, np.float32)  # [N] of the last actions
        self._states: dict[str, NDArray[Any]] = {}  # [N, ...] by name
        self._finished: list[pb.Recording] = []

    def use(self, model: bytes, version: Version) -> None:
        """Act with this model, a `PolicyChunk` of simulator.proto, from now on.

        Raises:
            ModuleNotFoundError: onnxruntime is missing.
        """
        try:
            onnxruntime = importlib.import_module("onnxruntime")
        except ModuleNotFoundError as error:
            text = "acting by oneself needs the package onnxruntime: pip install onnxruntime"
            raise ModuleNotFoundError(text) from error
        options = onnxruntime.SessionOptions()
        # One step of a few environments is not worth a second thread.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._model = onnxruntime.InferenceSession(model, options, providers=providers)
        self._version = version
        self._inputs = {each.name: each for each in self._model.get_inputs()}
        self._outputs = [tuple(each.name.split("/")) for each in self._model.get_outputs()]
        for name, each in self._inputs.items():
            if name.startswith("state/"):
                blank = np.zeros((len(self._steps), *each.shape[1:]), _dtype(each.type))
                self._states.setdefault(name, blank)

    def take(self, places: Sequence[int], rows: pb.Rows, seen: Arrays, last: Arrays) -> None:
        """Record what the last actions led to.

        Args:
            places: [R] numbers of the environments.
            rows: the other columns.
            seen: [R, ...] to act on.
            last: [K, ...] last observations of the `rows.final_rows`, which are all that ended.
        """
        # The simulator may write the next observation into the same memory.
        self._seen = {path: array.copy() for path, array in seen.items()}
        final_of = {row: at for at, row in enumerate(rows.final_rows)}
        told = len(rows.infos) // len(places) if places else 0
        for row, place in enumerate(places):
            steps = self._steps[place]
            if steps is None:
                continue
            self._rewards[place] = rows.rewards[row]
            steps.rewards.append(rows.rewards[row])
            steps.infos.extend(rows.infos[row * told : (row + 1) * told])
            if row not in final_of:
                steps.observations.append((self._seen, row))
                continue
            steps.observations.append((last, final_of[row]))
            terminated = rows.terminated[row]
            self._finish(place, steps, terminated=terminated, truncated=not terminated)
            self._steps[place] = None

    def act(self, places: Sequence[int]) -> Arrays:
        """Choose actions [R, ...] for the environments taken last, and remember them."""
        where, seen = list(places), self._seen
        first = np.array([self._steps[place] is None for place in where])  # [R]
        out = self._run(where, first)
        for name, kept in self._states.items():
            kept[where] = out["next_state", *name.split("/")[1:]]
        chosen = {path[1:]: each for path, each in out.items() if path[0] == "chosen"}
        action_logp = out.get(("action_logp",))
        for row, place in enumerate(where):
            steps = self._steps[place]
            if steps is None:
                self._steps[place] = steps = _Steps(self._version, [(seen, row)])
            elif steps.version != self._version:
                self._finish(place, steps)
                steps.version = self._version
            steps.actions.append((chosen, row))
            if action_logp is not None:
                steps.action_logp.append(float(action_logp[row]))
        return {path[1:]: each for path, each in out.items() if path[0] == "action"}

    def hand_in(self) -> list[pb.Recording]:
        """Return recordings of the steps with a reward since the last call."""
        for place, steps in enumerate(self._steps):
            if steps is not None:
                self._finish(place, steps)
        finished, self._finished = self._finished, []
        return finished

    def _run(self, places: list[int], first: NDArray[np.bool_]) -> Arrays:
        """Run the model, for outputs [R, ...] by path."""
        given = {"/".join(("observation", *path)): array for path, array in self._seen.items()}
        given |= {"first": first, "reward": self._rewards[places]}
        given |= {name: kept[places] for name, kept in self._states.items()}
        if "uniform" in self._inputs:
            shape = len(places), *self._inputs["uniform"].shape[1:]
            given["uniform"] = self._generator.random(shape, np.float32)
        given = {name: array for name, array in given.items() if name in self._inputs}
        return dict(zip(self._outputs, self._model.run(None, given), strict=True))

    def _finish(self, place: int, steps: _Steps, **ends: bool) -> None:
        """Turn steps with a reward, if there are any, into a recording."""
        if not (count := len(steps.rewards)):
            return
        generation, update = steps.version
        recording = pb.Recording(
            environment=place,
            starts=steps.starts,
            observations=_stacked(steps.observations[: count + 1]),
            actions=_stacked(steps.actions[:count]),
            rewards=steps.rewards,
            infos=steps.infos,
            action_logp=steps.action_logp[:count],
            version=pb.PolicyVersion(generation=generation, update=update),
            **ends,
        )
        self._finished.append(recording)
        steps.starts, steps.rewards, steps.infos = False, [], []
        for column in (steps.observations, steps.actions, steps.action_logp):
            del column[:count]


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype that ONNX Runtime names as in "tensor(float)"."""
    kind = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))


def _stacked(rows: list[_Row]) -> list[pb.NamedTensor]:
    paths = rows[0][0]
    return as_tensors(
        {path: np.stack([arrays[path][row] for arrays, row in rows]) for path in paths}
    )
