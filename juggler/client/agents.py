"""A session of a simulator with several agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from juggler.client.connection import PROTOCOL, AnySession, Connection, GatewayError
from juggler.client.spaces import Values, as_first, as_message, names_of_infos, one_of, told
from juggler.runtime.wire.flags import as_flag
from juggler.runtime.wire.v1 import simulator_pb2 as pb


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
    """Begin a session of an environment with several agents. The gateway acts for all of them.

    Args:
        address: address of the gateway, "host:port".
        agents: by the id of each agent, its observation space and its action space. The table
            `agents` of the run's configuration says which module acts for whom.
        real_time: as in `connect`.
        token: as in `connect`.
        tls: as in `connect`.
        timeout: how many seconds to wait for the gateway.
        name: name of the simulator, for people.
        info_names: names of numbers that agents may be told of, which are in the run's metrics as
            `info/AGENT/NAME`: at most 32, and of up to 32 agents at most 128 in all.

    Raises:
        GatewayError: the gateway does not answer, or refuses the simulator.
        TypeError: info_names is one text.
        ValueError: the address is not valid, or there is no agent.
    """
    if not agents:
        raise ValueError("agents is empty: give the spaces of each agent by its id")
    spaces = {key: (as_message(each[0]), as_message(each[1])) for key, each in agents.items()}
    hello = pb.Hello(
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        client=name,
        mode=pb.REMOTE_INFERENCE,
        environments=1,
        real_time=real_time,
        info_names=names_of_infos(info_names),
        agents=[
            pb.Agent(id=key, observation_space=observations, action_space=actions)
            for key, (observations, actions) in spaces.items()
        ],
    )
    values = {key: (Values(observed), Values(acted)) for key, (observed, acted) in spaces.items()}
    return AgentsSession(Connection(address, hello, token, tls, timeout), values)


class _Agent:
    """
    Attributes:
        index: in the hello.
        observations: values of its observations.
        actions: values of its actions.
        acted: it has had an action in this episode.
        reward: what it got since its last action.
        infos: numbers that were told of it since then, by name.
    """

    def __init__(self, index: int, observations: Values, actions: Values) -> None:
        self.index, self.observations, self.actions = index, observations, actions
        self.acted = False
        self.reward = 0.0
        self.infos: dict[str, Any] = {}


class AgentsSession(AnySession):
    """Asks for the actions of several agents in one environment, each at its own pace.

    Args:
        connection: the session's connection.
        values: by agent, values of its observations and of its actions.

    Attributes:
        versions: by agent, generation and update of the weights that acted last for it.
    """

    def __init__(self, connection: Connection, values: Mapping[str, tuple[Values, Values]]) -> None:
        super().__init__(connection)
        self.versions: dict[str, tuple[int, int]] = {}
        self._agents = {name: _Agent(i, *both) for i, (name, both) in enumerate(values.items())}
        self._held: dict[str, pb.Rows] = {}  # last rows of a continuing episode without an agent

    def step(
        self,
        observations: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
        terminated: Mapping[str, bool] | bool = False,
        truncated: Mapping[str, bool] | bool = False,
        infos: Mapping[str, Mapping[str, Any]] | None = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        """Report what happened, and wait for the actions of the agents that act next.

        An agent acts next if it is among `observations` and does not end. In a turn-based game that
        is the one on turn. An agent that has ended acts again in the next episode, which begins
        when all have ended.

        Args:
            observations: by agent, what it observes: of all that act next, and of all that are
                truncated.
            rewards: by agent, since the last call. An agent's rewards between two of its actions
                add up to the reward of the first one; those before its first action are ignored.
            terminated: by agent, whether its episode ended; true: of everyone.
            truncated: by agent, whether its episode was cut off, as by a time limit; true: of
                everyone.
            infos: by agent, numbers of its last action, by those `info_names` that have one. Other
                names are passed over. Of calls between two of its actions, the last number counts.
            continues: the episode continues with the agents that act next, in this call or a later
                one, even if all agents that acted in it end now. If false, these agents begin the
                next episode. An episode without an agent is over with the next end that is not
                marked, even of an agent that never acted.

        Returns:
            By agent, the action of everyone who acts next.

        Raises:
            GatewayError: the session is over.
            ValueError: an agent is not known, or something does not fit its spaces.
        """
        shown = observations or {}
        self._check_known(shown, rewards, terminated, truncated, infos)
        for name, reward in (rewards or {}).items():
            self._agents[name].reward += float(reward)
        for name, info in (infos or {}).items():
            known = (each for each in self._connection.info_names if each in info)
            self._agents[name].infos.update((each, info[each]) for each in known)
        parts: dict[str, pb.Rows] = {}
        acting: list[str] = []
        ended = False
        for name, agent in self._agents.items():
            over = _is_set("terminated", terminated, name)
            cut = _is_set("truncated", truncated, name)
            if over or cut:
                ended = True
                if agent.acted:
                    parts[name] = self._last(name, agent, shown.get(name), over)
                agent.acted, agent.reward, agent.infos = False, 0.0, {}
            elif name in shown:
                seen = agent.observations.tensors(as_first(shown[name]))
                reward = agent.reward if agent.acted else 0.0
                parts[name] = pb.Rows(
                    agent=agent.index,
                    rewards=[reward],
                    observations=seen,
                    infos=self._numbers(agent),
                )
                acting.append(name)
        # A gateway ends an episode that has no agent left, unless one acts in the same message.
        marked = continues or bool(self._held)
        parts, self._held = {**self._held, **parts}, {}
        left = any(agent.acted for agent in self._agents.values())
        if not (acting or left) and (continues or not ended):
            self._held = parts
            return {}
        if not parts:
            return {}
        self._seq += 1
        answer = self._connection.exchange(
            pb.StepBatch(seq=self._seq, agents=parts.values(), continuing=[0] * marked)
        )
        given = {each.agent: each for each in answer.agents}
        return {name: self._acts(name, given[self._agents[name].index]) for name in acting}

    def close(self) -> None:
        """Say goodbye. Ends that were held back are sent first; running episodes are truncated."""
        held, self._held = self._held, {}
        try:
            if held:
                self._seq += 1
                with suppress(GatewayError):  # then nothing is left to end
                    self._connection.exchange(pb.StepBatch(seq=self._seq, agents=held.values()))
        finally:
            super().close()

    def _last(self, name: str, agent: _Agent, shown: Any, terminated: bool) -> pb.Rows:
        """The row with the end of an agent's episode, which has no next observation."""
        if shown is None and not terminated:
            raise ValueError(f"agent {name!r} was truncated: give its last observation, too")
        last = agent.observations.blank() if shown is None else as_first(shown)
        seen = agent.observations.tensors(last)
        rows = pb.Rows(
            agent=agent.index,
            rewards=[agent.reward],
            observations=seen,
            paused=[True],
            infos=self._numbers(agent),
        )
        (rows.terminated if terminated else rows.truncated).append(True)
        if not terminated:
            rows.final_rows.append(0)
            rows.final_observations.extend(seen)
        return rows

    def _numbers(self, agent: _Agent) -> list[float]:
        if not agent.infos:
            return []
        numbers: list[float] = told(self._connection.info_names, agent.infos, 1).ravel().tolist()
        return numbers

    def _acts(self, name: str, given: pb.Actions) -> Any:
        agent = self._agents[name]
        agent.acted, agent.reward, agent.infos = True, 0.0, {}
        self.versions[name] = (given.version.generation, given.version.update)
        return one_of(agent.actions.from_tensors(given.actions))

    def _check_known(self, *given: Any) -> None:
        for mapping in given:
            for name in mapping if isinstance(mapping, Mapping) else ():
                if name not in self._agents:
                    raise ValueError(
                        f"agent {name!r} is none of this session's: {', '.join(self._agents)}"
                    )


def _is_set(what: str, flags: Mapping[str, bool] | bool, name: str) -> bool:
    if isinstance(flags, Mapping):
        return as_flag(f"{what} of agent {name!r}", flags.get(name, False))
    return as_flag(what, flags)
