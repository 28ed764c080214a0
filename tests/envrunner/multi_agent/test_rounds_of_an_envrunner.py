"""An EnvRunner with two modules answers a round by playing once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.runner_world import PATIENCE, PLAYED_BY, RunnerWorld
from support.scripted_agents import FOUR, THREE, ScriptedAgents, by_slot, in_turn

from juggler.driver.checkpoint.snapshots import restores
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.learner_streams import LearnerStreams
from juggler.envrunner.multi_agent.turns import Turn
from juggler.envrunner.rounds import RequestedRound
from juggler.runtime.actors.attachment import Detached
from juggler.runtime.checkpoints.checkpoint import CONNECTORS
from juggler.runtime.checkpoints.weights import WEIGHTS, tree_digest
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import attach_pb2, training_pb2


@pytest.fixture
def world(make_world: Callable[..., RunnerWorld]) -> RunnerWorld:
    """An EnvRunner that has begun."""
    made = make_world()
    made.begin()
    return made


@pytest.fixture
def at_once(make_world: Callable[..., RunnerWorld]) -> RunnerWorld:
    """One that hands rows in with the weights that they began with."""
    made = make_world(row_age=0)
    made.begin()
    return made


def test_every_round_brings_each_learner_its_own_steps(
    world: RunnerWorld, envs: ScriptedAgents
) -> None:
    batches: dict[str, list[Any]] = {"reds": [], "blues": []}
    env_ended: list[tuple[float, int]] = []
    by_agent: dict[str, list[float]] = {}
    returns: dict[str, int] = {"reds": 0, "blues": 0}
    for _ in range(30):
        receipts = world.play(reds=0, blues=0)
        for module_id, receipt in receipts.items():
            assert not receipt.dropped
            returns[module_id] += len(receipt.episode_returns)
            if receipt.live_steps:
                header, batch = world.learners[module_id].batch()
                assert header.batch_id == receipt.batch_id
                assert header.live_steps == batch.live_steps == receipt.live_steps
                assert header.module_id == module_id
                batches[module_id].append(batch)
        told = [each for each in receipts.values() if each.env_lengths]
        assert len(told) <= 1, "they are in one receipt of a round"
        for each in told:
            env_ended += zip(each.env_returns, each.env_lengths, strict=True)
            for of in each.agent_returns:
                by_agent.setdefault(of.agent, []).extend(of.returns)
    assert env_ended
    for place, agent in enumerate(envs.agents):
        logged = [e for env in range(2) for e in envs.log[3 * env + place] if e.end]
        untold = Counter(e.before + sum(e.rewards()) for e in logged)
        untold.subtract(by_agent[agent])  # quarters are exact
        assert set(untold.values()) <= {0, 1, 2}
        assert untold.total() <= 2, "their environments' episodes go on"
    for module_id, agents in (("reds", (0, 1)), ("blues", (2,))):
        found = by_slot(batches[module_id])
        assert {slot % 3 for slot, _ in found} == set(agents)
        for (slot, number), steps in found.items():
            assert [step[0] for step in steps] == list(range(len(steps)))
            expected = envs.log[slot][number].rewards()[: len(steps)]
            np.testing.assert_allclose([step[2] for step in steps], expected)
        ended = sum(bool(e.end) for slot in range(6) if slot % 3 in agents for e in envs.log[slot])
        assert returns[module_id] == ended


def test_people_are_told_once_of_an_agent_that_does_not_end(
    world: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.play(reds=0, blues=0)
    monkeypatch.setattr(envs, "overdue", lambda steps: f"waits for agent 'red', {steps} steps")
    for _ in range(3):
        world.play(reds=0, blues=0)
    (note,) = [note for note in world.driver.notes if note.warning]
    assert note.text == "waits for agent 'red', 5000 steps"


def test_each_module_acts_with_the_weights_of_its_own_learners(
    at_once: RunnerWorld, envs: ScriptedAgents
) -> None:
    at_once.learners["reds"].publish(1)
    at_once.learners["blues"].publish(2)
    receipts = at_once.play(reds=1, blues=2)
    assert receipts["reds"].version.update == 1
    assert receipts["blues"].version.update == 2
    _, reds = at_once.learners["reds"].batch()
    _, blues = at_once.learners["blues"].batch()
    assert set(np.asarray(reds.actions)[reds.live]) == {1}
    assert set(np.asarray(blues.actions)[blues.live]) == {2}


def waiting(monkeypatch: pytest.MonkeyPatch, update: int) -> threading.Event:
    """An event: an EnvRunner waits for weights of this update."""
    act_on, begun = LearnerStreams.act_on, threading.Event()

    def noted(self: LearnerStreams, at_least: Version, *given: Any) -> bool:
        if at_least.update == update:
            begun.set()
        return act_on(self, at_least, *given)

    monkeypatch.setattr(LearnerStreams, "act_on", noted)
    return begun


def first_comes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event: a request has come that does not complete its round."""
    add, came = RequestedRound.add, threading.Event()

    def noted(self: RequestedRound, *given: Any) -> bool:
        complete = add(self, *given)
        if not complete:
            came.set()
        return complete

    monkeypatch.setattr(RequestedRound, "add", noted)
    return came


