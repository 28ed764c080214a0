"""A policy as an ONNX model. onnxruntime is imported only when there is a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Path = tuple[str, ...]


class Model:
    """Runs a policy.

    Args:
        data: the model; its inputs and outputs are those of `PolicyChunk` in simulator.proto.

    Attributes:
        states: names of the recurrent states, with zeros [1, ...] for each.

    Raises:
        ModuleNotFoundError: onnxruntime is missing.
    """

    def __init__(self, data: bytes) -> None:
        try:
            onnxruntime = importlib.import_module("onnxruntime")
        except ModuleNotFoundError as error:
            text = "acting by oneself needs the package onnxruntime: pip install onnxruntime"
            raise ModuleNotFoundError(text) from error
        options = onnxruntime.SessionOptions()
        # One step of a few environments is not worth a second thread.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"]
        )
        inputs = {each.name: each for each in self._session.get_inputs()}
        self._names = [each.name for each in self._session.get_outputs()]
        self._takes = inputs.keys()
        self._noise = tuple(inputs["uniform"].shape[1:]) if "uniform" in inputs else ()
        self.states = {
            name: np.zeros((1, *each.shape[1:]), _DTYPES[each.type])
            for name, each in inputs.items()
            if name.startswith("state/")
        }

    def act(
        self,
        observations: Mapping[Path, NDArray[Any]],
        first: NDArray[np.bool_],
        rewards: NDArray[np.float32],
        states: Mapping[str, NDArray[Any]],
        generator: np.random.Generator,
    ) -> dict[Path, NDArray[Any]]:
        """Choose actions.

        Args:
            observations: [R, ...] by path.
            first: [R], which of them begin an episode.
            rewards: [R] of the last actions.
            states: [R, ...] by name.
            generator: generator of the noise.

        Returns:
            Outputs [R, ...] by path: ("action", ...), ("chosen", ...), ("action_logp",) and
                ("next_state", ...).
        """
        given = {"/".join(("observation", *path)): each for path, each in observations.items()}
        given |= {"first": first, "reward": rewards, **states}
        if self._noise:
            given["uniform"] = generator.random((len(first), *self._noise), np.float32)
        given = {name: array for name, array in given.items() if name in self._takes}
        outputs = self._session.run(None, given)
        return {tuple(name.split("/")): out for name, out in zip(self._names, outputs, strict=True)}


_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    **{
        f"tensor({kind}int{n})": np.dtype(f"{kind}int{n}")
        for kind in ("", "u")
        for n in (8, 16, 32, 64)
    },
}
