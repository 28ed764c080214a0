"""Sessions of simulators, with one agent or several."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from juggler.client.connection import GatewayConnection, GatewayError
from juggler.client.space_values import (
    Arrays,
    Values,
    as_message,
    as_tensors,
    for_each,
    numbers_of,
)
from juggler.runtime.wire.flags import as_flag
from juggler.runtime.wire.v1 import simulator_pb2 as pb

_PROTOCOL = 1
_POLICY = 0  # number of a request for a policy
_MODES = {"remote": pb.REMOTE_INFERENCE, "local": pb.LOCAL_INFERENCE, "logged": pb.LOGGED_DATA}


def connect(
    address: str,
    observation_space: Any,
    action_space: Any,
    *,
    mode: Literal["remote", "local", "logged"] = "remote",
    environments: int | None = None,
    real_time: bool = False,
    pull: bool = True,
    seed: int | None = None,
    token: str | None = None,
    tls: str | None = None,
    timeout: float = 60.0,
    name: str = "juggler.client",
    info_names: Sequence[str] = (),
) -> Session:
    """Begin a session.

    Args:
        address: address of the gateway, "host:port".
        observation_space: of one environment; from `juggler.client` or Gymnasium.
        action_space: of one environment; from `juggler.client` or Gymnasium.
        mode: what acts: "remote", the gateway; "local", this process, with onnxruntime and policies
            from the gateway; "logged", another policy, earlier.
        environments: N, stepped together; None: one environment, without a dimension for it.
        real_time: the simulator cannot wait. While no samples are requested, it still gets actions,
            but their steps are not trained on.
        pull: with "local", fetch newer policies between fragments; otherwise call `pull` yourself.
        seed: with "local", the seed for drawing actions.
        token: token of the run; None: the value of JUGGLER_TOKEN, if set.
        tls: a directory with ca.pem, cert.pem and key.pem; None: the value of JUGGLER_TLS, if set.
        timeout: maximum seconds to wait for the gateway.
        name: name of the simulator, for logs.
        info_names: names of numbers in the infos of steps, which are in the run's metrics as
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
    agents = {"0": (observation_space, action_space)}
    hello = _hello(agents, name, real_time, info_names)
    hello.mode, hello.environments = _MODES[mode], environments or 1
    return Session(hello, environments is not None, pull, seed, address, token, tls, timeout)


def connect_agents(
    address: str,
    agents: Mapping[str, tuple[Any, Any]],
    *,
    real_time: bool = False,
    token: str | None = None,
    tls: str | None = None,
    timeout: float = 60.0,
    name: str = "juggler.client",
    info_names: Sequence[str] = (),
) -> AgentsSession:
    """Begin a session with several agents in one environment.

    The gateway acts for all of them.

    Args:
        address: address of the gateway, "host:port".
        agents: observation space and action space, by agent id. The table `agents` of the run's
            configuration assigns modules to agents.
        real_time, token, tls, timeout, name: as in `connect`.
        info_names: names of numbers in the infos of agents, which are in the run's metrics as
            `info/AGENT/NAME`: at most 32, and at most 128 in all for up to 32 agents.

    Raises:
        GatewayError: the gateway does not answer, or refuses the simulator.
        TypeError: info_names is one text.
        ValueError: the address is not valid, or there is no agent.
    """
    if not agents:
        raise ValueError("agents is empty: give the spaces of each agent by its id")
    return AgentsSession(_hello(agents, name, real_time, info_names), address, token, tls, timeout)


def _hello(
    agents: Mapping[str, tuple[Any, Any]], name: str, real_time: bool, info_names: Sequence[str]
) -> pb.Hello:
    """Describe a simulator with one environment that the gateway acts in."""
    if isinstance(info_names, str):  # its letters would become the names
        raise TypeError(f"info_names must be a list of names, as in [{info_names!r}]")
    return pb.Hello(
        protocol_min=_PROTOCOL,
        protocol_max=_PROTOCOL,
        client=name,
        mode=pb.REMOTE_INFERENCE,
        environments=1,
        real_time=real_time,
        info_names=info_names,
        agents=[
            pb.Agent(id=key, observation_space=as_message(seen), action_space=as_message(acted))
            for key, (seen, acted) in agents.items()
        ],
    )


