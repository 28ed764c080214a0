"""Videos of episodes with several agents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import imageio_ffmpeg
import numpy as np
import pytest
from support import worlds

import juggler
from juggler.cli import main
from juggler.driver.config import RunConfig
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import read

PLAIN = worlds.plain()
AGENTS = ["ann", "bob"]
LENGTH = 6


class Shown:
    """Both act for 6 steps; each image is as bright as the step is late, wider in odd episodes."""

    metadata: ClassVar[dict[str, Any]] = {"render_fps": 10}
    possible_agents = AGENTS

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.draws = render_mode, np.random.default_rng(0)

    def observation_space(self, agent: str) -> Any:
        return PLAIN.observation_space

    def action_space(self, agent: str) -> Any:
        return PLAIN.action_space

    def seen(self) -> dict[str, Any]:
        return {agent: self.draws.normal(size=(4,)).astype(np.float32) for agent in AGENTS}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(AGENTS), 0
        self.draws = np.random.default_rng(seed)
        return self.seen(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        over = self.at == LENGTH
        self.agents = [] if over else self.agents
        rewards = {agent: float(self.draws.integers(9)) for agent in AGENTS}
        no = dict.fromkeys(AGENTS, False)
        return self.seen(), rewards, dict.fromkeys(AGENTS, over), no, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        return np.full((32, 48, 3), 40 * self.at, np.uint8)


class Blind(Shown):
    render = None  # type: ignore[assignment]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved = read(worlds.written(tmp_path / "alone", worlds.plain))
    keys = {"env": f"{__name__}:Shown", "agents": dict.fromkeys(AGENTS, "default")}
    config = RunConfig.from_flat({**saved.config, **keys, "envs_per_runner": 2}).flat()
    modules = {"default": {"version": (1, 1), "extra": {}, "spaces": saved.spaces}}
    return write(
        tmp_path / "both" / "checkpoints",
        replace(saved, config=config, modules=modules, spaces={}),
    )


def brightness(video: Path) -> list[float]:
    frames = imageio_ffmpeg.read_frames(str(video))
    assert next(frames)["size"] == (48, 32)
    return [float(np.frombuffer(frame, np.uint8).mean()) for frame in frames]


def test_each_episode_of_several_agents_is_a_video_of_all_its_steps(
    checkpoint: Path, tmp_path: Path
) -> None:
    played = juggler.evaluate(checkpoint, episodes=3, video=tmp_path / "videos", videos=3)
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
    assert played.returns == juggler.evaluate(checkpoint, episodes=3).returns


def test_each_match_is_a_video(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "videos"
    players = {"bob": "random"}
    played = juggler.play_matches(checkpoint, players, episodes=5, video=videos, videos=5)
    assert [each.name for each in played.videos] == [f"match-{k}.mp4" for k in range(5)]
    assert sorted(videos.iterdir()) == played.videos
    assert {len(brightness(video)) for video in played.videos} == {LENGTH + 1}
    again = juggler.play_matches(checkpoint, {"bob": "random"}, episodes=5)
    assert again.matches == played.matches
    options = ["--play", "bob=random", "--videos", "2", "--video", str(tmp_path / "others")]
    assert main(["evaluate", str(checkpoint), *options]) == 0
    assert f"video: {tmp_path / 'others'}/match-0.mp4, and 1 more" in capsys.readouterr().out


def test_a_move_of_one_agent_is_a_frame(checkpoint: Path, tmp_path: Path) -> None:
    """And that an agent takes its leave is none."""
    pytest.importorskip("pettingzoo")
    from juggler.envrunner.config import EnvRunnerConfig
    from juggler.envrunner.multi_agent.game_videos import record_games
    from juggler.envrunner.multi_agent.making import make_multi_agent_envs

    path = tmp_path / "tictactoe.mp4"
    config = EnvRunnerConfig(env="pettingzoo:classic/tictactoe_v3", envs_per_runner=1)
    envs = make_multi_agent_envs(config, record_games(config, None, [[path]]))
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
        ("juggler:CartPoles", "CartPoles: it steps all of its environments at once as arrays"),
        ("juggler:MatrixGame", "a video of MatrixGame"),
        (f"{__name__}:Blind", "a video of Blind: it cannot be shown: TypeError"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_a_sentence(
    checkpoint: Path, tmp_path: Path, env: str, words: str
) -> None:
    with pytest.raises(ValueError, match="a video of ") as refused:
        juggler.evaluate(checkpoint, env=env, video=tmp_path / "videos")
    assert words in str(refused.value)
    assert not (tmp_path / "videos").exists()
