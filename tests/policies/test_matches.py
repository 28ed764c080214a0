"""Matches between given players."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from support import worlds

import juggler
from juggler.cli import main
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.play_checkpoint import PlayedMatches
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.multi_agent.line_up import Role
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.policies.matches import MatchRecord, PlayedMatch, play_matches, records
from juggler.runtime.acting.actor import Actor, RandomActions
from juggler.runtime.checkpoints.checkpoint import read, write
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.structures import first_leaf

BOX, MOVES = Box(0, 1, (1,), np.float32), Discrete(2)
MATRIX = "juggler.envrunner.multi_agent.matrix_game:MatrixGame"


class Always(RLModule):
    """Always chooses the same action."""

    action = 0

    def _forward(self, batch: Any) -> dict[str, Any]:
        return {"actions": torch.full((len(first_leaf(batch["observations"])),), self.action)}


def always(envs: MultiAgentEnvs, actions: Mapping[str, int]) -> list[ModuleSlots]:
    """A player for each agent, which always chooses the same action."""
    made = []
    for agent, action in actions.items():
        ((number, group),) = [(k, g) for k, g in enumerate(envs.groups) if agent in g.agents]
        module = Always(group.observation_space, group.action_space, {})
        module.action = action
        role = Role(agent, (agent,), number, group)
        made.append(ModuleSlots(role, envs.num_envs, envs.agents, Actor(module), 1, 0))
    return made


def _envs(env: str, **kwargs: Any) -> MultiAgentEnvs:
    return make_multi_agent_envs(EnvRunnerConfig(env=env, envs_per_runner=3, env_kwargs=kwargs))


def test_matches_end_as_the_table_of_the_game_says() -> None:
    envs = _envs(MATRIX)
    matches = play_matches(envs, always(envs, {"row": 1, "column": 0}), 5, seed=0)
    assert matches == [PlayedMatch({"row": 1.0, "column": -1.0}, {"row": 1, "column": 1})] * 5
    assert records(matches)["row"] == MatchRecord(1.0, 0.0, 5, 0, 0)
    assert records(matches)["column"] == MatchRecord(-1.0, 0.0, 0, 0, 5)


def test_a_player_in_a_game_of_turns_gets_what_the_cards_decide() -> None:
    envs = _envs("open_spiel:kuhn_poker")
    bets = always(envs, dict.fromkeys(envs.agents, 1))
    matches = play_matches(envs, bets, 400, seed=1)
    assert {tuple(match.returns.values()) for match in matches} == {(2.0, -2.0), (-2.0, 2.0)}
    assert {tuple(match.steps.values()) for match in matches} == {(1, 1)}
    won = records(matches)["player_0"]
    assert won.draws == 0
    assert abs(won.score - 0.5) < 0.08, "either card is the higher one equally often"


def test_random_play_of_connect_four_is_legal_and_the_first_player_wins_more() -> None:
    envs = _envs("open_spiel:connect_four")
    players = [
        ModuleSlots.at_random(
            Role("random", (agent,), 0, envs.groups[0]), envs.num_envs, envs.agents, 1, seed
        )
        for seed, agent in enumerate(envs.agents)
    ]
    matches = play_matches(envs, players, 300, seed=0)
    first = records(matches)["player_0"]
    # 55.6 % wins, 0.3 % draws and 44.1 % losses are known for random play.
    assert 0.47 < first.score < 0.64
    low, high = first.interval()
    assert low < first.score < high < low + 0.13
    assert all(abs(sum(match.returns.values())) == 0 for match in matches)


def test_random_actions_follow_masks_of_several_parts_and_leave_the_space_alone() -> None:
    space = MultiDiscrete([3, 2], seed=7)
    expected = MultiDiscrete([3, 2], seed=7).sample()
    masks = np.tile(np.array([1, 0, 1, 1, 1], np.int8), (200, 1))  # [200, 3 + 2]
    seen = {"observation": np.zeros((200, 1)), "action_mask": masks}
    drawn = RandomActions(space, seed=1).draw(200, seen)  # [200, 2]
    found = {tuple(row) for row in np.asarray(drawn).tolist()}
    assert found == {(0, 0), (0, 1), (2, 0), (2, 1)}
    np.testing.assert_array_equal(space.sample(), expected)


def test_played_matches_are_shown_with_a_line_for_each_agent() -> None:
    played = [PlayedMatch({"row": 1.0, "column": -1.0}, {})] * 3 + [
        PlayedMatch({"row": 0, "column": 0}, {})
    ]
    players = {"row": "main", "column": "random"}
    shown = PlayedMatches(Path("run/1"), players, played, records(played), [])
    assert str(shown) == repr(shown)
    assert str(shown).splitlines() == [
        "checkpoint: run/1",
        "column (random): return -0.75 (standard error 0.25); 0 won, 1 drawn, 3 lost: "
        "score 0.12 (95 %: 0.01 to 0.60)",
        "row (main): return 0.75 (standard error 0.25); 3 won, 1 drawn, 0 lost: "
        "score 0.88 (95 %: 0.40 to 0.99)",
    ]


class Gift:
    """Two players move once each; player two gets 2, then 1 back."""

    possible_agents = ("p0", "p1")

    def observation_space(self, agent: str) -> Box:
        return BOX

    def action_space(self, agent: str) -> Discrete:
        return MOVES

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection = ["p0", "p1"], "p0"
        self.sums, self.over = {"p0": 0.0, "p1": 0.0}, False

    def last(self) -> Any:
        return np.zeros(1, np.float32), self.sums[self.agent_selection], self.over, False, {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if action is None:
            self.agents.remove(agent)
        elif agent == "p0":
            self.sums["p0"], self.sums["p1"] = 0.0, 2.0
        else:
            self.sums["p1"], self.sums["p0"], self.over = 0.0, self.sums["p0"] + 1.0, True
        self.agent_selection = next((each for each in self.agents if each != agent), agent)


def test_rewards_before_an_agents_first_action_count_in_its_matches() -> None:
    envs = make_multi_agent_envs(EnvRunnerConfig(envs_per_runner=2), Gift)
    matches = play_matches(envs, always(envs, {"p0": 0, "p1": 0}), 4, seed=0)
    assert matches == [PlayedMatch({"p0": 1.0, "p1": 2.0}, {"p0": 1, "p1": 1})] * 4
    assert records(matches)["p1"].wins == 4


def test_members_of_a_team_win_together() -> None:
    def results(returns: dict[str, float], **rule: Any) -> dict[str, tuple[int, int, int]]:
        found = records([PlayedMatch(returns, dict.fromkeys(returns, 1))], **rule)
        return {agent: (each.wins, each.draws, each.losses) for agent, each in found.items()}

    won, drawn, lost = (1, 0, 0), (0, 1, 0), (0, 0, 1)
    shared = {"a": 1.0, "b": 1.0, "c": -1.0, "d": -1.0}
    expected = {"a": won, "b": won, "c": lost, "d": lost}
    assert results(shared) == expected
    teams = [["a", "b"], ["c", "d"]]
    assert results(shared, teams=teams) == expected
    assert results({"a": 3.0, "b": -2.0, "c": 0.0, "d": 0.0}, teams=teams) == expected
    assert results({"a": 2.0, "c": 1.0, "d": 1.0}, teams=teams) == dict.fromkeys("acd", drawn)
    assert results({"a": 2.0, "c": 1.0}, margin=1.0) == dict.fromkeys("ac", drawn)


# Matches between policies that a script has loaded: what they draw, and by which seed.


AGENTS = ("row", "column")


def hand() -> worlds.World:
    """Has the spaces of rock, paper, scissors."""
    return worlds.World(Box(0, 1, (1,), np.float32), Discrete(3))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run of rock, paper, scissors."""
    saved = read(worlds.written(tmp_path / "alone", f"{__name__}:hand"))
    keys = {"env": "juggler:MatrixGame", "agents": dict.fromkeys(AGENTS, "default")}
    config = RunConfig.from_flat({**saved.config, **keys}).flat()
    modules = {"default": {"version": (1, 1), "extra": {}, "spaces": saved.spaces}}
    both = replace(saved, config=config, modules=modules, spaces={})
    return write(tmp_path / "both" / "checkpoints", both)


