"""Games by class and by name: how they are recognized and made."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from pettingzoo.utils import conversions
from support.scripted_games import ScriptedParallel, ScriptedTurns, ScriptedVector, drawn

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.matrix_game import MatrixGame
from juggler.envrunner.multi_agent.openspiel import OpenSpielGame
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.runtime.install_commands import installing

CARTPOLES = "juggler:CartPoles"


class Mine(ScriptedParallel):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(drawn(seed, "parallel"))


class Wrapping:
    """A wrapper of PettingZoo's interface, which doubles rewards."""

    def __init__(self, env: Any, factor: float = 2.0) -> None:
        self.env, self.factor = env, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, actions: Any) -> Any:
        seen, rewards, *rest = self.env.step(actions)
        return seen, {agent: self.factor * each for agent, each in rewards.items()}, *rest


def a_function() -> Mine:
    return Mine()


def of_unknown() -> NoSuchClass:  # type: ignore[name-defined]  # noqa: F821
    return Mine()


@pytest.mark.parametrize(
    ("factory", "several"),
    [
        (ScriptedParallel, True),
        (ScriptedTurns, True),
        (ScriptedVector, True),
        (functools.partial(Mine, 3), True),
        (a_function, True),
        (of_unknown, False),
        (lambda: Mine(), False),
        (CartPoleEnv, False),
        (CartPoleVectorEnv, False),
        (gymnasium.Wrapper, False),
        (gymnasium.vector.VectorWrapper, False),
    ],
)
def test_several_agents_are_known_by_the_class(factory: Any, several: bool) -> None:
    assert has_several_agents(EnvRunnerConfig(), factory) == several


def test_a_function_that_hides_several_agents_is_told_how_to_show_them() -> None:
    with pytest.raises(ValueError, match="for several agents, write the class"):
        make_vector_env(EnvRunnerConfig(env="mine"), of_unknown)


class Listed:
    """A game with lists and dicts, instead of PettingZoo's methods."""

    agents = ("ann", "bob")
    observation_spaces = action_spaces = dict.fromkeys(agents, gymnasium.spaces.Discrete(2))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return dict.fromkeys(self.agents, 0), {}

    def step(self, actions: Any) -> Any:
        raise NotImplementedError


def test_a_game_without_possible_agents_from_a_function_is_told_how_to_show_them() -> None:
    class Bare(Listed):
        def observation_space(self, agent: str) -> Any:
            return self.observation_spaces[agent]

        action_space = observation_space

    with pytest.raises(ValueError, match="for several agents, write the class"):
        make_vector_env(EnvRunnerConfig(env="mine"), lambda: Bare())
    with pytest.raises(ValueError, match="Bare must have possible_agents"):
        make_multi_agent_envs(EnvRunnerConfig(env="mine"), lambda: Bare())


def test_a_game_that_lacks_methods_is_told_which() -> None:
    lacks = "lacks PettingZoo's methods observation_space and action_space$"
    with pytest.raises(ValueError, match=lacks):
        make_vector_env(EnvRunnerConfig(env="mine"), Listed)


def test_a_class_of_several_agents_in_a_run_that_knows_of_one_is_told_to_name_them() -> None:
    with pytest.raises(ValueError, match="name its agents in the run's table agents"):
        make_vector_env(EnvRunnerConfig(env="mine"), Mine)


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("pettingzoo:classic/connect_four_v3", True),
        (CARTPOLES, True),
        ("CartPole-v1", False),
        ("juggler.envrunner.memory_cartpole:MemoryCartPole-v0", False),
        ("gymnasium.envs.classic_control:CartPoleEnv", False),
        ("dm_env_rpc://localhost:1", False),
    ],
)
def test_several_agents_are_known_by_the_name(name: str, several: bool) -> None:
    assert has_several_agents(EnvRunnerConfig(env=name)) == several


