"""Faults of agents in simulators: one sentence, for one session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.gateway_world import SEEN, SPACES, AgentsWorld, RawSimulator, hello_of, see

from juggler.client import GatewayError, connect
from juggler.client.space_values import Values
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb

TWO = {"row": "rows", "column_*": "columns"}
NAMES = "row", "column_1"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentsWorld]:
    world = AgentsWorld(tmp_path_factory.mktemp("gateway"), TWO, environments=64)
    with world.connect(*NAMES):
        world.begin()
    world.ask("rows", "columns")  # is never over
    yield world
    world.close()


@pytest.fixture(autouse=True)
def everyone_else_goes_on(world: AgentsWorld) -> Iterator[None]:
    """A simulator that does nothing wrong acts before, and after."""
    with world.connect(*NAMES) as session:
        both = dict.fromkeys(NAMES, see(0, 0))
        assert session.step(both).keys() == {*NAMES}
        yield
        assert session.step(both, dict.fromkeys(NAMES, 1.0)).keys() == {*NAMES}


def refused(answer: pb.ToSimulator) -> tuple[str, str]:
    assert answer.WhichOneof("message") == "error", answer
    return pb.Error.Code.Name(answer.error.code), answer.error.message


def asks_for(policy: str) -> pb.Hello:
    hello = hello_of(*NAMES)
    hello.agents[1].policy = policy
    return hello


@pytest.mark.parametrize(
    ("hello", "code", "said"),
    [
        (
            hello_of("row", "colum_1"),
            "UNKNOWN_AGENT",
            "no agent 'colum_1': did you mean 'column_*'",
        ),
        (hello_of("row", "\x00\u202e' or 1=1"), "UNKNOWN_AGENT", "known are column_*, row"),
        (hello_of("row", "row"), "UNKNOWN_AGENT", "two agents have the id 'row'"),
        (hello_of("row", "column_" + "1" * 122), "UNKNOWN_AGENT", "at most 128 characters"),
        (hello_of(""), "UNKNOWN_AGENT", "an agent without a name, in a run for several"),
        (hello_of("0"), "UNKNOWN_AGENT", "give it an id that the run's table [agents] has: row"),
        (hello_of(*(f"column_{i}" for i in range(65))), "NOT_SERVED", "65 agents in one session"),
        (hello_of(), "NOT_SERVED", "0 agents in one session: have 1 to 64"),
        (
            hello_of(*(f"column_{i}" for i in range(64)), environments=1025),
            "FULL",
            "65600 environments in one session, once for each agent",
        ),
        (asks_for("rows"), "NOT_SERVED", "'rows' is asked for, and this run has 'columns'"),
        (hello_of(*NAMES, mode=pb.LOCAL_INFERENCE), "NOT_SERVED", "let the gateway act"),
        (hello_of(*NAMES, mode=pb.LOGGED_DATA), "NOT_SERVED", "REMOTE_INFERENCE"),
        (
            hello_of(*NAMES, space=spaces.Discrete(3)),
            "WRONG_SPACES",
            "agent 'row': this observation_space is Discrete(",
        ),
        (
            hello_of("column_1", "column_2", space=spaces.Discrete(3)),
            "WRONG_SPACES",
            "all agents of a module must have the same",
        ),
        (hello_of(*NAMES, resume_token="no such"), "UNKNOWN_SESSION", "Begin a new one"),
        (
            hello_of(*(f"column_{i}" for i in range(8)), info_names=list(map(str, range(17)))),
            "NOT_SERVED",
            "17 info_names for 8 agents: have at most 16",
        ),
        (
            hello_of("column_1", "column_1/2", info_names=["x", "2/y"]),
            "NOT_SERVED",
            "with '2/y' among info_names, a number would have the name of another agent's",
        ),
    ],
)
def test_a_hello_that_does_not_fit_is_answered_with_what_to_do(
    world: AgentsWorld, hello: pb.Hello, code: str, said: str
) -> None:
    with RawSimulator(world.address) as simulator:
        simulator.send(hello=hello)
        given, text = refused(simulator.hear())
        assert given == code
        assert said in text
        assert len(text) < 600
    world.changes.wait_for(lambda: seats(world) == 2)  # of everyone else


def seats(world: AgentsWorld) -> int:
    players = world.runner._server.manager.players.values()
    return sum(len(player) for player in players)


def rows(agent: int, shown: Any = ((0.0, 0.0),), **columns: Any) -> pb.Rows:
    tensors = Values(space_to_message(SEEN)).tensors(np.asarray(shown, np.float32))
    return pb.Rows(agent=agent, observations=tensors, **columns)


NAN = ((float("nan"), 0.0),)
BOTH = [rows(0), rows(1)]
OVER = {"terminated": [True], "paused": [True]}


@pytest.mark.parametrize(
    ("batches", "code", "said"),
    [
        ([[rows(2)]], "UNKNOWN_AGENT", "rows of agent 2: this session has the agents 0 to 1"),
        ([[rows(0), rows(0)]], "UNKNOWN_AGENT", "[0, 0]"),
        ([[]], "UNKNOWN_AGENT", "rows of the agents []"),
        ([[pb.Rows(agent=i) for i in range(5000)]], "UNKNOWN_AGENT", "name each at most once"),
        ([BOTH, [rows(1, NAN)]], "NOT_FINITE", "agent 'column_1' of environment 0: the obs"),
        ([BOTH, [rows(0, rewards=[float("inf")])]], "NOT_FINITE", "the reward of agent 'row' of"),
        ([BOTH, [rows(0, environments=[1])]], "UNKNOWN_ENVIRONMENT", "from 0 to 0"),
        ([[rows(0, **OVER)]], "OUT_OF_ORDER", "agent 'row' of environment 0 ended an episode bef"),
        ([BOTH, [rows(0, **OVER)], [rows(0)]], "OUT_OF_ORDER", "'row' of environment 0 acts, and"),
        ([BOTH, [rows(0, terminated=[True])]], "OUT_OF_ORDER", "has ended in this episode: pause"),
        ([BOTH, [rows(0, **OVER)], [rows(0, **OVER)]], "OUT_OF_ORDER", "before it had an action"),
        ([BOTH, [rows(1, truncated=[True])]], "NO_FINAL_OBSERVATION", "row 0 was truncated"),
    ],
)
def test_a_wrong_message_ends_the_session_and_says_who_was_wrong(
    world: AgentsWorld, batches: list[list[pb.Rows]], code: str, said: str
) -> None:
    with RawSimulator(world.address) as simulator:
        simulator.send(hello=hello_of(*NAMES))
        assert simulator.hear().HasField("welcome")
        for seq, agents in enumerate(batches, 1):
            answer = simulator.step(pb.StepBatch(seq=seq, agents=agents))
            if seq < len(batches):
                assert [each.agent for each in answer.actions.agents] == [x.agent for x in agents]
        given, text = refused(answer)
        assert given == code
        assert said in text
    world.changes.wait_for(lambda: seats(world) == 2)  # of everyone else


def test_an_agent_waits_for_its_own_action_alone(world: AgentsWorld) -> None:
    with RawSimulator(world.address) as simulator:
        simulator.send(hello=hello_of(*NAMES))
        simulator.hear()
        simulator.send(steps=pb.StepBatch(seq=1, agents=[rows(0)]))
        simulator.send(steps=pb.StepBatch(seq=2, agents=[rows(1)]))
        first, second = simulator.hear(), simulator.hear()
        assert [first.actions.agents[0].agent, second.actions.agents[0].agent] == [0, 1]
        assert [first.actions.agents[0].policy, second.actions.agents[0].policy] == [*TWO.values()]
    with RawSimulator(world.address) as simulator:
        simulator.send(hello=hello_of(*NAMES))
        simulator.hear()
        simulator.send(steps=pb.StepBatch(seq=1, agents=[rows(0)]))
        simulator.hear()
        world.runner._asked.clear()  # samples are no longer requested
        simulator.send(steps=pb.StepBatch(seq=2, agents=[rows(1)]))
        code, text = refused(simulator.step(pb.StepBatch(seq=3, agents=[rows(1)])))
        world.ask("rows", "columns")
    assert code == "OUT_OF_ORDER"
    assert "agent 'column_1' of environment 0 has not had its last action yet" in text


def test_a_client_that_names_no_agent_is_told_which_there_are(world: AgentsWorld) -> None:
    with pytest.raises(GatewayError, match=r"UNKNOWN_AGENT.*row, col"):
        connect(world.address, *SPACES)
