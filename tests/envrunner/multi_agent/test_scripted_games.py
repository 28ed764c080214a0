"""Games give each agent exactly its own steps, in evaluations too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from pettingzoo import ParallelEnv
from support.scripted_agents import (
    THREE,
    Halves,
    Remembering,
    ScriptedAgents,
    at_random,
    in_turn,
    sampler_of,
)
from support.scripted_games import (
    AGENTS,
    Episode,
    Kind,
    ScriptedParallel,
    ScriptedTurns,
    ScriptedVector,
    drawn,
    expected,
    play,
)

from juggler.envrunner.cartpoles import CartPoles
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.evaluation import play_whole_episodes
from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.slot_books import BrokenRule, SlotBooks
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.episodes.version import Version

N = 3
Scripts = Sequence[Sequence[Episode]]


def parallel(scripts: Scripts) -> MultiAgentEnvs:
    return GamesInTurn([ParallelGame(ScriptedParallel(s), i) for i, s in enumerate(scripts)], "s")


def in_turns(scripts: Scripts) -> MultiAgentEnvs:
    return GamesInTurn([TurnBasedGame(ScriptedTurns(s), i) for i, s in enumerate(scripts)], "s")


def vector(scripts: Scripts) -> MultiAgentEnvs:
    return VectorTurns(ScriptedVector(len(scripts), scripts), "s")


MAKERS = {
    "parallel": (parallel, "parallel"),
    "parallel, some pause": (parallel, "some"),
    "AEC": (in_turns, "turns"),
    "vector, all at once": (vector, "parallel"),
    "vector, in turns": (vector, "turns"),
    "vector, some at once": (vector, "some"),
}


@pytest.mark.parametrize("how", MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_an_agents_actions_rewards_and_endings_are_those_added_up_by_hand(
    how: str, seed: int
) -> None:
    make, kind = MAKERS[how]
    scripts = [drawn(100 * seed + i, kind) for i in range(N)]  # type: ignore[arg-type]
    envs = make(scripts)
    skipped = 1 if isinstance(envs, GamesInTurn) else 0  # the reset that looks for masks
    scripts[0] = scripts[0][skipped:] + scripts[0][:skipped]
    played, turns = play(envs, 5, 60)
    episodes = [1] * N
    for turn in turns:
        for env in turn.over.tolist():
            episodes[env] += 1
    assert min(episodes) > 3
    whole = early = 0
    told: dict[int, list[float]] = {slot: [] for slot in played}
    for turn in turns:
        for env, returns in zip(turn.over.tolist(), turn.agent_returns, strict=True):
            for agent in np.flatnonzero(~np.isnan(returns)).tolist():
                told[env * len(AGENTS) + agent].append(returns[agent])
    for slot, mine in played.items():
        env, agent = divmod(slot, len(AGENTS))
        wanted = expected(scripts[env], AGENTS[agent], episodes[env])
        for got, want in zip(mine, wanted, strict=False):
            seen = np.asarray(got.seen)
            seen[:, 0] -= skipped if env == 0 else 0  # the number of the episode
            if got.terminated is None:  # the run ended before the agent did
                want.seen, want.rewards = want.seen[: len(seen)], want.rewards[: len(got.rewards)]
                want.terminated = None
            else:
                whole += 1
                early += len(seen) < 3
            assert seen.tolist() == want.seen
            np.testing.assert_allclose(got.rewards, want.rewards, rtol=1e-13, atol=1e-15)
            assert got.before == pytest.approx(want.before)
            assert got.terminated == want.terminated
        ended = [e.before + sum(e.rewards) for e in wanted if e.terminated is not None]
        np.testing.assert_allclose(told[slot], ended[: len(told[slot])], atol=1e-12)
        assert len(told[slot]) >= len(ended) - 1, "its environment's episode may go on"
        assert len(wanted) - 1 <= len(mine) <= len(wanted)
    assert whole > 20
    assert early > 0


@pytest.mark.parametrize("how", MAKERS)
def test_an_episodes_return_is_the_sum_over_all_agents(how: str) -> None:
    make, kind = MAKERS[how]
    scripts = [drawn(7 + i, kind) for i in range(N)]  # type: ignore[arg-type]
    envs = make(scripts)
    played = [int(i == 0 and isinstance(envs, GamesInTurn)) for i in range(N)]
    _, turns = play(envs, 5, 80)
    assert turns[0].began.tolist() == [0, 1, 2]
    for turn in turns[1:]:
        assert turn.began.tolist() == turn.over.tolist()
        for env, total, length in zip(turn.over, turn.env_returns, turn.env_lengths, strict=True):
            script = scripts[env][played[env] % len(scripts[env])]
            played[env] += 1
            assert length == len(script)
            assert total == pytest.approx(sum(sum(step.rewards.values()) for step in script))
    assert min(played) > 2


@pytest.mark.parametrize("how", MAKERS)
def test_a_reset_drops_the_episodes_that_were_running(how: str) -> None:
    make, kind = MAKERS[how]
    envs = make([drawn(i, kind) for i in range(N)])  # type: ignore[arg-type]
    play(envs, 1, 7)
    turn = envs.reset(1)
    (group,) = turn.groups
    assert group.first.all()
    assert not group.rewards.any()
    assert len(group.ended) == len(turn.over) == 0
    assert turn.began.tolist() == [0, 1, 2]


def test_every_episode_has_a_seed_that_follows_from_the_first() -> None:
    kind: Kind = "parallel"

    def seeds(seed: int) -> list[list[int | None]]:
        games = [ScriptedParallel(drawn(i, kind)) for i in range(N)]
        envs = GamesInTurn([ParallelGame(game, i) for i, game in enumerate(games)], "s")
        play(envs, seed, 40)
        return [game.seeds[1:] if game is games[0] else game.seeds for game in games]

    once, again, other = seeds(1), seeds(1), seeds(2)
    assert once == again
    drawn_seeds = [seed for of_game in [*once, *other] for seed in of_game]
    assert None not in drawn_seeds
    assert len(set(drawn_seeds)) == len(drawn_seeds) > 20


def test_closing_closes_every_game() -> None:
    games = [ScriptedTurns(drawn(i, "turns")) for i in range(N)]
    GamesInTurn([TurnBasedGame(game, i) for i, game in enumerate(games)], "s").close()
    assert all(game.closed for game in games)


class LateGreen(ParallelEnv):  # type: ignore[type-arg]
    """Four steps: red gets 1 each; green gets 5 before acting."""

    possible_agents = ("red", "green")

    def observation_space(self, agent: str) -> Space[Any]:
        return spaces.Box(0, 9, (3,))

    def action_space(self, agent: str) -> Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return {"red": np.zeros(3, np.float32)}, {"red": {}}

    def step(self, actions: dict[str, int]) -> Any:
        assert actions.keys() == ({"red"} if self.steps == 0 else {"red", "green"})
        self.steps += 1
        agents, over = self.agents, self.steps == 4
        if over:
            self.agents = []
        rewards = {"red": 1.0, "green": 5.0 if self.steps == 1 else 1.0}
        seen = {agent: np.full(3, self.steps, np.float32) for agent in agents}
        ends = dict.fromkeys(agents, over)
        return seen, rewards, ends, dict.fromkeys(agents, False), {agent: {} for agent in agents}


def test_a_modules_return_has_the_rewards_from_before_the_first_action() -> None:
    """As have the returns of agents and of environments."""
    envs = GamesInTurn([ParallelGame(LateGreen(), 0)], "late")
    sampler = sampler_of(envs, {"red": "a", "green": "b"}, steps=4, module=Halves)
    newest = {"a": Version(1, 0), "b": Version(1, 0)}
    played, later = (sampler.sample({"a", "b"}, newest) for _ in range(2))
    of_modules = {name: result.episode_returns for name, result in played.modules.items()}  # type: ignore[union-attr]
    assert of_modules == {"a": [4.0], "b": [8.0]}
    assert played.agent_returns == {("red", ""): [4.0], ("green", ""): [8.0]}
    assert played.env_returns == [12.0]
    batch = later.modules["b"].batch  # type: ignore[union-attr]
    assert batch is not None
    assert batch.rewards[batch.live].tolist() == [1, 1, 1, 1], "no action had it"


# Evaluations with several agents: whole episodes, every module deterministic.


PAIR = ("red", "green")
EACH = {agent: agent for agent in PAIR}


def modules_of(envs: ScriptedAgents, module: type = Remembering) -> list[ModuleSlots]:
    return list(sampler_of(envs, EACH, steps=4, module=module)._modules.values())


def random_envs(num_envs: int = 3) -> ScriptedAgents:
    return ScriptedAgents(num_envs, dict.fromkeys(PAIR, THREE), at_random(PAIR, 1))


def test_returns_are_sums_over_all_agents_of_each_environments_share() -> None:
    envs = ScriptedAgents(2, dict.fromkeys(PAIR, THREE), in_turn(PAIR, 4))
    returns, lengths, agent_returns = play_whole_episodes(envs, modules_of(envs), 5, seed=0)
    # Environment 0 plays three episodes of 4 steps, environment 1 two of 5.
    assert lengths == [4, 4, 4, 5, 5]
    assert returns == [3.0, 3.0, 3.0, 5.0, 5.0]
    # Green makes the last of 4 moves, red that of 5; its 0.25 before its first move count as well.
    red, green = agent_returns["red", "red"], agent_returns["green", "green"]
    assert red == [0.5, 0.5, 0.5, 3.5, 3.5], "in the order of the episodes"
    assert green == [2.5, 2.5, 2.5, 1.5, 1.5]


def test_every_agent_does_what_is_best_with_all_that_it_has_seen() -> None:
    envs = random_envs()
    play_whole_episodes(envs, modules_of(envs), 12, seed=0)
    checked = 0
    for episodes in envs.log.values():
        for episode in episodes:
            total = torch.full((3,), 0.5)
            for seen, action in zip(episode.observations, episode.actions, strict=False):
                total = 0.5 * total + torch.from_numpy(seen)
                assert action == int(torch.sin(total).argmax())
                checked += 1
    assert checked > 50


def test_an_episode_counts_as_it_is_at_most_steps() -> None:
    envs = ScriptedAgents(1, dict.fromkeys(PAIR, THREE), in_turn(PAIR, 7))
    modules = modules_of(envs)
    returns, lengths, of_agents = play_whole_episodes(envs, modules, 5, seed=0, most_steps=3)
    assert lengths == [3, 3, 1, 3, 3]
    whole, *_ = play_whole_episodes(envs, modules, 1, seed=0)
    # What green got before its first action counts, too.
    assert sum(returns[:3]) == whole[0]
    assert returns[3:] == returns[:2]
    each = [of_agents[agent, agent] for agent in PAIR]
    assert [sum(pair) for pair in zip(*each, strict=True)] == returns


# Every agent of CartPoles balances a pole as Gymnasium's CartPole does.


NAME = "juggler:CartPoles"
ENVS, CARTS = 3, 4


def actions_for(observations: np.ndarray) -> np.ndarray:
    """Balance poles that lean to the left, and let the others fall."""
    return (observations[..., 2] + 0.3 * observations[..., 3] > 0).astype(np.int64)


def test_each_agents_states_rewards_and_ends_are_those_of_cartpole() -> None:
    game = CartPoles(ENVS, CARTS, max_episode_steps=10_000)
    observations, acting = game.reset(3, np.ones(ENVS, bool))
    assert acting.all()
    single: dict[Any, CartPoleEnv] = {}
    for at in np.ndindex(ENVS, CARTS):
        single[at] = CartPoleEnv()
        single[at].reset()
        single[at].state = tuple(game._state[(slice(None), *at)])
    rng = np.random.default_rng(0)
    while single:
        skilled = rng.random((ENVS, CARTS)) < 0.3
        actions = np.where(skilled, actions_for(observations), rng.integers(2, size=(ENVS, CARTS)))
        before = acting.copy()
        observations, rewards, terminated, truncated, acting, _ = game.step(actions)
        assert not truncated.any()
        np.testing.assert_array_equal(rewards, before)
        for at in [*single]:
            seen, reward, ends, _, _ = single[at].step(int(actions[at]))  # type: ignore[no-untyped-call]
            np.testing.assert_allclose(observations[at], seen, rtol=1e-6, atol=1e-9)
            assert (rewards[at], terminated[at]) == (reward, ends)
            assert acting[at] == (not ends)
            if ends:
                del single[at]
        there = [at in single for at in np.ndindex(ENVS, CARTS)]
        assert acting.ravel().tolist() == there


def test_agents_that_still_balance_are_truncated_together() -> None:
    limit = gymnasium.spec("CartPole-v1").max_episode_steps
    assert limit == 500
    game = CartPoles(1, 2)
    observations, acting = game.reset(0, np.ones(1, bool))
    for step in range(1, limit + 1):
        actions = actions_for(observations)
        actions[0, 1] = 0  # the second agent lets its pole fall
        observations, _, terminated, truncated, acting, _ = game.step(actions)
        assert truncated[0].tolist() == [step == limit, False]
        assert not terminated[0, 0]
    assert not acting.any()


def test_a_reset_of_some_environments_leaves_the_others_as_they_are() -> None:
    game = CartPoles(ENVS, CARTS)
    game.reset(3, np.ones(ENVS, bool))
    step = game.step(np.zeros((ENVS, CARTS), np.int64))
    before = np.array(step.observations)
    observations, acting = game.reset(None, np.array([False, True, False]))
    np.testing.assert_array_equal(observations[[0, 2]], before[[0, 2]])
    assert (observations[1] != before[1]).all()
    assert acting.all()


def test_it_is_made_by_name_with_the_number_of_agents() -> None:
    config = EnvRunnerConfig(env=NAME, envs_per_runner=5, env_kwargs={"num_agents": 2})
    envs = make_multi_agent_envs(config)
    assert envs.num_envs == 5
    assert envs.agents == ("cart_0", "cart_1")
    (group,) = envs.groups
    assert group.observation_space == CartPoleEnv().observation_space
    (first,) = envs.reset(0).groups
    assert group.observation_space.contains(np.asarray(first.observations)[0])
    assert first.acting.tolist() == list(range(10))


# Steps without an end are booked later, with equal results.


BOOKS, BOTH = 3, ("a", "b")
SLOTS = BOOKS * len(BOTH)
NOBODY = np.zeros(0, np.intp)


def test_a_reward_after_its_end_is_forbidden_in_a_quiet_step_too() -> None:
    books, acting = SlotBooks(BOOKS, BOTH), np.arange(SLOTS)
    books.reset(acting)
    books.step(np.ones(SLOTS), np.array([3]), NOBODY, NOBODY, np.delete(acting, 3))
    books.step_without_ends(np.where(acting == 3, 0.0, 1.0))
    with pytest.raises(BrokenRule, match="agent 'b' got a reward after its"):
        books.step_without_ends(np.ones(SLOTS))
