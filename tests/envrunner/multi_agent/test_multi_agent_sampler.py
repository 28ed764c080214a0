"""Batches and infos of several agents hold exactly theirs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_agents import (
    AGENTS,
    FOUR,
    THREE,
    TWO_MODULES,
    Collected,
    Happening,
    Remembering,
    ScriptedAgents,
    at_random,
    by_slot,
    in_turn,
    random_world,
    sampler_of,
)

from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch
from juggler.envrunner.info_numbers import MOST_EPISODES, InfoNumber, InfoNumbers
from juggler.envrunner.multi_agent.games import Game, GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv, VectorStep
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.episodes.version import Version

SEEDS = range(4)
THREE_MODULES = {"red": "reds", "green": "greens", "blue": "blues"}


def slots_of(envs: ScriptedAgents, played_by: dict[str, str], module: str) -> list[int]:
    count = len(envs.agents)
    every = range(envs.num_envs * count)
    return [slot for slot in every if played_by[envs.agents[slot % count]] == module]


def check_steps(
    envs: ScriptedAgents, slots: list[int], found: dict[tuple[int, int], list[tuple[Any, ...]]]
) -> int:
    """Every step found is what happened -> how many there are."""
    count = 0
    for (slot, number), steps in found.items():
        assert slot in slots
        episode = envs.log[slot][number]
        rewards = episode.rewards()
        for step, action, reward, terminated, truncated, after in steps:
            assert action == episode.actions[step]
            assert reward == pytest.approx(rewards[step], abs=1e-6)
            last = episode.end != "" and step == len(episode.actions) - 1
            assert terminated == (last and episode.end != "truncated")
            assert truncated == (last and episode.end == "truncated")
            if not terminated:
                np.testing.assert_array_equal(after, episode.observations[step + 1])
        count += len(steps)
    return count


def numbers(steps: list[tuple[Any, ...]]) -> list[int]:
    return [step[0] for step in steps]


@pytest.mark.parametrize("played_by", [TWO_MODULES, THREE_MODULES])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_of_a_collected_module_is_in_one_batch_in_order(
    seed: int, played_by: dict[str, str]
) -> None:
    envs = random_world(seed)
    collected = Collected(sampler_of(envs, played_by, steps=5))
    modules = list(dict.fromkeys(played_by.values()))
    for _ in range(40):
        collected.play(*modules)
    for module in modules:
        slots = slots_of(envs, played_by, module)
        found = by_slot(collected.batches[module])
        count = check_steps(envs, slots, found)
        for (slot, number), steps in found.items():
            assert numbers(steps) == list(range(len(steps))), "lost, twice, or out of order"
            complete = len(steps) == len(envs.log[slot][number].actions)
            assert complete or (slot, number) == max(key for key in found if key[0] == slot)
        # Nothing is lost: at most one row of each slot is under way.
        made = sum(len(e.actions) for slot in slots for e in envs.log[slot])
        assert 0 <= made - count <= 5 * len(slots)
        ended = [e for slot in slots for e in envs.log[slot] if e.end]
        expected = sorted((sum(e.rewards()), len(e.actions)) for e in ended)
        assert sorted(collected.ended[module]) == expected


def test_a_round_keeps_no_turn_of_an_ended_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = random_world(0)
    sampler = sampler_of(envs, TWO_MODULES, steps=60)
    step, alive, ended = envs.step, [], 0

    def counting(actions: Any) -> Turn:
        nonlocal ended
        turn = step(actions)
        ended += len(turn.over)
        alive.append(sum(type(each) is Turn for each in gc.get_objects()))
        return turn

    monkeypatch.setattr(envs, "step", counting)
    played = sampler.sample([], dict.fromkeys(sampler._modules, Version(1, 0)))
    assert len(played.env_returns) == len(played.env_lengths) == ended > 5
    assert max(alive) <= alive[0] + 1


def has_no_gap(batch: Any) -> None:
    """Check that rows are contiguous, with dead steps at the end."""
    for row in range(batch.rows):
        live = batch.live[row]
        assert live[: live.sum()].all()
        seen = np.asarray(batch.observations)[row, : live.sum(), :3]
        ends = (batch.terminated | batch.truncated)[row]
        for t in range(1, int(live.sum())):
            follows = seen[t - 1] + [0, 0, 1]
            if ends[t - 1]:
                follows = np.array([seen[t - 1][0], seen[t - 1][1] + 1, 0])
            np.testing.assert_array_equal(seen[t], follows)


@pytest.mark.parametrize("seed", range(12))
def test_every_collected_step_is_in_a_batch_or_stale_or_in_a_row(seed: int) -> None:
    """For any collected rounds, and any number of updates in between."""
    rng = np.random.default_rng(seed)
    envs = random_world(seed)
    steps, row_age = int(rng.integers(1, 9)), int(rng.integers(0, 4))
    sampler = sampler_of(envs, THREE_MODULES, steps, row_age)
    collected = Collected(sampler)
    update = 0
    for _ in range(30):
        update += int(rng.choice([0, 1, 5]))
        wanted = [module for module in ("reds", "greens", "blues") if rng.random() < 0.7]
        for module, result in collected.play(*wanted, update=update).items():
            slots = slots_of(envs, THREE_MODULES, module)
            assert result.batch is None or result.batch.rows <= len(slots)
            oldest = update - 2 * row_age
            assert result.batch is None or result.batch.segment_updates.min() >= oldest
    for module, slots_here in sampler._modules.items():
        paced = slots_here._paced
        columns, rows = paced.rows.columns, paced.rows
        batches = collected.batches[module]
        found = by_slot(batches)
        check_steps(envs, slots_of(envs, THREE_MODULES, module), found)
        assert all(numbers(steps) == sorted(set(numbers(steps))) for steps in found.values())
        for batch in batches:
            has_no_gap(batch)
        live = sum(batch.live_steps for batch in batches)
        held = int(columns["lengths"][rows.complete].sum())
        filling = int(paced.of["step"][paced.of["row"] >= 0].sum())
        dropped = collected.stale[module] + paced.counts["steps_stale"]
        made = paced.counts["steps"] - paced.counts["steps_uncollected"]
        assert made == live + held + filling + dropped
        assert live > 0
        assert rows.begun == np.count_nonzero(paced.of["row"] >= 0), "a row has no owner"


def test_connectors_of_a_module_learn_from_what_its_collected_agents_see() -> None:
    envs = random_world(2)
    connectors = {"env_to_module": ["mean_std_filter"]}
    collected = Collected(sampler_of(envs, TWO_MODULES, steps=5, connectors=connectors))
    counts = {"reds": 0.0, "blues": 0.0}
    for _ in range(20):
        for module, result in collected.play("reds", "blues").items():
            state: Any = result.connector_delta
            if state:
                counts[module] += float(next(iter(state.values()))["count"])
    for module in counts:
        slots = slots_of(envs, TWO_MODULES, module)
        shown = sum(len(e.at) for slot in slots for e in envs.log[slot])
        assert shown == counts[module], "it has seen something twice, or not at all"
    collected.play("reds")
    assert not collected.sampler._modules["blues"]._delta, "it learned where it was not collected"


@pytest.mark.parametrize("reward", [np.nan, 1e39])
@pytest.mark.parametrize("wanted", [("reds",), ("blues",)])
def test_rewards_that_are_not_finite_are_found_wherever_they_are(
    wanted: tuple[str], reward: float
) -> None:
    script = at_random(AGENTS, 4)

    def broken(env: int, episode: int, step: int) -> Happening:
        happens = script(env, episode, step)
        if (env, episode) == (1, 1) and "green" in happens.rewards:
            happens.rewards["green"] = reward
        return happens

    shown = {"red": THREE, "green": THREE, "blue": FOUR}
    sampler = sampler_of(ScriptedAgents(3, shown, broken), TWO_MODULES, steps=4)
    versions = dict.fromkeys(("reds", "blues"), Version(1, 0))
    failed = ""
    while not failed:
        try:
            result = sampler.sample(wanted, versions).modules[wanted[0]]
            if isinstance(result, NonFiniteBatch):
                failed = str(result)
            else:
                assert np.isfinite(result.episode_returns).all()
        except EnvironmentFailed as error:
            failed = str(error)
    if wanted == ("reds",):
        assert "rewards of agent 'green' in environment 1 at step " in failed
    else:
        assert f"environment 1 failed in step: the return of its episode is {reward:g}" in failed
    with pytest.raises(RuntimeError, match="call reset first"):
        sampler.sample(wanted, versions)


def test_an_action_mask_without_a_legal_action_names_the_agent_and_the_environment() -> None:
    envs = MaskedAgents(2)
    collected = Collected(sampler_of(envs, dict.fromkeys(("red", "green"), "all"), steps=3))
    collected.play("all")  # masks of agents that are not on turn are ignored
    envs.illegal = 1
    with pytest.raises(EnvironmentFailed, match="agent 'green' of environment 1"):
        collected.play("all")
    with pytest.raises(RuntimeError, match="call reset first"):
        collected.play("all")
    envs.illegal = -1
    collected.sampler.reset(0)
    collected.play("all")


class MaskedAgents(ScriptedAgents):
    """Agents in turn, whose observations are Dicts with an action mask.

    Attributes:
        illegal: the environment in which green's masks are zeros; -1: none.
    """

    def __init__(self, num_envs: int) -> None:
        self.illegal = -1
        agents = ("red", "green")
        super().__init__(num_envs, dict.fromkeys(agents, THREE), in_turn(agents, 6))
        mask = spaces.Box(0, 1, (3,), np.int8)
        shown = spaces.Dict({"observation": THREE, "action_mask": mask})
        (group,) = self.groups
        self.groups = (replace(group, observation_space=shown),)

    def _turn(self, *args: Any) -> Any:
        turn = super()._turn(*args)
        (group,) = turn.groups
        masks = np.ones((len(group.acting), 3), np.int8)
        masks[group.acting == 2 * self.illegal + 1] = 0
        lasts = np.zeros((len(group.ended), 3), np.int8)
        masked = replace(
            group,
            observations={"observation": group.observations, "action_mask": masks},
            last_observations={"observation": group.last_observations, "action_mask": lasts},
        )
        return replace(turn, groups=(masked,))


@pytest.mark.parametrize("seed", SEEDS)
def test_states_at_the_starts_of_rows_are_those_of_a_run_that_was_not_cut(seed: int) -> None:
    envs = random_world(seed)
    sampler = sampler_of(envs, TWO_MODULES, steps=4, row_age=3, module=Remembering)
    collected = Collected(sampler)
    for update in range(30):
        collected.play("reds", "blues", update=update)
    rows = 0
    for batch in [each for batches in collected.batches.values() for each in batches]:
        states: Any = batch.states["module"]
        for row in range(batch.rows):
            slot, number, step = np.asarray(batch.observations)[row, 0, :3].astype(int).tolist()
            total = torch.full((3,), 0.5)
            for seen in envs.log[slot][number].observations[:step]:
                total = 0.5 * total + torch.from_numpy(seen[:3])
            np.testing.assert_allclose(states["sum"][row], total.numpy(), rtol=1e-6)
            rows += step > 0
    assert rows > 20


# Numbers of infos in environments with several agents, with any interface.


SEES = spaces.Box(-1, 1, (3,), np.float32)
ACTS = spaces.Discrete(3)
SEEN = np.zeros(3, np.float32)
HOSTILE = {
    "name": "text",
    "nan": float("nan"),
    "huge": 1e308,
    "endless": 10**400,
    "array": np.ones(2),
    "nested": {"x": 1.0},
    "_hidden": 1.0,
    "bad\n": 1.0,
    "n" * 101: 1.0,
    "action_mask": None,
    7: 1.0,
    None: 1.0,
}


class Parallel:
    """Episodes of three steps; "b" ends early, with infos afterwards."""

    def __init__(self, agents: tuple[str, ...] = ("a", "b")) -> None:
        self.possible_agents, self.agents = agents, list(agents)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SEES

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTS

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, SEEN), {agent: {"step": 1000} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        gone = {agent for agent in actions if self.at == 3 or (self.at == 2 and agent == "b")}
        self.agents = [agent for agent in self.agents if agent not in gone]
        return (
            dict.fromkeys(actions, SEEN),
            dict.fromkeys(actions, 1.0),
            {agent: agent in gone for agent in actions},
            dict.fromkeys(actions, False),
            self.infos(),
        )

    def infos(self) -> dict[Any, Any]:
        late = {"won": True} if self.at == 2 else {"step": 1e6} if self.at == 3 else {}
        b = {"step": np.float32(10 * self.at), **HOSTILE, **late}
        return {"a": {"step": self.at}, "b": b, "common": {"step": 1e6}, "c": {"step": 1e6}}


class InTurns:
    """Two players move twice each, and share one info dict."""

    possible_agents = ("a", "b")

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.infos: dict[str, Any] = {agent: {} for agent in self.possible_agents}
        self._cumulative_rewards = dict.fromkeys(self.possible_agents, 0.0)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return SEES

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return ACTS

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.moves = list(self.possible_agents), 0
        for info in self.infos.values():
            info.update({"moves": 1000, **HOSTILE})
        self.agent_selection = "a"

    def observe(self, agent: str) -> Any:
        return SEEN

    def last(self) -> Any:
        agent = self.agent_selection
        return SEEN, 0.0, self.moves >= 4, False, self.infos[agent]

    def step(self, action: Any) -> None:
        if action is None:
            self.agents.remove(self.agent_selection)
            self.agent_selection = self.agents[0] if self.agents else "a"
            return
        self.moves += 1
        self.infos[self.agent_selection]["moves"] = (self.moves + 1) // 2
        self.agent_selection = self.possible_agents[self.moves % 2]


class Vector(MultiAgentVectorEnv):
    """Episodes of three steps; a reset overwrites the infos' memory."""

    agents = ("a", "b")
    observation_space, action_space = SEES, ACTS

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._at = 0
        self._told, self._given = np.zeros((num_envs, 2)), np.ones((num_envs, 2), bool)

    def reset(self, seed: int | None, which: np.ndarray) -> Any:
        self._at = 0
        self._told[:] = 1e6
        return np.zeros((self.num_envs, 2, 3), np.float32), np.ones((self.num_envs, 2), bool)

    def step(self, actions: Any) -> VectorStep:
        self._at += 1
        self._told[:] = self._at * np.array([1, 10])
        self._given[:, 1] = self._at < 3
        over = np.full((self.num_envs, 2), self._at == 3)
        seen = np.zeros((self.num_envs, 2, 3), np.float32)
        rewards = np.ones((self.num_envs, 2))
        return VectorStep(seen, rewards, over, np.zeros_like(over), ~over, self.infos())

    def infos(self) -> Any:
        odd = {"flat": np.ones(self.num_envs), "text": "x", "what": np.full((2, 2), None), 7: 1.0}
        return {"step": self._told, "_step": self._given, "nan": self._told * np.nan, **odd}