def test_wrappers_of_pettingzoos_interface_wrap_every_environment() -> None:
    wrapper = {"use": f"{Wrapping.__module__}:Wrapping", "factor": 0.0}
    config = EnvRunnerConfig(env="mine", envs_per_runner=2, env_wrappers=[wrapper])
    sys.modules.setdefault(Wrapping.__module__, sys.modules[__name__])
    envs = make_multi_agent_envs(config, Mine)
    turn = envs.reset(0)
    for _ in range(10):
        (group,) = turn.groups
        assert not group.rewards.any()
        assert not group.last_rewards.any()
        turn = envs.step([np.asarray(group.observations) @ [100, 10, 1]])


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (Mine, {"vectorize": "async"}, "stepped in the"),
        (Mine, {"vectorize": "native"}, "use auto or sync"),
        (None, {"vectorize": "sync", "env": CARTPOLES}, "use auto or native"),
        (Mine, {"env_wrappers": ["TimeLimit"]}, "TimeLimit is for environments"),
        (None, {"env": CARTPOLES, "env_wrappers": ["my:Own"]}, "env_wrappers wrap single"),
        (None, {"env": CARTPOLES, "env_kwargs": {"num_envs": 3}}, "set envs_per_runner instead"),
        (lambda: object(), {}, "must make an environment with"),
    ],
)
def test_options_that_mean_nothing_for_several_agents_are_refused(
    factory: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_multi_agent_envs(EnvRunnerConfig(**options), factory)


def test_without_pettingzoo_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ValueError, match="needs the package pettingzoo") as wrong:
        make_multi_agent_envs(EnvRunnerConfig(env="pettingzoo:classic/rps_v2"))
    assert installing("pettingzoo") in str(wrong.value)


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("classic/leduc_holdem_v4", "rlcard", "pip install 'pettingzoo[classic]'"),
        ("mpe2/simple_spread_v3", "mpe2", "pip install mpe2"),
    ],
)
def test_a_package_that_one_game_needs_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, command: str
) -> None:
    for each in [*sys.modules]:
        if each.startswith(("pettingzoo.classic", "rlcard", "mpe2")):
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"needs the package {module}") as wrong:
        make_multi_agent_envs(EnvRunnerConfig(env=f"pettingzoo:{name}"))
    assert command in str(wrong.value)


class Masked(ScriptedParallel):
    """Its infos have masks of three actions."""

    last = False
    given: Any = (0, 1, 1)

    def __init__(self) -> None:
        super().__init__(drawn(1, "parallel"))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.array(self.given)} for agent in self.agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed)[0], self.infos()

    def step(self, actions: dict[str, Any]) -> Any:
        step = self._play()
        done = step.terminated | step.truncated
        before, self.agents = self.agents, [a for a in self.agents if a not in done]
        self.agents += self._newcomers()
        seen = {agent: self._see(agent) for agent in {*before, *self.agents}}
        ends = [
            {agent: agent in which for agent in seen} for which in (step.terminated, step.truncated)
        ]
        return seen, step.rewards, *ends, self.infos()


def test_masks_in_infos_become_part_of_the_observations() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=2), lambda: Masked())
    (group,) = envs.groups
    assert isinstance(group.observation_space, spaces.Dict)
    assert list(group.observation_space.spaces) == ["action_mask", "observation"]
    assert group.observation_space["action_mask"] == spaces.MultiBinary(3)
    turn, ends = envs.reset(0), 0
    for _ in range(20):
        (now,) = turn.groups
        seen, last = now.observations, now.last_observations
        assert isinstance(seen, dict)
        assert isinstance(last, dict)
        assert seen["action_mask"].tolist() == [[0, 1, 1]] * len(now.acting)
        assert last["action_mask"].tolist() == [[1, 1, 1]] * len(now.ended)
        assert seen["observation"].shape == (len(now.acting), 3)
        ends += len(now.ended)
        turn = envs.step([np.ones(len(now.acting), np.int64)])
    assert ends > 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "had an action mask before, and"),
        ((0, 1), "the action mask in its info does not fit"),
        ((0, 2, 1), "other numbers than 0 and 1"),
    ],
)
def test_masks_in_infos_are_checked(given: Any, said: str) -> None:
    games: list[Masked] = []

    def make() -> Masked:
        games.append(Masked())
        return games[-1]

    envs = make_multi_agent_envs(EnvRunnerConfig(env="mine", envs_per_runner=2), make)
    envs.reset(0)
    games[1].given = given
    if given is None:
        games[1].infos = lambda: {}  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFailed, match=said) as failed:
        envs.reset(0)
    assert str(failed.value).startswith("environment 1 ")


# Games of PettingZoo, by their names, keep its rules as turns.


Choose = Callable[[AgentGroup, GroupTurn], Any]


def legal(rng: np.random.Generator) -> Choose:
    """Choose legal actions at random."""

    def choose(group: AgentGroup, turn: GroupTurn) -> Any:
        assert isinstance(group.action_space, spaces.Discrete)
        masks = np.ones((len(turn.acting), int(group.action_space.n)))
        if isinstance(turn.observations, dict) and "action_mask" in turn.observations:
            masks = turn.observations["action_mask"]
            assert masks.any(-1).all(), "an agent on turn has no legal action"
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