def loaded(checkpoint: Path) -> dict[str, str | juggler.Policy]:
    """A policy for each agent, from the same checkpoint."""
    return {agent: juggler.load_policy(checkpoint) for agent in AGENTS}


def results(
    checkpoint: Path, players: Mapping[str, str | juggler.Policy], seed: int = 0
) -> list[float]:
    """What "row" gets in each match; all three results are possible."""
    played = juggler.play_matches(checkpoint, players, 40, seed, explore=True)
    return [match.returns["row"] for match in played.matches]


def test_what_is_no_player_is_told_with_what_is_one(checkpoint: Path) -> None:
    players: dict[str, Any] = {"row": 3, "column": "random"}
    with pytest.raises(ConfigError, match="player"):
        juggler.play_matches(checkpoint, players, 1)


def test_the_seed_decides_how_given_policies_play_and_what_they_drew_before_does_not(
    checkpoint: Path,
) -> None:
    players = loaded(checkpoint)
    played = results(checkpoint, players, seed=3)
    assert set(played) == {-1.0, 0.0, 1.0}, "each draws its own actions"
    assert results(checkpoint, players, seed=3) == played
    assert results(checkpoint, loaded(checkpoint), seed=3) == played
    assert results(checkpoint, loaded(checkpoint), seed=4) != played


