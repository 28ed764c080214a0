"""Games of PettingZoo, by their names, keep its rules as turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpe2.simple_speaker_listener_v4
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from pettingzoo.utils import conversions
from support.scripted_games import ScriptedParallel, drawn

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.games import ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.games_in_turn import GamesInTurn
from juggler.envrunner.multi_agent.making import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn

Choose = Callable[[AgentGroup, GroupTurn], Any]


def legal(rng: np.random.Generator) -> Choose:
    """Choose legal actions at random."""

    def choose(group: AgentGroup, turn: GroupTurn) -> Any:
        assert isinstance(group.action_space, spaces.Discrete)
        masks = np.ones((len(turn.acting), int(group.action_space.n)))
        if isinstance(turn.observations, dict) and "action_mask" in turn.observations:
            masks = turn.observations["action_mask"]
            assert masks.any(-1).all(), "somebody is on turn who has no legal action"
        return (rng.random(masks.shape) * masks).argmax(-1)

    return choose


def play(envs: MultiAgentEnvs, choose: Choose, steps: int, seed: int = 1) -> list[Turn]:
    turns = [envs.reset(seed)]
    for _ in range(steps):
        groups = zip(envs.groups, turns[-1].groups, strict=True)
        turns.append(envs.step([choose(group, turn) for group, turn in groups]))
    return turns


def made(name: str, num_envs: int = 2, **env_kwargs: Any) -> MultiAgentEnvs:
    return make_multi_agent_envs(
        EnvRunnerConfig(env=name, envs_per_runner=num_envs, env_kwargs=env_kwargs)
    )


@pytest.mark.parametrize("version", ["_v3", "-v3"])
def test_connect_four_gives_the_winner_1_and_the_loser_minus_1(version: str) -> None:
    envs = made(f"pettingzoo:classic/connect_four{version}", 1)
    (group,) = envs.groups
    assert group.agents == ("player_0", "player_1")

    def columns(group: AgentGroup, turn: GroupTurn) -> Any:
        return turn.acting % 2  # each player fills a column of its own, so that the first wins

    turns = play(envs, columns, 14)
    for turn in turns[:7] + turns[8:14]:
        (now,) = turn.groups
        assert len(now.acting) == 1
        assert len(now.ended) == 0
        assert now.rewards.tolist() == [0]
    for turn in (turns[7], turns[14]):
        (now,) = turn.groups
        assert now.ended.tolist() == [0, 1]
        assert now.last_rewards.tolist() == [1, -1]
        assert now.terminated.tolist() == [True, True]
        assert turn.env_lengths.tolist() == [7]
        assert turn.env_returns.tolist() == [0]
        assert (now.acting.tolist(), now.first.tolist()) == ([0], [True])
    firsts = [turn.groups[0].first.tolist() for turn in turns]
    assert firsts[:7] == [[True], [True]] + [[False]] * 5


def test_an_illegal_move_terminates_the_game_for_all() -> None:
    envs = made("pettingzoo:classic/tictactoe_v3", 1)
    turns = play(envs, lambda group, turn: np.zeros(len(turn.acting), np.int64), 2)
    (now,) = turns[2].groups
    assert now.ended.tolist() == [0, 1]
    assert now.terminated.tolist() == [True, True]
    assert now.last_rewards.tolist() == [0, -1]
    assert turns[2].over.tolist() == [0]


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("classic/connect_four_v3", {}, ""),
        ("classic/tictactoe_v3", {}, ""),
        ("classic/rps_v2", {"max_cycles": 5}, ""),
        ("mpe2/simple_spread_v3", {"max_cycles": 10}, ""),
        ("mpe2/simple_speaker_listener_v4", {"max_cycles": 10}, ""),
        ("butterfly/knights_archers_zombies_v11", {"max_cycles": 150}, ""),
        ("butterfly/pistonball_v6", {"max_cycles": 20, "continuous": False}, "pymunk"),
        ("classic/leduc_holdem_v4", {}, "rlcard"),
        ("classic/hanabi_v5", {}, "shimmy"),
    ],
)
def test_agents_act_end_and_begin_again_in_order(
    name: str, options: dict[str, Any], needs: str
) -> None:
    if needs:
        pytest.importorskip(needs)
    envs = made(f"pettingzoo:{name}", 2, **options)
    turns = play(envs, legal(np.random.default_rng(0)), 320)
    running: set[int] = set()
    returns = np.zeros(2)
    overs = 0
    for turn in turns:
        for group, now in zip(envs.groups, turn.groups, strict=True):
            ended = set(now.ended.tolist())
            assert ended <= running
            running -= ended
            np.add.at(returns, now.ended // len(envs.agents), now.last_rewards)
            np.add.at(returns, now.acting // len(envs.agents), now.rewards)
            for slot, first in zip(now.acting.tolist(), now.first.tolist(), strict=True):
                assert first == (slot not in running)
                assert envs.agents[slot % len(envs.agents)] in group.agents
            running |= set(now.acting.tolist())
        if not len(turn.over):
            continue
        overs += len(turn.over)
        if "leduc" not in name and "hanabi" not in name:  # which pay players before they act
            np.testing.assert_allclose(turn.env_returns, returns[turn.over], atol=1e-9)
        returns[turn.over] = 0
    assert overs >= 2
    envs.close()


@pytest.mark.parametrize("name", ["classic/connect_four_v3", "mpe2/simple_spread_v3"])
def test_the_same_seed_gives_the_same_episodes(name: str) -> None:
    def seen(seed: int) -> list[Any]:
        turns = play(made(f"pettingzoo:{name}"), legal(np.random.default_rng(3)), 80, seed)
        return [turn.groups[0].last_rewards.tolist() for turn in turns]

    assert seen(1) == seen(1)
    if name.startswith("mpe2"):
        assert seen(1) != seen(2)


def test_parallel_and_aec_give_the_same_episodes_of_the_same_game() -> None:
    module = mpe2.simple_speaker_listener_v4
    options = {"max_cycles": 8, "continuous_actions": False}
    parallel = GamesInTurn([ParallelGame(module.parallel_env(**options), 0)], "parallel")
    in_turn = GamesInTurn([TurnBasedGame(module.env(**options), 0)], "AEC")

    def choose(group: AgentGroup, turn: GroupTurn) -> Any:
        assert isinstance(group.action_space, spaces.Discrete)
        total = np.abs(np.asarray(turn.observations, np.float64)).sum(-1)
        return (total * 1e3).astype(np.int64) % int(group.action_space.n)

    def of_agents(turns: list[Turn], count: int) -> list[list[Any]]:
        found: list[list[Any]] = [[], []]
        for turn in turns:
            for group in turn.groups:
                for slot, reward in zip(group.ended.tolist(), group.last_rewards, strict=True):
                    found[slot].append(float(reward))
                rows = zip(group.acting.tolist(), group.rewards, group.first, strict=True)
                for slot, reward, first in rows:
                    found[slot].append("first" if first else float(reward))
        return [each[:count] for each in found]

    together = of_agents(play(parallel, choose, 40), 40)
    apart = of_agents(play(in_turn, choose, 80), 40)
    assert "first" in together[0][1:]
    for mine, theirs in zip(together, apart, strict=True):
        assert [each == "first" for each in mine] == [each == "first" for each in theirs]
        numbers = [[0.0 if each == "first" else each for each in found] for found in (mine, theirs)]
        np.testing.assert_allclose(*numbers, rtol=1e-9)


def test_agents_with_other_spaces_are_in_other_groups() -> None:
    envs = made("pettingzoo:mpe2/simple_speaker_listener_v4")
    speaker, listener = envs.groups
    assert speaker.agents == ("speaker_0",)
    assert listener.agents == ("listener_0",)
    assert speaker.observation_space != listener.observation_space
    turn = envs.reset(0)
    assert [group.acting.tolist() for group in turn.groups] == [[0, 2], [1, 3]]


def converted(**options: Any) -> pettingzoo.ParallelEnv[Any, Any, Any]:
    aec: Any = pettingzoo.make("aec", "classic/tictactoe-v3", **options)
    return conversions.turn_based_aec_to_parallel(aec)


def test_a_turn_based_game_that_was_converted_to_parallel_is_played_in_turns() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=2), converted)
    turns = play(envs, legal(np.random.default_rng(0)), 40)
    assert all(len(turn.groups[0].acting) == 2 for turn in turns)
    assert sum(len(turn.over) for turn in turns) > 4


def test_a_parallel_game_that_was_converted_to_aec_is_played_at_once() -> None:
    game: Any = ScriptedParallel(drawn(0, "parallel"))
    game.metadata, game.render_mode = {}, None
    env: Any = conversions.parallel_to_aec(game)
    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=1), lambda: env)
    (group,) = envs.reset(0).groups
    assert len(group.acting) == len(game.agents) > 1


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("classic/conect_four_v3", "pettingzoo:classic/connect_four-v3"),
        ("classic/connect_four_v2", "pettingzoo:classic/connect_four-v3"),
        ("connect_four_v3", "pettingzoo:classic/connect_four-v3"),
        ("mpe/simple_spread_v3", "pettingzoo:mpe2/simple_spread-v3"),
        ("mpe2/simple_spread", "pettingzoo:mpe2/simple_spread-v3"),
        ("", "pettingzoo:classic/chess-v6"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_ones(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match="PettingZoo has no such environment") as wrong:
        made(f"pettingzoo:{name}")
    assert nearest in str(wrong.value)