def parallel() -> MultiAgentEnvs:
    games: list[Game] = [ParallelGame(Parallel(), index) for index in range(2)]
    return GamesInTurn(games, "Parallel")


def in_turns() -> MultiAgentEnvs:
    games: list[Game] = [TurnBasedGame(InTurns(), index) for index in range(2)]
    return GamesInTurn(games, "InTurns")


def vector() -> MultiAgentEnvs:
    return VectorTurns(Vector(2), "Vector")


def told(envs: MultiAgentEnvs, fragment: int, steps: int) -> InfoNumbers:
    sampler = sampler_of(envs, dict.fromkeys(envs.agents, "m"), fragment)
    found: InfoNumbers = {}
    for _ in range(steps // fragment):
        infos = sampler.sample({"m"}, {"m": Version(1, 0)}).infos
        for name, episodes in infos.items():
            found.setdefault(name, []).extend(episodes)
    return found


A, B = InfoNumber(2.0, 1.0, 3.0), InfoNumber(15.0, 10.0, 20.0)


@pytest.mark.parametrize("fragment", [1, 4, 24])
@pytest.mark.parametrize(
    ("make", "episode", "numbers"),
    [
        (parallel, 3, {"a/step": A, "b/step": B, "b/won": InfoNumber(1.0, 1.0, 1.0)}),
        (in_turns, 4, dict.fromkeys(("a/moves", "b/moves"), InfoNumber(1.5, 1.0, 2.0))),
        (vector, 3, {"a/step": A, "b/step": B}),
    ],
)
def test_each_agents_numbers_count_from_its_first_action_to_its_end(
    make: Callable[[], MultiAgentEnvs], episode: int, numbers: dict[str, InfoNumber], fragment: int
) -> None:
    count = 2 * (24 // episode)
    assert told(make(), fragment, 24) == {name: [each] * count for name, each in numbers.items()}


def test_an_agent_that_a_limit_truncates_tells_its_numbers_too() -> None:
    envs = GamesInTurn([TurnBasedGame(InTurns(), 0, 3)], "InTurns")
    whole, short = InfoNumber(1.5, 1.0, 2.0), InfoNumber(1.0, 1.0, 1.0)
    assert told(envs, 3, 6) == {"a/moves": [whole] * 2, "b/moves": [short] * 2}


def test_a_new_start_drops_what_running_episodes_gave() -> None:
    sampler = sampler_of(parallel(), {"a": "m", "b": "m"}, 2)
    assert sampler.sample({"m"}, {"m": Version(1, 0)}).infos == {}
    sampler.reset(1)
    assert sampler.sample({"m"}, {"m": Version(1, 0)}).infos == {}
    infos = sampler.sample({"m"}, {"m": Version(1, 0)}).infos
    assert infos["a/step"] == [A, A]


def test_of_many_agents_nothing_says_which_of_them_gave_a_number() -> None:
    class Crowd(Parallel):
        def infos(self) -> Any:
            return {agent: {"step": self.at} for agent in self.possible_agents}

    names = tuple(f"agent_{k}" for k in range(40))
    found = told(GamesInTurn([ParallelGame(Crowd(names), 0)], "Crowd"), 12, 12)
    assert found == {"step": [A] * MOST_EPISODES}  # of 160 episodes of agents


@pytest.mark.parametrize("agents", [("a", "b\n"), ("a", "b" * 101)])
def test_an_agent_whose_name_cannot_be_told_is_not_named(agents: tuple[str, ...]) -> None:
    class Same(Parallel):
        def infos(self) -> Any:
            return {agent: {"step": self.at} for agent in self.possible_agents}

    found = told(GamesInTurn([ParallelGame(Same(agents), 0)], "Same"), 3, 3)
    assert found == {"step": [A] * 2}


def test_numbers_of_two_agents_never_have_one_name() -> None:
    class Slashes(Parallel):
        def infos(self) -> Any:
            longer = {"x": 2.0, "b/x": 3.0}
            return {"a": {"x": 4.0, "b/x": 1.0, "c/x": 5.0}, "a/b": longer}

    found = told(GamesInTurn([ParallelGame(Slashes(("a", "a/b")), 0)], "Slashes"), 3, 3)
    assert {name: each[0].mean for name, each in found.items()} == {
        "a/x": 4.0,
        "a/c/x": 5.0,
        "a/b/x": 2.0,
    }


@pytest.mark.parametrize("info", [None, 3.0, "text", [1.0], np.ones(2)])
def test_an_info_that_is_no_dict_is_an_error(info: Any) -> None:
    class Odd(Parallel):
        def infos(self) -> Any:
            return {"a": info, "b": {"step": 1.0}}

    kind = type(info).__name__
    with pytest.raises(EnvironmentFailed, match=f"info of agent 'a' must be a dict, and .* {kind}"):
        told(GamesInTurn([ParallelGame(Odd(), 0)], "Odd"), 3, 3)


@pytest.mark.parametrize("infos", [None, 3.0, np.ones((2, 2))])
def test_a_vector_whose_infos_are_no_dict_is_told_so(infos: Any) -> None:
    class Odd(Vector):
        def infos(self) -> Any:
            return infos

    with pytest.raises(EnvironmentFailed, match="its infos must be a dict of arrays by name"):
        told(VectorTurns(Odd(2), "Odd"), 3, 3)


class Misnamed(InTurns):
    """A step has a number under a name that is no agent."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.infos["touches"] = 1.0


def test_what_nothing_reads_in_infos_is_told_whatever_the_interface() -> None:
    def first_turns(envs: MultiAgentEnvs) -> list[str]:
        """Unread values after a reset and after a step, as text."""
        began = envs.reset(0)
        turns = began, envs.step([np.zeros(len(began.groups[0].acting), int)])
        return [turn.unread for turn in turns]

    no_agent = "no agent is called so: nothing reads that. Infos have a dict for each agent, as in"
    assert first_turns(parallel()) == ["", f"'c' and 'common', and {no_agent} {{'a': {{...}}}}"]
    assert first_turns(in_turns()) == ["", ""]
    misnamed = GamesInTurn([TurnBasedGame(Misnamed(), 0)], "Misnamed")
    assert first_turns(misnamed) == ["", f"'touches', and {no_agent} {{'a': {{...}}}}"]
    assert first_turns(vector()) == [
        "",
        "'flat' and '7', and no array of the shape [2, 2] there: nothing reads that. Infos have "
        "arrays [num_envs, agents] by name",
    ]
