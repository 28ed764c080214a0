"""Games give each agent exactly its own steps, with any interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from pettingzoo import ParallelEnv
from support.scripted_agents import Halves, sampler_of
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

from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
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