def test_a_round_waits_for_the_weights_of_each_module(
    at_once: RunnerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waiting(monkeypatch, update=1)
    at_once.driver.tell(*at_once.requests(reds=0, blues=1))
    assert waits.wait(PATIENCE)
    assert at_once.learners["reds"].frames.empty(), "it played without the weights of one"
    at_once.learners["blues"].publish(1)
    receipts = [at_once.driver.hear(training_pb2.Receipt) for _ in range(2)]
    assert {each.module_id: each.version.update for each in receipts} == {"reds": 0, "blues": 1}


def test_nothing_is_played_before_all_requests_of_a_round_are_there(
    world: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = world.requests(reds=0, blues=0)
    came = first_comes(monkeypatch)
    world.driver.tell(first)
    assert came.wait(PATIENCE)
    assert not any(episode.actions for slot in envs.log.values() for episode in slot)
    world.driver.tell(second)
    for _ in range(2):
        world.driver.hear(training_pb2.Receipt)
    assert max(envs._now) == 4, "it played more than once"


def test_a_module_whose_learner_is_gone_does_not_hold_up_the_others(
    at_once: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for weights that never come; then it is told that their learner is gone.
    waits = waiting(monkeypatch, update=5)
    at_once.driver.tell(*at_once.requests(reds=5, blues=0))
    assert waits.wait(PATIENCE)
    at_once.driver.tell(training_pb2.Learners(module_id="reds", generation=2))
    lost = at_once.driver.hear(training_pb2.Receipt)
    assert (lost.module_id, lost.dropped, lost.live_steps) == ("reds", "learner_lost", 0)
    # The answer to Learners follows the round, whose batch is acknowledged in another thread.
    answers = [at_once.driver._answers.get(timeout=PATIENCE) for _ in range(2)]
    (receipt,) = [each for each in answers if isinstance(each, training_pb2.Receipt)]
    (_,) = [each for each in answers if isinstance(each, attach_pb2.Done)]
    assert (receipt.module_id, receipt.dropped) == ("blues", "")
    assert receipt.live_steps > 0
    receipts = at_once.play(reds=0, blues=0)
    assert receipts["reds"].dropped == "learner_lost"
    assert receipts["blues"].live_steps > 0


def test_a_round_without_any_learner_is_not_played(
    make_world: Callable[..., RunnerWorld], envs: ScriptedAgents
) -> None:
    world = make_world()
    world.set_up()
    receipts = world.play(reds=0, blues=0)
    assert {each.dropped for each in receipts.values()} == {"learner_lost"}
    assert max(envs._now) == 0


def test_a_module_without_a_request_acts_with_its_newest_weights(
    at_once: RunnerWorld, envs: ScriptedAgents
) -> None:
    at_once.play(reds=0, blues=0)
    before = {slot: sum(len(e.actions) for e in log) for slot, log in envs.log.items()}
    blues = at_once.runner._streams["blues"]
    version = at_once.learners["blues"].publish(2)
    blues._subscription.wait_for(version, PATIENCE)
    assert list(at_once.play(reds=0)) == ["reds"]
    new = [a for slot in (2, 5) for e in envs.log[slot] for a in e.actions]
    assert 2 in new
    assert sum(before[slot] for slot in (2, 5)) < len(new)
    assert at_once.learners["blues"].frames.qsize() == 1


def test_beginning_anew_plays_the_same_again(world: RunnerWorld) -> None:
    found = []
    for _ in range(2):
        requests = world.requests(reds=0, blues=0)
        for request in requests:
            request.seed = 5
        world.driver.tell(*requests)
        for _ in range(2):
            world.driver.hear(training_pb2.Receipt)
        for _ in range(3):
            world.play(reds=0, blues=0)
        batches = []
        while not world.learners["reds"].frames.empty():
            batches.append(world.learners["reds"].batch()[1])
        found.append(batches)
    assert len(found[0]) == len(found[1]) > 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.observations, other.observations)
        np.testing.assert_array_equal(one.actions, other.actions)


# Rounds of an EnvRunner in which something fails.


def test_steps_that_are_not_finite_are_lost_for_their_module_alone(
    at_once: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = envs.observation

    def broken(slot: int, episode: int, step: int) -> np.ndarray:
        seen = shown(slot, episode, step)
        return seen * np.nan if slot == 4 and step == 1 else seen

    monkeypatch.setattr(envs, "observation", broken)
    said: list[Any] = []
    for _ in range(20):
        at_once.driver.tell(*at_once.requests(reds=0, blues=0))
        said = [at_once.driver._answers.get(timeout=PATIENCE) for _ in range(2)]
        if any(isinstance(each, Exception) or each.dropped for each in said):
            said.append(at_once.driver._answers.get(timeout=PATIENCE))
            break
    # The batch of the others is acknowledged in another thread, while the runner leaves.
    receipts = {each.module_id: each for each in said if isinstance(each, training_pb2.Receipt)}
    (failure,) = [each for each in said if isinstance(each, Exception)]
    assert receipts["blues"].dropped == ""
    assert receipts["blues"].live_steps > 0
    assert receipts["reds"].dropped == "nonfinite"
    named = "observations of agent 'green' in environment 1 after step"
    assert named in receipts["reds"].explanation
    assert named in str(failure)


def test_a_runner_that_leaves_in_the_middle_of_a_round_answers_its_requests(
    world: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = world.requests(reds=0, blues=0)
    came = first_comes(monkeypatch)
    world.driver.tell(first)
    assert came.wait(PATIENCE)
    world.driver.inbox.put(Detached("terminated"))
    receipt = world.driver.hear(training_pb2.Receipt)
    assert (receipt.batch_id, receipt.live_steps) == (first.batch_id, 0)
    assert receipt.dropped == "learner_lost"
    assert max(envs._now) == 0


def test_a_runner_that_leaves_while_it_waits_for_weights_answers_its_requests(
    world: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = waiting(monkeypatch, update=5)
    world.driver.tell(*world.requests(reds=5, blues=5))
    assert waits.wait(PATIENCE)
    world.driver.inbox.put(Detached("terminated"))
    receipts = [world.driver.hear(training_pb2.Receipt) for _ in range(2)]
    assert {(each.dropped, each.live_steps) for each in receipts} == {("learner_lost", 0)}
    assert max(envs._now) == 0


def test_an_environment_that_fails_costs_no_steps_of_any_module(
    world: RunnerWorld, envs: ScriptedAgents, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fails(actions: Any) -> Turn:
        raise EnvironmentFailed("environment 1", "step", "it broke")

    monkeypatch.setattr(envs, "step", fails)
    world.driver.tell(*world.requests(reds=0, blues=0))
    receipt = world.driver.hear(training_pb2.Receipt)
    assert (receipt.module_id, receipt.live_steps, receipt.dropped) == ("reds", 0, "")
    failure = world.driver._answers.get(timeout=PATIENCE)
    assert isinstance(failure, EnvironmentFailed)


@pytest.mark.parametrize(
    ("played_by", "text"),
    [
        ({"red": "reds", "green": "reds"}, "no module plays agent blue"),
        ({**PLAYED_BY, "grey": "reds"}, "the environment has no agent grey"),
        (dict.fromkeys(PLAYED_BY, "all"), "plays agents with different"),
    ],
)
def test_agents_and_modules_that_do_not_fit_are_told(
    make_world: Callable[..., RunnerWorld], played_by: dict[str, str], text: str
) -> None:
    world = make_world(played_by)
    with pytest.raises(AssertionError, match=text):
        world.set_up()


# An EnvRunner plays untrained modules with the driver's version, or not at all.


AGENTS = {"red": "learns", "green": "old", "blue": "random"}


def playing(scale: float) -> dict[str, Any]:
    """`Scaled` chooses the action of this number."""
    weights = {"scale": np.full((), scale, np.float32), "value.bias": np.zeros(3, np.float32)}
    return {WEIGHTS: weights, CONNECTORS: {}}


@pytest.fixture
def envs_of_frozen_weights() -> ScriptedAgents:
    spaces = {"red": THREE, "green": THREE, "blue": FOUR}
    return ScriptedAgents(2, spaces, in_turn(tuple(AGENTS), 7))


@pytest.fixture
def make_world_of_frozen_weights(
    make_world: Callable[..., RunnerWorld], envs_of_frozen_weights: ScriptedAgents
) -> Callable[..., RunnerWorld]:
    keys = {"frozen": {"old": playing(2)}, "row_age": 0, "envs": envs_of_frozen_weights}
    return lambda **own: make_world(AGENTS, **{**keys, **own})


def actions(envs_of_frozen_weights: ScriptedAgents, agent: str) -> list[int]:
    place = envs_of_frozen_weights.agents.index(agent)
    return [
        action
        for slot, episodes in envs_of_frozen_weights.log.items()
        for episode in episodes
        for action in episode.actions
        if slot % 3 == place
    ]


def test_weights_that_are_not_those_that_were_meant_are_refused(
    make_world_of_frozen_weights: Callable[..., RunnerWorld], envs_of_frozen_weights: ScriptedAgents
) -> None:
    world = make_world_of_frozen_weights()
    world.send_frozen(old=playing(1))
    with pytest.raises(AssertionError) as refused:
        world.set_up()
    said = str(refused.value)
    assert "the weights of module 'old' are not the ones that this run plays with" in said
    assert tree_digest(playing(1)) in said
    assert tree_digest(playing(2)) in said
    assert not actions(envs_of_frozen_weights, "red"), "a module played"


def test_without_weights_nobody_plays(
    make_world_of_frozen_weights: Callable[..., RunnerWorld],
) -> None:
    with pytest.raises(AssertionError, match="their digest is none, and must be"):
        make_world_of_frozen_weights().set_up()


def test_a_part_that_was_damaged_on_its_way_is_refused(
    make_world_of_frozen_weights: Callable[..., RunnerWorld],
) -> None:
    world = make_world_of_frozen_weights()
    (part,) = restores("old", playing(2), {})
    scale = np.full((), 2, np.float32).tobytes()
    assert scale in part.chunk
    part.chunk = part.chunk.replace(scale, np.full((), 3, np.float32).tobytes())
    world.driver.tell(part)
    assert "does not match its digest" in str(world.driver.hear(WireError))  # type: ignore[type-var]


def test_weights_of_another_module_are_told_by_name(
    make_world_of_frozen_weights: Callable[..., RunnerWorld],
) -> None:
    other = {WEIGHTS: {"encoder": np.zeros(3, np.float32)}, CONNECTORS: {}}
    world = make_world_of_frozen_weights(frozen={"old": other})
    world.send_frozen()
    with pytest.raises(AssertionError, match="another module's: it has no scale"):
        world.set_up()


def test_large_weights_come_in_parts(
    make_world_of_frozen_weights: Callable[..., RunnerWorld],
) -> None:
    large = playing(2)
    large[WEIGHTS]["value.weight"] = np.arange(3 << 20, dtype=np.float32)
    parts = list(restores("old", large, {}))
    assert len(parts) == 4
    world = make_world_of_frozen_weights(frozen={"old": large})
    for part in parts:
        assert part.ByteSize() < 5 << 20
        world.driver.ask(part, attach_pb2.Done)
    assert isinstance(world.set_up(), training_pb2.Ready)


def test_the_digest_is_of_names_shapes_dtypes_and_numbers() -> None:
    one = np.arange(6, dtype=np.float32)
    same = {"b": {"x": one}, "a": {}}
    assert tree_digest(same) == tree_digest({"a": {}, "b": {"x": one.copy()}})
    others: list[Any] = [
        {"b": {"x": one}},
        {"b": {"y": one}, "a": {}},
        {"b": {"x": one.reshape(2, 3)}, "a": {}},
        {"b": {"x": one.astype(np.float64)}, "a": {}},
        {"b": {"x": one.view(np.int32)}, "a": {}},
        {"b": {"x": one + 1e-6}, "a": {}},
    ]
    digests = {tree_digest(each) for each in (same, *others)}
    assert len(digests) == 7


# An EnvRunner with two modules evaluates a checkpoint of both.


def evaluation(world: RunnerWorld, **scales: float) -> training_pb2.Evaluate:
    """Send a checkpoint's weights; return the command that plays them."""
    for module_id, scale in scales.items():
        tree = {"weights": {"scale": np.array(scale, np.float32)}, "connectors": {}}
        for part in restores(module_id, tree, {}):
            world.driver.ask(part, attach_pb2.Done)
    return training_pb2.Evaluate(episodes=4, version=Version(1, 9).message())


def test_an_evaluation_of_a_checkpoint_loads_the_weights_of_every_module(
    world: RunnerWorld, envs: ScriptedAgents
) -> None:
    told = world.driver.ask(evaluation(world, reds=2.0, blues=1.0), training_pb2.Evaluation)
    assert (told.version.update, len(told.episode_returns)) == (9, 4)
    actions = {slot: {a for e in log for a in e.actions} for slot, log in envs.log.items()}
    assert [actions[slot] for slot in (0, 1, 2)] == [{2}, {2}, {1}]


def test_a_checkpoint_that_lacks_a_module_is_refused(world: RunnerWorld) -> None:
    world.driver.tell(evaluation(world, reds=0.0))
    failure = world.driver._answers.get(timeout=PATIENCE)
    assert "has no weights of module 'blues'" in str(failure)