def test_policies_play_as_the_modules_do_that_they_were_loaded_from(checkpoint: Path) -> None:
    given = {"row": loaded(checkpoint)["row"], "column": "random"}
    named = {"row": "default", "column": "random"}
    assert results(checkpoint, given) == results(checkpoint, named)


def test_the_rule_of_a_runs_league_decides_who_wins(checkpoint: Path) -> None:
    saved = read(checkpoint)
    league = {"builder": "none", "draw_margin": 2.0}
    write(checkpoint.parent, replace(saved, config={**saved.config, "league": league}))
    players = {"row": "random", "column": "random"}
    played = juggler.play_matches(checkpoint, players, 20)
    assert {match.returns["row"] for match in played.matches} > {0.0}
    assert played.records["row"].draws == 20


# Videos of episodes with several agents.


PLAIN = worlds.plain()
PAIR = ["ann", "bob"]
LENGTH = 6


class Shown:
    """Both act for 6 steps; later images are brighter."""

    metadata: ClassVar[dict[str, Any]] = {"render_fps": 10}
    possible_agents = PAIR

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.draws = render_mode, np.random.default_rng(0)

    def observation_space(self, agent: str) -> Any:
        return PLAIN.observation_space

    def action_space(self, agent: str) -> Any:
        return PLAIN.action_space

    def seen(self) -> dict[str, Any]:
        return {agent: self.draws.normal(size=(4,)).astype(np.float32) for agent in PAIR}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(PAIR), 0
        self.draws = np.random.default_rng(seed)
        return self.seen(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        over = self.at == LENGTH
        self.agents = [] if over else self.agents
        rewards = {agent: float(self.draws.integers(9)) for agent in PAIR}
        no = dict.fromkeys(PAIR, False)
        return self.seen(), rewards, dict.fromkeys(PAIR, over), no, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        return np.full((32, 48, 3), 40 * self.at, np.uint8)


class Paid(Shown):
    """Rewards are the actions themselves."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, _, *rest = super().step(actions)
        return seen, {agent: float(action) for agent, action in actions.items()}, *rest


def test_policies_that_remember_and_see_their_rewards_play_matches_as_evaluations(
    tmp_path: Path,
) -> None:
    keys = {
        "env": f"{__name__}:Paid",
        "agents": dict.fromkeys(PAIR, "default"),
        "envs_per_runner": 1,
    }
    own = {
        "model": {"recurrent": "lstm", "hidden_sizes": [8]},
        "connectors": {"env_to_module": ["previous_actions_and_rewards"]},
    }
    saved = read(worlds.written(tmp_path / "alone", worlds.plain, **own))
    config = RunConfig.from_flat({**saved.config, **keys}).flat()
    modules = {"default": {"version": (1, 1), "extra": {}, "spaces": saved.spaces}}
    both = replace(saved, config=config, modules=modules, spaces={})
    checkpoint = write(tmp_path / "both" / "checkpoints", both)
    players = {agent: juggler.load_policy(checkpoint) for agent in PAIR}
    matches = juggler.play_matches(checkpoint, players, 4, seed=2).matches
    found = [sum(match.returns.values()) for match in matches]
    assert found == juggler.evaluate(checkpoint, 4, seed=2).returns
    assert len(set(found)) > 1


class Blind(Shown):
    render = None  # type: ignore[assignment]


@pytest.fixture
def filmed(tmp_path: Path) -> Path:
    saved = read(worlds.written(tmp_path / "alone", worlds.plain))
    keys = {"env": f"{__name__}:Shown", "agents": dict.fromkeys(PAIR, "default")}
    config = RunConfig.from_flat({**saved.config, **keys, "envs_per_runner": 2}).flat()
    modules = {"default": {"version": (1, 1), "extra": {}, "spaces": saved.spaces}}
    return write(
        tmp_path / "both" / "checkpoints", replace(saved, config=config, modules=modules, spaces={})
    )


def brightness(video: Path) -> list[float]:
    frames = imageio_ffmpeg.read_frames(str(video))
    assert next(frames)["size"] == (48, 32)
    return [float(np.frombuffer(frame, np.uint8).mean()) for frame in frames]


@pytest.mark.slow
def test_each_episode_of_several_agents_is_a_video_of_all_its_steps(
    filmed: Path, tmp_path: Path
) -> None:
    played = juggler.evaluate(filmed, episodes=3, video=tmp_path / "videos", videos=3)
    assert [each.name for each in played.videos] == [
        "environment-0-episode-0.mp4",
        "environment-0-episode-1.mp4",
        "environment-1-episode-0.mp4",
    ]
    assert sorted((tmp_path / "videos").iterdir()) == played.videos
    for video in played.videos:
        shown = brightness(video)
        assert len(shown) == LENGTH + 1
        np.testing.assert_allclose(shown, [40 * step for step in range(LENGTH + 1)], atol=6)
    assert played.returns == juggler.evaluate(filmed, episodes=3).returns


@pytest.mark.slow
def test_each_match_is_a_video(
    filmed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    players = {"bob": "random"}
    played = juggler.play_matches(filmed, players, episodes=5, video=videos, videos=5)
    assert [each.name for each in played.videos] == [f"match-{k}.mp4" for k in range(5)]
    assert sorted(videos.iterdir()) == played.videos
    assert {len(brightness(video)) for video in played.videos} == {LENGTH + 1}
    again = juggler.play_matches(filmed, {"bob": "random"}, episodes=5)
    assert again.matches == played.matches
    options = ["--play", "bob=random", "--videos", "2", "--video", str(tmp_path / "others")]
    assert main(["evaluate", str(filmed), *options]) == 0
    assert f"video: {tmp_path / 'others'}/match-0.mp4, and 1 more" in capsys.readouterr().out


@pytest.mark.slow
def test_a_move_of_one_agent_is_a_frame(filmed: Path, tmp_path: Path) -> None:
    """And that an agent takes its leave is none."""
    pytest.importorskip("pettingzoo")
    from juggler.envrunner.config import EnvRunnerConfig
    from juggler.envrunner.environments.video import record_videos
    from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs

    path = tmp_path / "tictactoe.mp4"
    config = EnvRunnerConfig(env="pettingzoo:classic/tictactoe_v3", envs_per_runner=1)
    envs = make_multi_agent_envs(config, record_videos(config, None, [[path]], several_agents=True))
    turn = envs.reset(0)
    moves = 0
    while not len(turn.over):
        (group,) = turn.groups
        observations: Any = group.observations
        turn = envs.step([observations["action_mask"].argmax(1)])
        moves += 1
    envs.close()
    frames = imageio_ffmpeg.read_frames(str(path))
    next(frames)
    assert len(list(frames)) == moves + 1


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("juggler:CartPoles", "CartPoles: it steps all of its"),
        ("juggler:MatrixGame", "a video of MatrixGame"),
        (f"{__name__}:Blind", "a video of Blind: it cannot be"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_a_sentence(
    filmed: Path, tmp_path: Path, env: str, words: str
) -> None:
    with pytest.raises(ValueError, match="a video of ") as refused:
        juggler.evaluate(filmed, env=env, video=tmp_path / "videos")
    assert words in str(refused.value)
    assert not (tmp_path / "videos").exists()
