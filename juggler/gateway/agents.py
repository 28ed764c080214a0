"""Which module acts for which agent of a simulator."""

from __future__ import annotations

from collections.abc import Mapping

from juggler.envrunner.agent_names import LONGEST_NAME, matches
from juggler.gateway.sessions import Code, SessionError
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import nearest
from juggler.runtime.wire.v1 import simulator_pb2 as pb

#: What `juggler.client` calls the agent of a simulator that has one, and names none.
_UNNAMED = ("", "0")


def cast_agents(hello: pb.Hello, mapping: Mapping[str, str]) -> list[str]:
    """The module of each agent, in order.

    Args:
        hello: of a simulator.
        mapping: modules by name or pattern of agents; {}: simulators have one agent each.

    Raises:
        SessionError: an agent has no module, a wrong name, or asks for another module.
    """
    if not mapping:
        if len(hello.agents) > 1:
            raise SessionError(
                Code.NOT_SERVED,
                f"{len(hello.agents)} agents, and this run is for simulators with one agent: add a "
                f'table [agents] to it that maps agents to modules, as in "*" = "{DEFAULT_MODULE}"',
            )
        return [_must_suit(hello.agents[0], DEFAULT_MODULE)]
    if hello.mode != pb.REMOTE_INFERENCE:
        raise SessionError(
            Code.NOT_SERVED,
            f"the mode {pb.Mode.Name(hello.mode)} is for runs without a table [agents]: let the "
            "gateway act, with the mode REMOTE_INFERENCE",
        )
    _check_names([agent.id for agent in hello.agents])
    alone = len(hello.agents) == len(mapping) == 1 and hello.agents[0].id in _UNNAMED
    if alone:
        (module_id,) = mapping.values()
        return [_must_suit(hello.agents[0], module_id)]
    return [_must_suit(agent, _module_of(agent.id, mapping)) for agent in hello.agents]


def _check_names(names: list[str]) -> None:
    known: set[str] = set()
    for name in names:
        if len(name) > LONGEST_NAME:
            text = f"agent {name[:20]!r}...: a name has at most {LONGEST_NAME} characters"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        if name in known:
            text = f"two agents have the id {name!r}: give each one of its own"
            raise SessionError(Code.UNKNOWN_AGENT, text)
        known.add(name)


def _module_of(name: str, mapping: Mapping[str, str]) -> str:
    for pattern, module_id in mapping.items():
        if name and matches(name, pattern):
            return module_id
    if name in _UNNAMED:
        patterns = ", ".join(list(mapping)[:20])
        text = (
            "an agent without a name, in a run for several: give it an id that the run's table "
            f"[agents] has: {patterns}"
        )
    else:
        text = f"the run's table [agents] has no agent {name!r}{nearest(name, mapping)}"
    raise SessionError(Code.UNKNOWN_AGENT, text)


def _must_suit(agent: pb.Agent, module_id: str) -> str:
    """The id of a module, if the agent asks for no other one."""
    if agent.policy in ("", module_id):
        return module_id
    raise SessionError(
        Code.NOT_SERVED,
        f"the policy {agent.policy[:64]!r} is asked for, and this run has {module_id!r} for agent "
        f"{agent.id[:64]!r}: ask for that one, or for none",
    )
