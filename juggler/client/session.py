"""A simulator's session with a gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from juggler.client.connection import PROTOCOL, Connection, OneAgentSession
from juggler.client.local import LocalSession
from juggler.client.recording import RecordingSession
from juggler.client.spaces import (
    Values,
    as_first,
    as_message,
    for_each,
    names_of_infos,
    one_of,
    rows_of,
    told,
)
from juggler.runtime.wire.flags import as_flag
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_MODES = {"remote": pb.REMOTE_INFERENCE, "local": pb.LOCAL_INFERENCE, "logged": pb.LOGGED_DATA}


class _Options(TypedDict, total=False):
    """Of every mode; see `connect`."""

    environments: int | None
    token: str | None
    tls: str | None
    timeout: float
    name: str
    info_names: Sequence[str]


@overload
def connect(
    address: str,
    observation_space: Any,
    action_space: Any,
    *,
    mode: Literal["remote"] = "remote",
    real_time: bool = False,
    **options: Unpack[_Options],
) -> Session: ...


@overload
def connect(
    address: str,
    observation_space: Any,
    action_space: Any,
    *,
    mode: Literal["local"],
    pull: bool = True,
    seed: int | None = None,
    **options: Unpack[_Options],
) -> LocalSession: ...


@overload
def connect(
    address: str,
    observation_space: Any,
    action_space: Any,
    *,
    mode: Literal["logged"],
    **options: Unpack[_Options],
) -> RecordingSession: ...


def connect(
    address: str,
    observation_space: Any,
    action_space: Any,
    *,
    mode: str = "remote",
    environments: int | None = None,
    real_time: bool = False,
    pull: bool = True,
    seed: int | None = None,
    token: str | None = None,
    tls: str | None = None,
    timeout: float = 60.0,
    name: str = "juggler.client",
    info_names: Sequence[str] = (),
) -> Session | LocalSession | RecordingSession:
    """Begin a session.

    Args:
        address: address of the gateway, "host:port".
        observation_space: of one environment; from `juggler.client` or Gymnasium.
        action_space: likewise.
        mode: who acts: "remote", the gateway; "local", this process, with onnxruntime and policies
            from the gateway; "logged", another policy has acted before.
        environments: N, stepped together; None: one environment, without a dimension for it.
        real_time: the simulator cannot wait. While no samples are requested, it gets actions all
            the same, and their steps are not trained on.
        pull: with "local", fetch newer policies between fragments; otherwise call `pull` yourself.
        seed: with "local", the seed for drawing actions.
        token: token of the run; None: the one in JUGGLER_TOKEN, if there is one.
        tls: a directory with ca.pem, cert.pem and key.pem; None: the one in JUGGLER_TLS, if there
            is one.
        timeout: how many seconds to wait for the gateway.
        name: name of the simulator, for people.
        info_names: names of numbers that steps may tell, which are in the run's metrics as
            `info/NAME`: at most 32. Not with "logged".

    Raises:
        GatewayError: the gateway does not answer, or refuses the simulator.
        TypeError: info_names is one text.
        ValueError: the mode, the address or the number of environments is not valid.
    """
    if mode not in _MODES:
        raise ValueError(f"mode = {mode!r}: must be one of {', '.join(_MODES)}")
    if environments is not None and environments < 1:
        raise ValueError(f"environments = {environments}: must be at least 1, or None for one")
    observations, actions = as_message(observation_space), as_message(action_space)
    hello = pb.Hello(
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        client=name,
        mode=_MODES[mode],
        environments=environments or 1,
        real_time=real_time,
        info_names=names_of_infos(info_names),
        agents=[pb.Agent(id="0", observation_space=observations, action_space=actions)],
    )
    values = Values(observations), Values(actions)
    connection = Connection(address, hello, token, tls, timeout)
    parts = connection, *values, environments
    try:
        if mode == "local":
            return LocalSession(*parts, pull=pull, seed=seed)
        return RecordingSession(*parts) if mode == "logged" else Session(*parts)
    except BaseException:
        connection.close()
        raise


class Session(OneAgentSession):
    """Asks for actions, step by step.

    Attributes:
        version: generation and update of the weights that acted last.
    """

    version = (0, 0)

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
        """Report what the last action led to and the current observation, and wait for the next
        action.

        With one environment: at the end of an episode, give its last observation, and get None;
        then give the first one of the next episode. Or save that round trip: give the first
        observation of the next episode at once, and the last one as `final_observation`.

        With N environments: all arguments are arrays [N, ...]. After the end of an episode, a row
        has the next episode's first observation, and `final_observation` has the last one of the
        episode that ended (Gymnasium's "same step" autoreset).

        Args:
            observation: of the space that the session began with.
            reward: of the last action; ignored for an environment's first step.
            terminated: whether the episode ended.
            truncated: whether it was cut off, as by a time limit.
            final_observation: see above; ignored in rows without an end.
            environments: numbers of R environments, if only some of the N report; everything is [R,
                ...] then.
            infos: numbers of the last action, by those `info_names` that have one. Other names are
                passed over.

        Returns:
            The action, or actions [N, ...].

        Raises:
            GatewayError: the session is over.
            ValueError: something does not fit the spaces.
        """
        if self._count is not None:
            count = self._count if environments is None else len(environments)
            rows = self._rows(
                count, observation, reward, terminated, truncated, final_observation, infos
            )
            rows.environments.extend(() if environments is None else environments)
            return self._actions.from_tensors(self._exchange(rows))
        ended = as_flag("terminated", terminated) or as_flag("truncated", truncated)
        paused = False
        if ended and final_observation is None:
            final_observation, paused = observation, True
        finals = as_first(final_observation) if ended else None
        rows = self._rows(1, as_first(observation), reward, terminated, truncated, finals, infos)
        if paused:
            rows.paused.append(True)
        actions = self._exchange(rows)
        return None if paused else one_of(self._actions.from_tensors(actions))

    def _rows(
        self,
        count: int,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        finals: Any,
        infos: Mapping[str, Any] | None,
    ) -> pb.Rows:
        rows = pb.Rows(observations=self._observations.tensors(observation))
        rows.rewards.extend(for_each("reward", reward, count, np.float32).tolist())
        if infos:
            rows.infos.extend(told(self._connection.info_names, infos, count).ravel().tolist())
        over = for_each("terminated", terminated, count, np.bool_)  # [R]
        cut = for_each("truncated", truncated, count, np.bool_)  # [R]
        if over.any():
            rows.terminated.extend(over.tolist())
        if cut.any():
            rows.truncated.extend(cut.tolist())
            if finals is None:
                raise ValueError("an episode was truncated: give its final_observation, too")
            places = np.flatnonzero(cut)
            rows.final_rows.extend(places.tolist())
            last = _dense(rows_of(finals, places))
            rows.final_observations.extend(self._observations.tensors(last))
        return rows

    def _exchange(self, rows: pb.Rows) -> Sequence[pb.NamedTensor]:
        self._seq += 1
        answer = self._connection.exchange(pb.StepBatch(seq=self._seq, agents=[rows]))
        version = answer.agents[0].version
        self.version = (version.generation, version.update)
        return answer.agents[0].actions


def _dense(values: Any) -> Any:
    """Gymnasium's final observations are an array of arrays; stack them."""
    if isinstance(values, np.ndarray) and values.dtype == object:
        return np.stack(list(values))
    return values
