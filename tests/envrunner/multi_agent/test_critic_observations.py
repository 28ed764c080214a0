"""Observations of critics with several agents, against a script's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_agents import Collected, sampler_of
from support.scripted_games import (
    AGENTS,
    Episode,
    ScriptedParallel,
    ScriptedTurns,
    ScriptedVector,
    drawn,
    shown,
)

from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.multi_agent.critics import GroupObservations, Misfit, joined, joint_space
from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import from_tree, space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import flatten

N, EPISODES = 3, 6
OF_ENV = 100 * EPISODES  # episodes of an environment are numbered from a multiple of this
EVERYONE = dict.fromkeys(AGENTS, "all")


def there(agents: Sequence[str]) -> list[float]:
    return [float(agent in agents) for agent in AGENTS]


class Answering(RLModule):
    """Does what the scripted games expect; its log-probabilities mean nothing."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.register_buffer("unused", torch.zeros(1))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"].double()  # [B, 3]
        actions = seen @ torch.tensor([100.0, 10.0, 1.0], dtype=torch.float64)  # [B]
        return {"actions": actions, "action_dist_inputs": torch.zeros(len(seen), 2)}


class Parallel(ScriptedParallel):
    state_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def state(self) -> np.ndarray:
        return np.array([self.number, self.at, *there(self.agents)])


class Turns(ScriptedTurns):
    def state(self) -> np.ndarray:  # without a state_space: float32
        return np.array([self.number, self.at, *there(self.agents)])

    def observe(self, agent: str) -> np.ndarray:
        return self._see(agent)


class Vector(ScriptedVector):
    state_space = spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def __init__(self, num_envs: int, scripts: Sequence[Sequence[Episode]]) -> None:
        super().__init__(num_envs, scripts)
        self.states = np.zeros((num_envs, 5))

    def state(self) -> np.ndarray:
        for i, game in enumerate(self.games):
            over = game.at == len(game.script)
            left = [] if over else game.script[game.at].there
            self.states[i] = [game.number, game.at, *there(left)]
        return self.states  # its own memory


def made(how: str, scripts: Sequence[Sequence[Episode]], sees: str) -> MultiAgentEnvs:
    games: list[Any]
    if how.startswith("vector"):
        vector = Vector(N, scripts)
        games, envs = vector.games, VectorTurns(vector, "s", [sees])
    else:
        kind, game = (Parallel, ParallelGame) if how == "parallel" else (Turns, TurnBasedGame)
        games = [kind(script) for script in scripts]
        envs = GamesInTurn([game(each, i) for i, each in enumerate(games)], "s", [sees])  # type: ignore[assignment]
    for i, each in enumerate(games):
        each.number = OF_ENV * i - 1
    return envs


def seen_by_critic(
    how: str, sees: str, script: Episode, number: int, at: int, ended: bool
) -> list[float]:
    """A critic's observation before a step, or after an agent's last one.

    Args:
        how: the game.
        sees: "state" or "all_observations".
        script: of the episode.
        number: of the episode.
        at: steps of the episode so far.
        ended: an agent has ended with the last of them.
    """
    over = at == len(script)
    now = [] if over else script[at].there
    if ended:
        before = script[at - 1]
        newcomers = [agent for agent in now if agent not in before.there]
        with_the_ended = [*before.there, *newcomers]
    if sees == "state":
        # Agents that are done stay in an AEC game until they have been stepped with None.
        return [number, at, *there(with_the_ended if ended and how == "turns" else now)]
    if how.startswith("vector"):
        visible = [] if over else list(script[at].acting)
        if ended:
            visible += list(before.terminated | before.truncated)
    else:
        visible = with_the_ended if ended else now
    blank = [0.0, 0.0, 0.0]
    return [
        x
        for agent in AGENTS
        for x in (shown(number, at, agent).tolist() if agent in visible else blank)
    ]


KINDS = {
    "parallel": "parallel",
    "turns": "turns",
    "vector, all at once": "parallel",
    "vector, in turns": "turns",
    "vector, some at once": "some",
}


