"""A session that acts by itself, with policies from the gateway."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.client.connection import Connection
from juggler.client.recording import RecordingSession, as_version
from juggler.client.spaces import Values, as_first, for_each, one_of, rows_of, tensor_of, told
from juggler.runtime.wire.flags import as_flag
from juggler.runtime.wire.v1 import simulator_pb2 as pb

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


_Arrays = dict[Path, NDArray[Any]]  # [R, ...] by path
_Row = tuple[_Arrays, int]  # one of them


@dataclass(slots=True)
class _Steps:
    """Steps of one environment and episode that were not sent yet, all by one version of the
    weights. The reward of the last one may be unknown."""

    starts: bool
    version: tuple[int, int]
    observations: list[_Row] = field(default_factory=list)
    actions: list[_Row] = field(default_factory=list)
    action_logp: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    infos: list[float] = field(default_factory=list)  # K for each reward


class LocalSession(RecordingSession):
    """Acts without a round trip for each step; otherwise like `Session`.

    Steps are sent whenever every environment may have made `welcome.fragment_steps` of them. Newer
    weights are fetched at the same time, if there are any.

    Args:
        connection: the session's connection.
        observations: values of the simulator's observations.
        actions: values of its actions.
        environments: N; None: one environment, without a dimension for it.
        pull: whether to fetch newer weights; otherwise call `pull` yourself.
        seed: seed for drawing actions; None: random.

    Attributes:
        version: generation and update of the weights that act.
    """

    def __init__(
        self,
        connection: Connection,
        observations: Values,
        actions: Values,
        environments: int | None,
        pull: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(connection, observations, actions, environments)
        count = environments or 1
        self._pulls = pull
        self._generator = np.random.default_rng(seed)
        self._steps: list[_Steps | None] = [None] * count  # None: not in an episode
        self._rewards = np.zeros(count, np.float32)  # [N] of the last actions
        self._states: dict[str, NDArray[Any]] = {}  # [N, ...] by name
        self._finished: list[pb.Recording] = []
        self._calls = 0
        self._model: Model
        self.pull()

    def pull(self) -> tuple[int, int]:
        """Act with the newest weights from now on, and return their version.

        Raises:
            GatewayError: the session is over.
        """
        self._hand_in()
        self._request = pb.FromSimulator(policy=pb.PolicyRequest())
        self._connection.send(self._request)
        while (model := self._hear()) is None:
            pass
        self._model = Model(model)
        for name, blank in self._model.states.items():
            self._states.setdefault(name, np.repeat(blank, len(self._steps), 0))
        return self.version

    def step(
        self,
        observation: Any,
        reward: Any = 0.0,
        terminated: Any = False,
        truncated: Any = False,
        final_observation: Any = None,
        environments: Sequence[int] | None = None,
        infos: Mapping[str, Any] | None = None,
    ) -> Any:
        """Report what the last action led to and the current observation, and get the next action,
        as `Session.step` does."""
        self._calls += 1
        if self._count is None:
            seen = _copies(self._observations.arrays(as_first(observation)))  # [1, ...]
            ended = as_flag("terminated", terminated) or as_flag("truncated", truncated)
            finals = None if final_observation is None else as_first(final_observation)
            last = seen if finals is None else _copies(self._observations.arrays(finals))
            self._take([0], *_columns(1, reward, terminated, truncated), last, infos)
            self._next_fragment([0], seen)
            if ended and finals is None:
                return None
            return one_of(self._act(np.array([0]), seen))
        places = np.arange(len(self._steps)) if environments is None else np.asarray(environments)
        seen = _copies(self._observations.arrays(observation))  # [R, ...]
        last = seen
        if np.any(truncated) and final_observation is None:
            raise ValueError("an episode was truncated: give its final_observation, too")
        if final_observation is not None:
            last = self._finals(seen, final_observation, np.logical_or(terminated, truncated))
        columns = _columns(len(places), reward, terminated, truncated)
        self._take(places.tolist(), *columns, last, infos)
        self._next_fragment(places.tolist(), seen)
        return self._act(places, seen)

    def flush(self) -> None:
        """Send all steps, those of running episodes too, and wait until the gateway has them."""
        self._hand_in()
        super().flush()

    # -- acting ---------------------------------------------------------------------------------

    def _next_fragment(self, places: list[int], seen: _Arrays) -> None:
        """At the end of a fragment, wait until the one before it has been accepted, and send it."""
        if self._calls <= self.welcome.fragment_steps:
            return
        self._calls = 1
        super().flush()
        for row, place in enumerate(places):
            steps = self._steps[place]
            if steps is not None and steps.rewards:
                self._finish(place, (seen, row))
        self._hand_in()
        if self._pulls and self.newest > self.version:
            self.pull()

    def _take(
        self,
        places: list[int],
        rewards: Any,
        terminated: Any,
        truncated: Any,
        last: _Arrays,
        infos: Mapping[str, Any] | None,
    ) -> None:
        """Record what the last actions led to, if there were any."""
        numbers = told(self._connection.info_names, infos or {}, len(places))  # [R, K]
        for row, place in enumerate(places):
            steps = self._steps[place]
            if steps is None:
                continue
            reward, ended = float(rewards[row]), bool(terminated[row] or truncated[row])
            self._rewards[place] = reward
            steps.rewards.append(reward)
            steps.infos.extend(numbers[row].tolist())
            if ended:
                cut = bool(truncated[row] and not terminated[row])
                self._finish(place, (last, row), terminated=not cut, truncated=cut)
                self._steps[place] = None

    def _act(self, places: NDArray[np.intp], seen: _Arrays) -> Any:
        """Choose actions [R, ...], and remember them."""
        first = np.array([self._steps[place] is None for place in places])  # [R]
        states = {name: kept[places] for name, kept in self._states.items()}  # [R, ...]
        out = self._model.act(seen, first, self._rewards[places], states, self._generator)
        for name, kept in self._states.items():
            kept[places] = out["next_state", *name.split("/")[1:]]
        chosen = {path[1:]: each for path, each in out.items() if path[0] == "chosen"}
        action_logp = out.get(("action_logp",))
        for row, place in enumerate(places.tolist()):
            steps = self._steps[place]
            if steps is None:
                self._steps[place] = steps = _Steps(True, self.version)
            elif steps.version != self.version:
                if steps.rewards:
                    self._finish(place, (seen, row))
                self._steps[place] = steps = _Steps(False, self.version)
            steps.observations.append((seen, row))
            steps.actions.append((chosen, row))
            if action_logp is not None:
                steps.action_logp.append(float(action_logp[row]))
        actions = {path[1:]: each for path, each in out.items() if path[0] == "action"}
        return self._actions.from_arrays(actions)

    def _finals(self, seen: _Arrays, finals: Any, ended: Any) -> _Arrays:
        """The last observations [R, ...] of episodes that ended, and the current ones elsewhere."""
        arrays = _copies(seen)
        for row in np.flatnonzero(np.broadcast_to(ended, len(next(iter(arrays.values()))))):
            for path, array in self._observations.arrays(as_first(rows_of(finals, row))).items():
                arrays[path][row] = array[0]
        return arrays

    # -- sending --------------------------------------------------------------------------------

    def _hand_in(self) -> None:
        """Send all finished recordings, and the completed steps of running ones."""
        for place, steps in enumerate(self._steps):
            if steps is not None and 0 < len(steps.rewards) < len(steps.actions):
                self._finish(place, steps.observations[len(steps.rewards)])
        for recording in self._finished:
            self._send(recording)
        self._finished.clear()

    def _finish(
        self, place: int, last: _Row, terminated: bool = False, truncated: bool = False
    ) -> None:
        """Turn the completed steps of an environment, and the observation after them, into a
        recording. A step without a reward stays."""
        steps = self._steps[place]
        assert steps is not None
        count = len(steps.rewards)
        self._finished.append(
            pb.Recording(
                environment=place,
                starts=steps.starts,
                terminated=terminated,
                truncated=truncated,
                observations=_stacked([*steps.observations[:count], last]),
                actions=_stacked(steps.actions[:count]),
                rewards=steps.rewards,
                infos=steps.infos,
                action_logp=steps.action_logp[:count],
                version=as_version(steps.version),
            )
        )
        self._steps[place] = _Steps(
            False,
            steps.version,
            steps.observations[count:],
            steps.actions[count:],
            steps.action_logp[count:],
        )


def _columns(count: int, reward: Any, terminated: Any, truncated: Any) -> tuple[Any, Any, Any]:
    return (
        for_each("reward", reward, count, np.float32),  # [R]
        for_each("terminated", terminated, count, np.bool_),  # [R]
        for_each("truncated", truncated, count, np.bool_),  # [R]
    )


def _stacked(rows: list[_Row]) -> list[pb.NamedTensor]:
    return [
        tensor_of(path, np.stack([arrays[path][row] for arrays, row in rows]))
        for path in rows[0][0]
    ]


def _copies(arrays: _Arrays) -> _Arrays:
    """Copies, because simulators may write the next observation into the same memory."""
    return {path: array.copy() for path, array in arrays.items()}