# Games of OpenSpiel and games of one choice, as environments.


def _played(game: OpenSpielGame, seed: int, moves: list[int]) -> dict[str, list[float]]:
    """By agent, the results of `last` before each move."""
    told: dict[str, list[float]] = {agent: [] for agent in game.possible_agents}
    game.reset(seed=seed)
    left = list(moves)
    while game.agents:
        agent = game.agent_selection
        seen, reward, terminated, truncated, _ = game.last()
        assert seen is not None
        assert game.observation_space(agent).contains(seen)
        assert not truncated
        told[agent].append(reward)
        game.step(None if terminated else left.pop(0))
    assert not left
    return told


def test_each_player_of_kuhn_poker_gets_what_the_cards_decide() -> None:
    game = OpenSpielGame("kuhn_poker")
    for seed in range(20):
        told = _played(game, seed, [1, 1])  # bet, call
        cards = game._state.history()[:2]
        won = 2.0 if cards[0] > cards[1] else -2.0
        assert told == {"player_0": [0.0, won], "player_1": [0.0, -won]}
    assert _played(game, 0, [0, 1, 0]) == {"player_0": [0.0, 0.0, -1.0], "player_1": [0.0, 1.0]}


def test_cards_are_dealt_by_the_seed_and_all_deals_come() -> None:
    game = OpenSpielGame("kuhn_poker")

    def deal(seed: int | None) -> tuple[int, ...]:
        game.reset(seed=seed)
        return tuple(game._state.history())

    assert deal(3) == deal(3)
    deal(0)
    assert len({deal(None) for _ in range(200)}) == 6


def test_a_mask_allows_what_openspiel_calls_legal() -> None:
    game = OpenSpielGame("connect_four")
    game.reset(seed=0)
    for _ in range(6):
        assert game.observe(game.agent_selection)["action_mask"][2] == 1
        game.step(2)
    seen = game.observe(game.agent_selection)
    assert seen["action_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1]
    other = next(agent for agent in game.agents if agent != game.agent_selection)
    assert not game.observe(other)["action_mask"].any()
    with pytest.raises(ValueError, match="moves 2, and may move"):
        game.step(2)


def test_moves_that_are_simultaneous_are_hidden_from_the_other_player() -> None:
    game = OpenSpielGame("matrix_rps")
    shown = []
    for move in range(3):
        game.reset(seed=0)
        game.step(move)
        assert game.agent_selection == "player_1"
        shown.append(game.observe("player_1")["observation"])
    assert np.array_equal(shown[0], shown[1])
    assert np.array_equal(shown[1], shown[2])
    assert _played(game, 0, [0, 1]) == {"player_0": [0.0, -1.0], "player_1": [0.0, 1.0]}


def test_a_game_that_draws_its_own_chance_is_dealt_by_the_seed() -> None:
    def deals(seeds: range) -> set[bytes]:
        found = set()
        for game, seed in zip(games, seeds, strict=True):
            game.reset(seed=seed)
            seen, *_ = game.last()
            assert seen is not None
            found.add(seen["observation"].tobytes())
        return found

    games = [OpenSpielGame("negotiation") for _ in range(8)]
    first = deals(range(8))
    assert len(first) > 6
    assert deals(range(100, 108)) != first
    assert deals(range(8)) == first, "the same seeds, once more"
    games = [OpenSpielGame("negotiation", rng_seed=1) for _ in range(8)]
    assert len(deals(range(8))) == 1, "a seed in the parameters counts"


def test_a_mean_field_game_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="'mfg_crowd_modelling' is a mean-field game"):
        OpenSpielGame("mfg_crowd_modelling")


def test_a_game_that_openspiel_lacks_is_told() -> None:
    with pytest.raises(ValueError, match="OpenSpiel cannot load the game"):
        OpenSpielGame("kuhn_pocker")


def test_a_matrix_game_pays_by_its_table() -> None:
    game = MatrixGame([[3, -2], [-2, 1]])
    for row in range(2):
        for column in range(2):
            shown, _ = game.reset(seed=0)
            assert game.observation_space("row").contains(shown["row"])
            _, rewards, terminated, truncated, _ = game.step({"row": row, "column": column})
            assert rewards["row"] == [[3, -2], [-2, 1]][row][column] == -rewards["column"]
            assert terminated == {"row": True, "column": True}
            assert not any(truncated.values())
            assert game.agents == []


def test_tables_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="matrices of one shape"):
        MatrixGame([[1, 2]], [[1], [2]])