@pytest.mark.parametrize("sees", ["state", "all_observations"])
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("row_age", [1, 1000])
def test_a_critic_sees_each_step_and_each_end_as_the_script_has_them(
    how: str, sees: str, row_age: int
) -> None:
    scripts = [drawn(7 + i, KINDS[how], EPISODES) for i in range(N)]  # type: ignore[arg-type]
    envs = made(how, scripts, sees)
    assert envs.critic_spaces.keys() == {sees}
    sampler = sampler_of(
        envs, EVERYONE, steps=4, row_age=row_age, module=Answering, critic_sees=sees
    )
    collected = Collected(sampler)
    for update in range(30):
        collected.play(*(["all"] if update % 7 else []), update=update)  # some are not collected
    counts = {"steps": 0, "rows that go on": 0, "rows that end": 0, "truncated": 0}
    for batch in collected.batches["all"]:
        assert batch.has_critic
        columns: Any = batch

        def check(critic: Any, observation: Any, ended: bool) -> None:
            number, at, _ = np.asarray(observation).astype(int).tolist()
            script = scripts[number // OF_ENV][number % OF_ENV % EPISODES]
            expected = seen_by_critic(how, sees, script, number, at, ended)
            assert np.asarray(critic).tolist() == expected

        done = batch.terminated | batch.truncated  # [N, T]
        for n in range(batch.rows):
            length = int(batch.live[n].sum())
            for t in range(length):
                check(columns.critic_observations[n, t], columns.observations[n, t], False)
                counts["steps"] += 1
            # A row that is handed in short may already know the next episode.
            same = columns.last_observations[n][0] == columns.observations[n, length - 1][0]
            ended = bool(done[n, length - 1] and same)
            last = columns.last_critic_observations[n]
            check(last, columns.last_observations[n], ended)
            counts["rows that end" if ended else "rows that go on"] += 1
            padding = columns.critic_observations[n, length:]
            np.testing.assert_array_equal(padding, np.broadcast_to(last, padding.shape))
        for k in range(len(batch.final_rows)):
            check(columns.final_critic_observations[k], columns.final_observations[k], True)
            counts["truncated"] += 1
    assert min(counts.values()) > 5, counts


def test_a_module_whose_critic_sees_no_more_collects_no_more() -> None:
    scripts = [drawn(i, "parallel") for i in range(N)]
    envs = made("parallel", scripts, "state")
    collected = Collected(sampler_of(envs, EVERYONE, steps=3, module=Answering))
    collected.play("all")
    (batch,) = collected.batches["all"]
    assert not batch.has_critic
    assert "critic_observations" not in batch.to_tree()


class WithoutState(ScriptedParallel):
    pass


class Refusing(ScriptedParallel):
    def state(self) -> Any:
        raise NotImplementedError("state() method has not been implemented")


@pytest.mark.parametrize("game", [WithoutState, Refusing])
def test_an_environment_without_a_state_is_told(game: Any) -> None:
    scripts = drawn(0, "parallel")
    with pytest.raises(ValueError, match="critic_sees = 'state': the"):
        GamesInTurn([ParallelGame(game(scripts), 0)], "s", ["state"])


def test_a_vector_without_a_state_space_is_told() -> None:
    vector = ScriptedVector(1, [drawn(0, "parallel")])
    with pytest.raises(ValueError, match=r"the environment s has no state"):
        VectorTurns(vector, "s", ["state"])


def test_a_state_that_does_not_fit_its_space_is_told() -> None:
    class Other(Parallel):
        state_space = spaces.Box(-1, 1, (4,), np.float64)

    with pytest.raises(EnvironmentFailed, match=r"its state is .* but its state_space says"):
        GamesInTurn([ParallelGame(Other(drawn(0, "parallel")), 0)], "s", ["state"])
    vector = Vector(1, [drawn(0, "parallel")])
    vector.state_space = Other.state_space
    with pytest.raises(EnvironmentFailed, match=r"its states are .* must be float64 of shape"):
        VectorTurns(vector, "s", ["state"]).reset(0)


def test_a_state_that_is_not_finite_is_told_with_its_agent() -> None:
    class Broken(Parallel):
        def state(self) -> np.ndarray:
            return super().state() * (np.nan if self.at == 2 else 1)

    scripts = [[*each, *each] for each in drawn(3, "parallel") if len(each) > 3]
    envs = GamesInTurn([ParallelGame(Broken(scripts), 0)], "s", ["state"])
    sampler = sampler_of(envs, EVERYONE, steps=3, module=Answering, critic_sees="state")
    found = sampler.sample({"all"}, {"all": Version(0, 0)}).modules["all"]
    assert isinstance(found, NonFiniteBatch)
    assert (found.column, found.step) == ("critic_observations", 2)


SPACES = {
    "vector": spaces.Box(np.arange(3.0), np.arange(3.0) + 1, dtype=np.float64),
    "number": spaces.Box(0, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "choice": spaces.Discrete(3, start=5),
    "choices": spaces.MultiDiscrete([2, 4]),
    "bits": spaces.MultiBinary(3),
    "parts": spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(-1, 1, (2,))])),
}


@pytest.mark.parametrize("name", SPACES)
def test_the_observations_of_several_agents_are_in_their_joint_space(name: str) -> None:
    space, agents, times = SPACES[name], 4, 2
    joint = joint_space(space, agents)
    arrays = dict(flatten(joined(space, zeros(space, (times * agents,)), agents)))
    for path, leaf in space_leaves(joint):
        assert arrays[path].shape == (times, *leaf.shape)  # type: ignore[misc]
        assert arrays[path].dtype == leaf.dtype
    if name == "vector":
        rows = np.arange(times * agents * 3.0).reshape(-1, 3)
        np.testing.assert_array_equal(joined(space, rows, agents), rows.reshape(times, -1))
        assert joint.contains(np.tile(space.low, agents))  # type: ignore[attr-defined]
    if name == "choice":
        assert (arrays[()] == 5).all()


