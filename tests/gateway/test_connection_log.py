"""A gateway logs arrivals, departures, refusals, and how a batch fills up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.gateway_world import (
    AgentsWorld,
    GatewayWorld,
    RawSimulator,
    break_off,
    see,
)

from juggler.client import GatewayError
from juggler.gateway.session_manager import ConnectionLog, address_of
from juggler.gateway.sessions import Sessions
from juggler.runtime.wire.v1 import simulator_pb2 as pb


def said(world: GatewayWorld, words: str) -> tuple[str, bool, int, int]:
    """What people were told with these words, once they are."""
    return world.changes.wait_for(lambda: [each for each in world.told if words in each[0]])[0]


def test_who_comes_and_leaves_is_told_with_address_environments_and_policy() -> None:
    with GatewayWorld() as world:
        with world.connect(environments=3):
            text, warning, *here = said(world, "has the simulator at 127.0.0.1:")
            assert text.endswith(": 3 environments for policy 'default'")
            assert (warning, here) == (False, [1, 3])
        text, warning, *here = said(world, "no longer has the simulator at 127.0.0.1:")
        assert text.endswith(": it said goodbye")
        assert (warning, here) == (False, [0, 0])


def test_a_connection_that_breaks_is_told_and_so_is_who_comes_back() -> None:
    with GatewayWorld(rows=1) as world, world.connect() as session:
        world.ask(10)
        break_off(session)
        text, _, *here = said(world, "lost the connection of the simulator at 127.0.0.1:")
        assert text.endswith(": waits 60 s for it")
        assert here == [0, 0]
        session.step(np.zeros(3))
        assert said(world, "has again the simulator at 127.0.0.1:")[2:] == (1, 1)


@pytest.mark.parametrize("mode", [pb.LOCAL_INFERENCE, pb.LOGGED_DATA])
def test_a_run_with_evaluations_warns_once_where_no_simulator_lets_the_gateway_act(
    mode: pb.Mode,
) -> None:
    def warnings_of(world: GatewayWorld) -> list[bool]:
        for _ in range(2):
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(mode=mode).HasField("welcome")
        return [warning for text, warning, *_ in world.told if "evaluation_seconds" in text]

    with GatewayWorld(evaluates=True) as world:
        with world.connect():
            assert warnings_of(world) == []
        assert warnings_of(world) == [True]
    with GatewayWorld() as world:
        assert warnings_of(world) == []


def test_who_is_refused_is_told_as_a_warning_with_the_reason() -> None:
    with GatewayWorld(token="right") as world:
        with pytest.raises(GatewayError, match="UNAUTHENTICATED"):
            world.connect(token="wrong")
        text, warning, *here = said(world, "refused a simulator at 127.0.0.1:")
        assert "token" in text
        assert (warning, here) == (True, [0, 0])


def test_who_sends_what_cannot_be_taken_is_told_to_leave_with_the_reason() -> None:
    with GatewayWorld(rows=1) as world, world.connect() as session:
        world.ask(10)
        with pytest.raises(GatewayError):
            session.step(np.full(3, np.nan))
        text, warning, *_ = said(world, "no longer has")
        assert "NOT_FINITE: environment 0: the observation" in text
        assert warning, "`juggler evaluate` shows nothing else"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(lines: list[tuple[str, bool]], clock: Clock) -> ConnectionLog:
    def report_line(text: str, warning: bool, simulators: int, environments: int) -> None:
        lines.append((text, warning))

    return ConnectionLog(Sessions(60.0), report_line, clock=clock)


def test_of_those_who_are_refused_one_line_a_minute_is_told_with_their_number(
    book: ConnectionLog, lines: list[tuple[str, bool]], clock: Clock
) -> None:
    for port in range(1000):
        book.refused(f"ipv4:10.0.0.1:{port}", "no token\nat all")
        clock.now += 0.05
    assert lines == [("refused a simulator at 10.0.0.1:0: no token at all", True)]
    clock.now = 60.0
    book.report_omitted()
    book.report_omitted()
    more = "refused a simulator at 10.0.0.1:999: no token at all (999 times in the last 60 s; this "
    assert lines[1:] == [(f"{more}is the last one)", True)]
    clock.now = 61.0
    book.refused("ipv4:10.0.0.1:5", "again")
    assert len(lines) == 2, "one line a minute"
    clock.now = 300.0
    book.report_omitted()
    assert lines[2][0] == "refused a simulator at 10.0.0.1:5: again"
    clock.now = 600.0
    book.report_omitted()
    book.refused("ipv4:10.0.0.1:6", "again")
    assert lines[3:] == [("refused a simulator at 10.0.0.1:6: again", True)]


def test_simulators_that_come_and_leave_at_once_are_no_flood_for_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with GatewayWorld() as world:
        monkeypatch.setattr(world._server.manager.guests, "_clock", lambda: 0.0)
        for _ in range(20):
            world.connect().close()
        world.wait_for_count("sessions", 0)
        assert len(world.told) == 20


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:12", "10.0.0.1:12"),
        ("ipv6:%5B::1%5D:12", "[::1]:12"),
        ("unix:", "a Unix socket"),
        ("", "an unknown address"),
    ],
)
def test_addresses_are_written_as_people_write_them(peer: str, address: str) -> None:
    assert address_of(peer) == address


def heard(world: AgentsWorld, words: str) -> str:
    while words not in (text := world.notes.get(timeout=60)):
        pass
    return text


def test_agents_are_named_and_so_is_how_full_a_batch_is_that_takes_long(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "rows", "column": "columns"})
    world.runner.slow_seconds = 0.2
    with world.connect("row", "column") as session:
        text = heard(world, "has the simulator at")
        assert text.endswith("1 environment for policies 'rows', 'columns', agents 'row', 'column'")
        world.begin()
        world.ask("rows", "columns")
        for step in range(3):
            session.step({"row": see(step, 0), "column": see(step, 1)}, {"row": 1.0, "column": 1.0})
        text = heard(world, "of its next batch after")
        assert text.startswith("has 2 of 4 steps of module rows, 2 of 4 steps of module columns of")
        assert text.endswith("s; environments of simulators: 1")


def test_environments_that_find_no_rows_in_a_batch_are_told(
    make_world: Callable[..., AgentsWorld],
) -> None:
    world = make_world({"row": "rows", "column": "columns"})
    with world.connect("row", "column"), world.connect("row", "column"):
        assert "a batch has envs_per_runner = 1 rows" in heard(world, "2 environments, and a batch")


def test_who_says_goodbye_and_closes_its_side_has_lost_no_connection() -> None:
    with GatewayWorld() as world:
        for _ in range(5):  # both may come at once, or one after the other
            with RawSimulator(world.address) as simulator:
                simulator.greet()
                simulator.send(goodbye=pb.Goodbye())
                simulator.say_no_more()
                with pytest.raises(StopIteration):
                    simulator.hear()
        said(world, "it said goodbye")
        assert not [text for text, *_ in world.told if "lost the connection" in text]
