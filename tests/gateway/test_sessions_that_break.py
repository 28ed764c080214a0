"""Simulators that vanish, come back, dawdle or cannot wait."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.gateway_world import GatewayWorld, RawSimulator, break_off, eventually, steps_of

from juggler.client import GatewayError
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import simulator_pb2 as pb


def test_who_comes_back_gets_the_same_answer_to_the_same_seq() -> None:
    with GatewayWorld(rows=1, steps=100) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            welcome = simulator.greet().welcome
            answers = [simulator.step(steps_of(seq)) for seq in (1, 2, 3)]
        with RawSimulator(world.address) as simulator:
            again = simulator.greet(resume_token=welcome.resume_token).welcome
            assert again.resumed
            assert (again.session_id, again.last_seq) == (welcome.session_id, 3)
            assert simulator.step(steps_of(3)) == answers[2]
            assert simulator.step(steps_of(2)) == answers[1]
            assert simulator.step(steps_of(4)).actions.seq == 4
        assert world.count("steps") == 3  # none of them was counted twice
        assert world.count("episodes_cut") == 0


def test_an_answer_that_was_due_comes_on_the_new_stream() -> None:
    with GatewayWorld(rows=1) as world:
        with RawSimulator(world.address) as simulator:
            token = simulator.greet().welcome.resume_token
            simulator.send(steps=steps_of(1))
            eventually(lambda: world.count("steps_waiting") == 1)
        with RawSimulator(world.address) as simulator:
            assert simulator.greet(resume_token=token).welcome.last_seq == 1
            simulator.send(steps=steps_of(1))
            eventually(lambda: world.count("sessions_resumed") == 1)
            world.ask()
            first = simulator.hear()
            assert first.actions.seq == 1
            second = simulator.step(steps_of(2))
            if second == first:  # it was on its way when the same batch arrived again
                second = simulator.hear()
            assert second.actions.seq == 2


class SmallPolicy:
    """Stands for a `Publisher` whose policy is one byte."""

    ready, failure = True, ""

    def begin(self, done: object) -> None:
        pass

    def chunks(self, version: Version) -> list[pb.ToSimulator]:
        return [pb.ToSimulator(policy=pb.PolicyChunk(size=1, data=b"x"))]


def test_weights_that_came_while_a_stream_was_broken_are_announced_on_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_gone() -> bool:
        (session,) = world._server.manager.sessions.by_id.values()
        return session.stream is None

    with GatewayWorld() as world:
        world.use(1.0, Version(1, 1))
        monkeypatch.setattr(world._server._local, "_publisher", SmallPolicy())
        local: dict[str, Any] = {"mode": pb.LOCAL_INFERENCE}
        eventually(lambda: world.count("sessions") == 0)
        with RawSimulator(world.address) as simulator:
            local["resume_token"] = simulator.greet(**local).welcome.resume_token
            simulator.send(policy=pb.PolicyRequest())
            assert simulator.hear().policy.data == b"x"
        eventually(is_gone)
        world.use(2.0, Version(1, 2))
        for _ in range(2):  # the first announcement may have been lost with its stream
            with RawSimulator(world.address) as simulator:
                assert simulator.greet(**local).welcome.resumed
                assert simulator.hear().new_policy.version.update == 2
            eventually(is_gone)
        with RawSimulator(world.address) as simulator:
            simulator.greet(**local)
            assert simulator.hear().new_policy.version.update == 2
            simulator.send(policy=pb.PolicyRequest())
            assert simulator.hear().policy.data == b"x"
        eventually(is_gone)
        with RawSimulator(world.address) as simulator:
            simulator.greet(**local)
            world.use(3.0, Version(1, 3))
            assert simulator.hear().new_policy.version.update == 3


def test_the_client_goes_on_over_another_connection_by_itself() -> None:
    with GatewayWorld(rows=1, steps=10) as world:
        world.ask(2)
        with world.connect() as session:
            for reward in range(10):
                session.step(np.full(3, reward), reward)
                if reward in (3, 6):
                    break_off(session)
            session.step(np.zeros(3), 10)
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards[0].tolist() == list(range(1, 11))
        assert world.count("sessions_resumed") == 2
        assert world.count("sessions_begun") == 1


def test_episodes_of_who_does_not_come_back_end_as_truncated_and_are_counted_as_cut() -> None:
    with GatewayWorld(rows=1, steps=8, resume_seconds=0.3) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            token = simulator.greet().welcome.resume_token
            for seq in range(1, 5):
                simulator.step(steps_of(seq, ((seq, seq, seq),), rewards=[seq]))
        eventually(lambda: world.count("sessions_lost") == 1)
        world.wait_for(1)
        batch, ended = world.batches[0]
        assert batch.live[0].tolist() == [True] * 3 + [False] * 5
        assert batch.truncated[0].tolist() == [False, False, True] + [False] * 5
        assert batch.rewards[0, :3].tolist() == [2, 3, 4]
        assert batch.final_observations.tolist() == [[4, 4, 4]]
        assert ended == [], "its return would be in means of whole episodes"
        assert world.count("episodes_cut") == 1
        with RawSimulator(world.address) as simulator:
            answer = simulator.greet(resume_token=token)
            assert answer.error.code == pb.Error.UNKNOWN_SESSION


def test_a_second_stream_takes_a_session_over_and_the_first_is_told() -> None:
    with GatewayWorld(rows=1, steps=100) as world:
        world.ask()
        with RawSimulator(world.address) as old, RawSimulator(world.address) as new:
            token = old.greet().welcome.resume_token
            old.step(steps_of(1))
            assert new.greet(resume_token=token).welcome.last_seq == 1
            assert old.hear().error.code == pb.Error.SUPERSEDED
            assert new.step(steps_of(2)).actions.seq == 2


def test_steps_wait_until_somebody_asks_and_simulators_are_told_so() -> None:
    with GatewayWorld(rows=1, steps=4) as world, RawSimulator(world.address) as simulator:
        simulator.greet()
        simulator.send(steps=steps_of(1))
        assert simulator.hear_anything().notice.kind == pb.Notice.WAITING
        world.ask()
        assert simulator.hear().actions.seq == 1


def test_who_cannot_wait_acts_all_the_same_and_is_not_learned_from_meanwhile() -> None:
    with GatewayWorld(rows=1, steps=2) as world, world.connect(real_time=True) as session:
        for reward in range(6):
            assert session.step(np.ones(3), reward) in (0, 1)
        assert world.count("steps_unrecorded") == 5
        world.ask()
        for reward in range(6, 9):
            session.step(np.ones(3), reward)
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards.tolist() in ([[6, 7]], [[7, 8]])
        assert batch.segment_offsets.tolist() in ([5], [6])


def test_steps_of_several_sessions_are_inferred_together() -> None:
    with GatewayWorld(rows=8, steps=100, max_wait=20.0) as world:
        world.ask()
        sessions: list[Any] = [world.connect() for _ in range(8)]

        def play(session: Any) -> None:
            for _ in range(5):
                session.step(np.ones(3))
            session.close()

        threads = [threading.Thread(target=play, args=(each,)) for each in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert world.count("inferred_rows") == 40
        assert world.count("inferences") <= 10


def test_the_end_of_the_gateway_is_an_error_of_its_own() -> None:
    world = GatewayWorld(rows=1, steps=4)
    session = world.connect()
    world.ask()
    session.step(np.zeros(3))
    thread = threading.Thread(target=world.close)
    thread.start()

    def go_on() -> None:
        while True:
            session.step(np.zeros(3))

    with pytest.raises(GatewayError, match="ENDED") as ended:
        go_on()
    assert ended.value.retryable
    thread.join()


@pytest.mark.parametrize("row_age", [1, 5])
def test_a_row_is_handed_in_when_it_is_as_old_as_the_run_allows(row_age: int) -> None:
    with GatewayWorld(rows=1, steps=10, row_age=row_age) as world:
        world.use(1.0, Version(1, 0))
        world.ask(2)
        with world.connect() as session:
            for reward in range(4):
                session.step(np.full(3, reward), reward)
            world.use(1.0, Version(1, row_age))
            session.step(np.full(3, 4), 4)
            assert world.count("rows_cut") == 0
            world.use(1.0, Version(1, row_age + 1))
            world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.live_steps == 4