# Observations of a group fit the group's space, of any structure, with masks or without.


PLAIN: dict[str, spaces.Space[Any]] = {
    "Box": spaces.Box(-1, 1, (2, 3)),
    "Discrete": spaces.Discrete(5, start=2),
    "Dict": spaces.Dict({"image": spaces.Box(0, 255, (4,), np.uint8), "on": spaces.Discrete(2)}),
    "Tuple": spaces.Tuple([spaces.MultiBinary(3), spaces.Box(-1, 1, (1,))]),
}
ACTIONS: dict[str, tuple[spaces.Space[Any], Any]] = {
    "no mask": (spaces.Box(-1, 1, (2,)), None),
    "Discrete": (spaces.Discrete(3), np.array([1, 0, 1])),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), (np.array([1, 0]), np.array([0, 1, 1]))),
    "Dict": (
        spaces.Dict({"move": spaces.Discrete(2), "aim": spaces.Box(-1, 1, (1,))}),
        {"move": np.array([True, False])},
    ),
}


@pytest.mark.parametrize("observations", PLAIN)
@pytest.mark.parametrize("actions", ACTIONS)
def test_each_row_of_a_batch_is_in_the_space_of_the_group(observations: str, actions: str) -> None:
    space, (action_space, mask) = PLAIN[observations], ACTIONS[actions]
    space.seed(0)
    made = GroupObservations(AgentGroup(("a", "b"), space, action_space), mask)
    seen = [space.sample() for _ in range(3)]
    batch = made.batch(seen, [mask, mask, mask])
    whole = made.group.observation_space
    arrays, nothing = dict(flatten(batch)), dict(flatten(made.batch([], [])))
    assert arrays.keys() == nothing.keys() == dict(space_leaves(whole)).keys()
    for row in range(3):
        one = from_tree(whole, tree_map(lambda array, row=row: array[row], batch))
        assert whole.contains(one)
    for path, array in arrays.items():
        assert nothing[path].shape == (0, *array.shape[1:]), path
        assert nothing[path].dtype == array.dtype


def test_a_mask_of_floats_is_one_and_must_be_binary() -> None:
    group = AgentGroup(("a",), PLAIN["Box"], spaces.Discrete(3))
    made = GroupObservations(group, np.array([0.0, 1.0, 1.0]))
    batch = made.batch([np.zeros((2, 3))], [np.array([0.0, 0.0, 1.0])])
    assert isinstance(batch, dict)
    assert made.group.observation_space.contains(tree_map(lambda array: array[0], batch))
    assert batch["action_mask"].tolist() == [[0, 0, 1]]
    with pytest.raises(Misfit, match=r"other numbers than 0 and 1: 0\.5"):
        made.batch([np.zeros((2, 3))], [np.array([0.0, 0.5, 1.0])])


def test_a_mask_that_was_not_there_at_first_is_an_error() -> None:
    made = GroupObservations(AgentGroup(("a",), PLAIN["Box"], spaces.Discrete(3)), None)
    with pytest.raises(Misfit, match="had none in the first reset") as wrong:
        made.batch([np.zeros((2, 3))] * 2, [None, np.ones(3)])
    assert wrong.value.row == 1


def test_a_mask_beside_one_in_the_observation_is_not_read() -> None:
    space = spaces.Dict({"observation": PLAIN["Box"], "action_mask": spaces.MultiBinary(3)})
    made = GroupObservations(AgentGroup(("a",), space, spaces.Discrete(3)), np.ones(3))
    seen = {"observation": np.zeros((2, 3)), "action_mask": np.array([1, 0, 0])}
    batch = made.batch([seen], [np.ones(3)])
    assert made.group.observation_space is space
    assert isinstance(batch, dict)
    assert batch["action_mask"].tolist() == [[1, 0, 0]]


class Naps(Parallel):
    """All agents pause at every second step."""

    def step(self, actions: Any) -> Any:
        seen, *results = super().step(actions) if actions else self.last
        ended = {agent for kind in results[1:3] for agent, over in kind.items() if over}
        if actions and not ended and self.agents:
            self.last = [seen, *results]
            none = dict.fromkeys(results[0], 0.0)
            return {}, none, *results[1:]
        return seen, *results


def test_critics_see_an_environment_whose_agents_all_pause() -> None:
    scripts = [drawn(i, "parallel") for i in range(N)]
    games = [ParallelGame((Parallel, Naps, Parallel)[i](each), i) for i, each in enumerate(scripts)]
    envs = GamesInTurn(games, "s", ["all_observations"])
    turn, naps = envs.reset(0), 0
    for _ in range(40):
        (group,) = turn.groups
        seen = turn.critics["all_observations"].now.reshape(N, len(AGENTS), 3)
        for slot, own in zip(group.acting, group.observations, strict=True):
            assert seen[divmod(int(slot), len(AGENTS))].tolist() == own.tolist()
        naps += not any(slot // len(AGENTS) == 1 for slot in group.acting)
        turn = envs.step([group.observations @ [100, 10, 1]])
    assert naps > 5