class Session(GatewayConnection):
    """A session of a simulator with one agent, which `connect` begins.

    With mode="remote", `step` gets actions from the gateway. With mode="local", `step` acts without
    a round trip, and sends steps after every `welcome.fragment_steps` calls. With mode="logged",
    `record` sends episodes. At the end of a with statement, a session waits until the gateway has
    accepted everything.

    Args:
        hello: as in `GatewayConnection`.
        many: arrays have a first dimension, of environments.
        pull, seed: as in `connect`.
        dialing: the other arguments of `GatewayConnection`.

    Attributes:
        version: generation and update of the last weights that acted; with "local", of the current
            weights.
        newest: generation and update of the newest weights that the gateway has announced.
        steps_recorded: number of accepted steps in recordings.
        steps_stale: number of steps in recordings that were at least partly too old.
    """

    def __init__(
        self, hello: pb.Hello, many: bool, pull: bool, seed: int | None, *dialing: Any
    ) -> None:
        self._observations = Values(hello.agents[0].observation_space)
        self._actions = Values(hello.agents[0].action_space)
        self._one, self._places = not many, range(hello.environments)
        self.version: Version = (0, 0)
        self.newest: Version = (0, 0)
        self.steps_recorded = self.steps_stale = 0
        self._chunks = bytearray()  # received part of a policy
        self._pulls, self._calls = pull, 0
        # The policy comes before the first step, in which this process already acts.
        local = hello.mode == pb.LOCAL_INFERENCE
        self._policy = LocalPolicy(hello.environments, seed) if local else None
        super().__init__(hello, *dialing)
        if local:
            try:
                self.pull()
            except BaseException:
                self.close()
                raise

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
        """Report the result of the last action, and get the next action.

        With one environment: at the end of an episode, give its last observation, and get None;
        then give the first observation of the next episode. To save a round trip, give the first
        observation of the next episode at once, and the last observation as `final_observation`.

        With N environments: all arguments are arrays [N, ...]. After the end of an episode, a row
        has the next episode's first observation, and `final_observation` has the ended episode's
        last observation (Gymnasium's "same step" autoreset).

        Args:
            observation: in the observation space of the session.
            reward: of the last action; ignored for an environment's first step.
            terminated: whether the episode ended.
            truncated: whether it was cut off, as by a time limit.
            final_observation: see above; ignored in rows without an end.
            environments: numbers of R environments, if only some of the N report; then all
                arguments are [R, ...].
            infos: numbers of the last action, by the `info_names` that have one. Other names are
                ignored.

        Returns:
            The action, or actions [N, ...].

        Raises:
            GatewayError: the session has ended.
            ValueError: a value does not fit the spaces.
        """
        places: Sequence[int] = self._places
        if environments is not None:
            places = [int(each) for each in environments]
            if len({*places}) < len(places) or not all(each in self._places for each in places):
                most = len(self._places) - 1
                raise ValueError(f"environments = {places}: name each at most once, 0 to {most}")
        # All arguments are converted before anything is sent: a refused call has no effect.
        count = len(places)
        seen = self._observations.arrays(observation, count, one=self._one)
        over = for_each("terminated", terminated, count, np.bool_)  # [R]
        cut = for_each("truncated", truncated, count, np.bool_)  # [R]
        rows = pb.Rows(rewards=for_each("reward", reward, count, np.float32).tolist())
        rows.infos.extend(numbers_of(self._hello.info_names, infos or {}, count))
        if environments is not None:
            rows.environments.extend(places)
        # The return of a truncated episode is estimated from its last observation.
        last: Arrays = {}
        paused = False
        # Most steps end no episode, and then send no flags.
        if over.any() or cut.any():
            rows.terminated.extend(over.tolist())
            rows.truncated.extend(cut.tolist())
            if paused := self._one and final_observation is None:
                rows.paused.append(True)
            elif final_observation is None and cut.any():
                raise ValueError("an episode was truncated: give its final_observation, too")
            # A gateway ignores last observations of terminated episodes, but recordings need them.
            final_rows = np.flatnonzero(cut if self._policy is None else over | cut)  # [K]
            if len(final_rows):
                rows.final_rows.extend(final_rows.tolist())
                finals = observation if final_observation is None else final_observation
                last = self._observations.arrays(finals, count, one=self._one, rows=final_rows)
        # Only a gateway needs messages: a local policy acts on arrays.
        if self._policy is None:
            rows.observations.extend(as_tensors(seen))
            rows.final_observations.extend(as_tensors(last))
            (given,) = self._exchange([rows]).agents
            self.version = given.version.generation, given.version.update
            if not paused:
                return self._actions.from_tensors(given.actions, one=self._one)
        else:
            self._policy.add_results(places, rows, seen, last)
            self._end_fragment()
            if not paused:
                return self._actions.from_arrays(self._policy.act(places), one=self._one)
        return None

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
        """Send an episode, or a part of one.

        Waits if too many recordings have no answer.

        Args:
            observations: [L + 1, ...] before each step and after the last one.
            actions: [L, ...] as the policy chose them.
            rewards: [L]
            action_logp: [L] log-probabilities of the actions, under the policy that chose them.
            terminated: the last step ended the episode.
            truncated: the last step cut the episode off, as a time limit does.
            starts: the first step begins an episode; otherwise it continues the last episode.
            environment: number of the environment.
            version: version of the gateway's weights, if they acted.

        Raises:
            GatewayError: the session has ended.
            ValueError: a value does not fit the spaces.
        """
        rewards = np.asarray(rewards, np.float32)  # [L]
        count, most = len(rewards), self.welcome.fragment_steps
        seen = self._observations.arrays(observations, count + 1)
        chosen = self._actions.arrays(actions, count)
        # Messages have a size limit, so a long episode is sent in parts.
        for begin in range(0, count, most):
            end = min(begin + most, count)
            recording = pb.Recording(
                environment=environment,
                starts=starts and begin == 0,
                terminated=terminated and end == count,
                truncated=truncated and end == count,
                observations=as_tensors({path: a[begin : end + 1] for path, a in seen.items()}),
                actions=as_tensors({path: a[begin:end] for path, a in chosen.items()}),
                rewards=rewards[begin:end],
                action_logp=() if action_logp is None else np.ravel(action_logp)[begin:end],
            )
            if version is not None:
                recording.version.generation, recording.version.update = version
            self._send_recording(recording)

    def pull(self) -> Version:
        """Load the newest weights, and return their version.

        Only with mode="local".

        Raises:
            GatewayError: the session has ended.
        """
        self._flush()
        self._send(pb.FromSimulator(policy=pb.PolicyRequest()), _POLICY)
        try:
            while _POLICY in self._unanswered:
                self._process_answer()
        finally:  # else `flush` would wait for a policy that was refused
            self._unanswered.pop(_POLICY, None)
        return self.version

    def flush(self) -> None:
        """Send all steps, and wait until the gateway has accepted them."""
        self._flush()
        self._wait()

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self.flush()
        finally:
            self.close()

    def _end_fragment(self) -> None:
        """Send a complete fragment, once the last one has been accepted."""
        self._calls += 1
        if self._calls > self.welcome.fragment_steps:
            self._calls = 1
            self._wait()
            self._flush()
            if self._pulls and self.newest > self.version:
                self.pull()

    def _flush(self) -> None:
        for recording in self._policy.flush() if self._policy else ():
            self._send_recording(recording)

    def _send_recording(self, recording: pb.Recording) -> None:
        while len(self._unanswered) >= self.welcome.batches_in_flight:
            self._process_answer()
        self._seq += 1
        recording.seq = self._seq
        self._send(pb.FromSimulator(recording=recording), self._seq)

    def _wait(self) -> None:
        while self._unanswered:
            self._process_answer()

    def _process_answer(self) -> None:
        answer = self._receive()
        kind = answer.WhichOneof("message")
        if kind == "recorded":
            self._announced(answer.recorded.newest)
            message = self._unanswered.pop(answer.recorded.seq, None)  # an answer may come twice
            steps = 0 if message is None else len(message.recording.rewards)
            self.steps_recorded += steps
            self.steps_stale += steps if answer.recorded.stale else 0
        elif kind == "new_policy":
            self._announced(answer.new_policy.version)
        elif kind == "policy" and _POLICY in self._unanswered:  # a policy may come twice
            self._take_chunk(answer.policy)

    def _announced(self, version: pb.PolicyVersion) -> Version:
        announced = version.generation, version.update
        self.newest = max(self.newest, announced)
        return announced

    def _take_chunk(self, chunk: pb.PolicyChunk) -> None:
        """Add a piece of a policy, and load complete policies."""
        if chunk.offset == 0:  # a new policy, perhaps after a broken connection
            self._chunks.clear()
        self._chunks += chunk.data
        if len(self._chunks) < chunk.size:
            return
        model = bytes(self._chunks)
        if hashlib.sha256(model).digest() != chunk.sha256:
            raise GatewayError("BAD_MESSAGE", "the policy is not what its digest says")
        del self._unanswered[_POLICY]
        self.version = self._announced(chunk.version)
        if self._policy is not None:
            self._policy.use(model, self.version)


@dataclass
class _SessionAgent:
    """One agent of a session, in the running episode."""

    name: str
    index: int  # in the hello
    observations: Values
    actions: Values
    acted: bool = False  # it has had an action, and has not ended
    ended: bool = False  # its part of the episode has ended
    reward: float = 0.0  # since its last action, or since the episode began
    infos: dict[str, Any] = field(default_factory=dict)  # since then, by name


class AgentsSession(GatewayConnection):
    """A session of an environment with several agents, which `connect_agents` begins.

    Each agent acts at its own pace.

    Args:
        hello: as in `GatewayConnection`.
        dialing: the other arguments of `GatewayConnection`.

    Attributes:
        versions: generation and update of the last weights that acted, by agent.
    """

    def __init__(self, hello: pb.Hello, *dialing: Any) -> None:
        self._agents = {
            each.id: _SessionAgent(
                each.id, i, Values(each.observation_space), Values(each.action_space)
            )
            for i, each in enumerate(hello.agents)
        }
        self.versions: dict[str, Version] = {}
        self._idle = 0.0  # rewards of agents that ended in the episode without an action
        self._held: dict[str, pb.Rows] = {}  # last rows of a continuing episode without an agent
        super().__init__(hello, *dialing)

    def step(
        self,
        observations: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
        terminated: Mapping[str, bool] | bool = False,
        truncated: Mapping[str, bool] | bool = False,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        """Report results, and get the actions of agents that act next.

        An agent acts next if it is among `observations` and does not end. In a turn-based game that
        is the current agent. An agent that has ended acts again in the next episode, which begins
        when all agents have ended.

        Args:
            observations: observations by agent, of all agents that act next or are truncated.
            rewards: rewards by agent, since the last call. An agent's rewards between two of its
                actions add up to the reward of the first action. Rewards before its first action
                are part of its return, but of no step. If it never acts, they are only part of the
                environment's return. Rewards after its end, and rewards at the start of an episode,
                are ignored.
            terminated: by agent, whether its episode ended; true: for all agents.
            truncated: by agent, whether its episode was cut off, as by a time limit; true: for all
                agents.
            infos: by agent, numbers of its last action, by the `info_names` that have one. Other
                names are ignored. If several calls between two actions have a number, the last one
                counts.
            continues: the episode continues with the agents that act next, in this call or a later
                one, even if all agents that acted in it end now. If false, these agents begin the
                next episode. An episode without an agent ends with the next end that is not marked,
                even of an agent that never acted.

        Returns:
            The action of each agent that acts next, by agent.

        Raises:
            GatewayError: the session has ended.
            ValueError: an agent is not known, or a value does not fit its spaces. The call then has
                no effect.
        """
        shown = observations or {}
        for mapping in (shown, rewards, terminated, truncated, infos):
            for name in mapping if isinstance(mapping, Mapping) else ():
                if name not in self._agents:
                    known = ", ".join(self._agents)
                    raise ValueError(f"agent {name!r} is none of this session's: {known}")
        # A refused argument leaves the agents unchanged, so the call may be repeated.
        agents = {name: replace(agent) for name, agent in self._agents.items()}
        self._add(agents, rewards or {}, infos or {})
        parts: dict[str, pb.Rows] = {}
        ending: set[str] = set()
        idle = self._idle
        for name, agent in agents.items():
            over = _is_set("terminated", terminated, name)
            cut = _is_set("truncated", truncated, name) and not over
            # An agent that never acted has no row, but its rewards count for the environment.
            if over or cut:
                ending.add(name)
                if agent.acted:
                    parts[name] = self._row(agent, shown.get(name), over, cut)
                else:
                    idle += agent.reward
                agent.ended |= agent.acted
                agent.acted, agent.reward, agent.infos = False, 0.0, {}
        # An agent that ends gets no action, although its last observation may be given.
        acting = [name for name in agents if name in shown and name not in ending]
        left = any(agent.acted for agent in agents.values())
        # A gateway ends an episode that has no agent left, unless one acts in the same message.
        marked = continues or bool(self._held)
        is_over = ending and not left and not continues and not (acting and marked)
        if is_over:
            idle += sum(agent.reward for agent in agents.values())
            for agent in agents.values():
                agent.ended, agent.reward = False, 0.0
        parts |= {name: self._row(agents[name], shown[name]) for name in acting}
        self._agents, self._idle = agents, 0.0 if is_over else idle
        # Delayed rows belong to the same episode, and have to arrive with these.
        parts, self._held = {**self._held, **parts}, {}
        if not (acting or left) and (continues or not ending):
            self._held = parts
            return {}
        if not parts:
            return {}
        answer = self._exchange(parts.values(), [0] * marked, idle if is_over else 0.0)
        given = {each.agent: each for each in answer.agents}
        return {name: self._acted(name, given[agents[name].index]) for name in acting}

    def close(self) -> None:
        """Say goodbye.

        Delayed ends are sent first; running episodes are truncated.
        """
        held, self._held = self._held, {}
        idle = self._idle + sum(agent.reward for agent in self._agents.values())
        try:
            if held:
                with suppress(GatewayError):  # the session has already ended
                    self._exchange(held.values(), idle=idle)
        finally:
            super().close()

    def _add(
        self,
        agents: Mapping[str, _SessionAgent],
        rewards: Mapping[str, float],
        infos: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Keep rewards and numbers for the next row of their agents."""
        running = any(agent.acted or agent.ended for agent in agents.values())
        for name, reward in rewards.items():
            if running and not agents[name].ended:
                agents[name].reward += float(reward)
        for name, info in infos.items():
            known = {each: info[each] for each in self._hello.info_names if each in info}
            agents[name].infos = agents[name].infos | known

    def _row(
        self, agent: _SessionAgent, shown: Any, over: bool = False, cut: bool = False
    ) -> pb.Rows:
        """Make the row of an agent that ends or acts next."""
        if cut and shown is None:
            raise ValueError(f"agent {agent.name!r} was truncated: give its last observation, too")
        values, names, infos = agent.observations, self._hello.info_names, agent.infos
        try:
            seen = as_tensors(values.zeros() if shown is None else values.arrays(shown, one=True))
            numbers = numbers_of(names, infos, 1) if infos else []
        except ValueError as error:
            raise ValueError(f"agent {agent.name!r}: {error}") from error
        # Before its first action, a reward belongs to no step of the agent.
        early = 0.0 if agent.acted else agent.reward
        reward = agent.reward - early
        rows = pb.Rows(agent=agent.index, rewards=[reward], observations=seen, infos=numbers)
        if early:
            rows.early_rewards.append(early)
        if over or cut:
            rows.paused.append(True)
            (rows.terminated if over else rows.truncated).append(True)
        if cut:
            rows.final_rows.append(0)
            rows.final_observations.extend(seen)
        return rows

    def _acted(self, name: str, given: pb.Actions) -> Any:
        agent = self._agents[name]
        agent.acted, agent.reward, agent.infos = True, 0.0, {}
        self.versions[name] = (given.version.generation, given.version.update)
        return agent.actions.from_tensors(given.actions, one=True)


def _is_set(what: str, flags: Mapping[str, bool] | bool, name: str) -> bool:
    if isinstance(flags, Mapping):
        return as_flag(f"{what} of agent {name!r}", flags.get(name, False))
    return as_flag(what, flags)


Version = tuple[int, int]  # generation and update
_Row = tuple[Arrays, int]  # one row of arrays [R, ...]


@dataclass(slots=True)
class _UnsentSteps:
    """Unsent steps of an episode, all by one version of the weights.

    There is one more observation than rewards. The last action may have no reward yet.
    """

    recording: pb.Recording  # everything but observations and actions
    observations: list[_Row]
    actions: list[_Row] = field(default_factory=list)


class LocalPolicy:
    """Acts in N environments, and turns its steps into recordings.

    Args:
        count: N.
        seed: seed for drawing actions; None: random.
    """

    def __init__(self, count: int, seed: int | None) -> None:
        self._generator = np.random.default_rng(seed)
        self._steps: list[_UnsentSteps | None] = [None] * count  # None: not in an episode
        self._rewards = np.zeros(count, np.float32)  # [N] of the last actions
        self._states: dict[str, NDArray[Any]] = {}  # [N, ...] by name
        self._finished: list[pb.Recording] = []

    def use(self, model: bytes, version: Version) -> None:
        """Load a model, the data of `PolicyChunk` in simulator.proto.

        Raises:
            ModuleNotFoundError: onnxruntime is missing.
        """
        try:
            onnxruntime = importlib.import_module("onnxruntime")
        except ModuleNotFoundError as error:
            text = "acting by oneself needs the package onnxruntime: pip install onnxruntime"
            raise ModuleNotFoundError(text) from error
        options = onnxruntime.SessionOptions()
        # A second thread does not pay for one step of a few environments.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._model = onnxruntime.InferenceSession(model, options, providers=providers)
        self._version = pb.PolicyVersion(generation=version[0], update=version[1])
        self._inputs = {each.name: each for each in self._model.get_inputs()}
        self._outputs = [tuple(each.name.split("/")) for each in self._model.get_outputs()]
        for name, each in self._inputs.items():
            if name.startswith("state/"):
                blank = np.zeros((len(self._steps), *each.shape[1:]), _dtype(each.type))
                self._states.setdefault(name, blank)

    def add_results(self, places: Sequence[int], rows: pb.Rows, seen: Arrays, last: Arrays) -> None:
        """Add the results of the last actions.

        Args:
            places: [R] numbers of the environments.
            rows: the other columns.
            seen: [R, ...] observations to act on.
            last: [K, ...] last observations of `rows.final_rows`, which are all ended episodes.
        """
        # The simulator may write the next observation into the same memory.
        self._seen = {path: array.copy() for path, array in seen.items()}
        final_of = {row: at for at, row in enumerate(rows.final_rows)}
        infos = len(rows.infos) // len(places) if places else 0
        for row, place in enumerate(places):
            steps = self._steps[place]
            # The first observation of an episode follows no action.
            if steps is None:
                continue
            self._rewards[place] = rows.rewards[row]
            steps.recording.rewards.append(rows.rewards[row])
            steps.recording.infos.extend(rows.infos[row * infos : (row + 1) * infos])
            if row not in final_of:
                steps.observations.append((self._seen, row))
                continue
            steps.observations.append((last, final_of[row]))
            steps.recording.terminated = rows.terminated[row]
            steps.recording.truncated = not rows.terminated[row]
            self._finish(place, steps)
            self._steps[place] = None

    def act(self, places: Sequence[int]) -> Arrays:
        """Choose and remember actions [R, ...] for the last observations."""
        where, seen = list(places), self._seen
        first = np.array([self._steps[place] is None for place in where])  # [R]
        out = self._run(where, first)
        for name, kept in self._states.items():
            kept[where] = out["next_state", *name.split("/")[1:]]
        chosen = {path[1:]: each for path, each in out.items() if path[0] == "chosen"}
        action_logp = out.get(("action_logp",))
        # A recording has one version, so new weights begin another one.
        for row, place in enumerate(where):
            steps = self._steps[place]
            if steps is None:
                begun = pb.Recording(environment=place, starts=True, version=self._version)
                self._steps[place] = steps = _UnsentSteps(begun, [(seen, row)])
            elif steps.recording.version != self._version:
                self._finish(place, steps)
                steps.recording.version.CopyFrom(self._version)
            steps.actions.append((chosen, row))
            if action_logp is not None:
                steps.recording.action_logp.append(action_logp[row])
        return {path[1:]: each for path, each in out.items() if path[0] == "action"}

    def flush(self) -> list[pb.Recording]:
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

    def _finish(self, place: int, steps: _UnsentSteps) -> None:
        """Complete the recording of steps with a reward, if any."""
        recording, count = steps.recording, len(steps.recording.rewards)
        if not count:
            return
        recording.observations.extend(_stacked(steps.observations[: count + 1]))
        recording.actions.extend(_stacked(steps.actions[:count]))
        self._finished.append(recording)
        # The last action stays here, because its reward is not known yet.
        steps.recording = pb.Recording(
            environment=place,
            version=recording.version,
            action_logp=recording.action_logp[count:],
        )
        del steps.observations[:count], steps.actions[:count], recording.action_logp[count:]


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of an ONNX Runtime name, such as "tensor(float)"."""
    kind = name.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))


def _stacked(rows: list[_Row]) -> list[pb.NamedTensor]:
    paths = rows[0][0]
    return as_tensors(
        {path: np.stack([arrays[path][row] for arrays, row in rows]) for path in paths}
    )
