from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from support import worlds

import juggler
from juggler.cli import main
from juggler.envrunner.environments.video import VideoFile, VideoWriter
from juggler.runtime.install_commands import installing

CARTPOLE = {"env": "CartPole-v1", "env_kwargs": {"max_episode_steps": 12}}


@pytest.mark.slow
def test_each_episode_is_a_video_of_all_its_steps(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, **CARTPOLE, envs_per_runner=2)
    played = juggler.evaluate(path, episodes=3, video=tmp_path / "videos", videos=3)
    assert [each.name for each in played.videos] == [
        "environment-0-episode-0.mp4",
        "environment-0-episode-1.mp4",
        "environment-1-episode-0.mp4",
    ]
    assert sorted((tmp_path / "videos").iterdir()) == played.videos
    for video, length in zip(played.videos, played.lengths, strict=True):
        frames = imageio_ffmpeg.read_frames(str(video))
        assert next(frames)["size"] == (600, 400)
        images = [np.frombuffer(frame, np.uint8) for frame in frames]
        assert len(images) == length + 1
        assert np.abs(images[0].astype(int) - images[-1]).max() > 100  # it moves
    assert played.returns == juggler.evaluate(path, episodes=3).returns


ENCODERS = {
    "one that ends at once": "echo cannot load a library >&2; exit 1",
    "one that ends late": "cat > /dev/null; echo cannot load a library >&2; exit 1",
}


@pytest.mark.long
@pytest.mark.parametrize("program", ENCODERS.values(), ids=ENCODERS)
def test_an_encoder_that_fails_leaves_no_video_and_is_told_once(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    encoder = tmp_path / "ffmpeg"
    encoder.write_text(f"#!/bin/sh\n{program}\n")
    encoder.chmod(0o700)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(encoder))
    path = worlds.written(tmp_path, **CARTPOLE)
    assert main(["evaluate", str(path), "--video", str(tmp_path / "videos")]) == 1
    assert [*(tmp_path / "videos").iterdir()] == []
    said = capfd.readouterr().err
    assert "could not be encoded by ffmpeg: cannot load a library" in said
    assert said.count("cannot load a library") == 1


@pytest.mark.long
def test_a_program_that_is_killed_leaves_no_part_of_a_video(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "from juggler.envrunner.environments.video import VideoFile\n"
        "film = VideoFile(pathlib.Path('episode.mp4'), 64, 64, 30)\n"
        "for each in range(200):\n"
        "    film.add(os.urandom(64 * 64 * 3))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, b"")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
def test_a_video_for_which_there_is_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = VideoFile(tmp_path / "videos" / "episode.mp4", 6, 4, 30)
    film.add(bytes(6 * 4 * 3))
    (tmp_path / "videos").write_text("no directory")
    with pytest.raises(OSError, match="episode"):
        film.finish()


@pytest.mark.long
def test_nothing_is_printed_where_there_is_no_screen(tmp_path: Path) -> None:
    code = (
        "from juggler.envrunner.config import EnvRunnerConfig\n"
        "from juggler.envrunner.environments.video import record_videos\n"
        "record_videos(EnvRunnerConfig(env='CartPole-v1'), None, [])\n"
    )
    of_a_screen = ("XDG_RUNTIME_DIR", "DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    env = {key: value for key, value in os.environ.items() if key not in of_a_screen}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_video_is_written_without_a_fork(tmp_path: Path, run_python: Callable[..., str]) -> None:
    # gRPC's fork handlers, where it was imported before Juggler, have ended what was started so
    code = (
        "import os, pathlib, gymnasium\n"
        "from juggler.envrunner.environments.video import VideoEnvironment\n"
        "os.register_at_fork(before=lambda: print('forked'))\n"
        "env = gymnasium.make('CartPole-v1', render_mode='rgb_array')\n"
        "env = VideoEnvironment(env, [pathlib.Path('episode.mp4')])\n"
        "env.reset()\n"
        "env.step(0)\n"
        "env.close()\n"
    )
    assert run_python("-c", code) == ""
    assert (tmp_path / "episode.mp4").stat().st_size


def test_the_command_tells_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juggler.cli.evaluate.PROGRESS_SECONDS", 0.0)
    path = worlds.written(tmp_path, **CARTPOLE)
    assert main(["evaluate", str(path), "--episodes", "3"]) == 0
    said = capsys.readouterr()
    first, *others = said.err.splitlines()
    assert first == "0 of 3 episodes, step 1"
    assert any(line.startswith("2 of 3 episodes, ") for line in others)
    assert "of 3 episodes" not in said.out


class Painted(worlds.World):
    """Renders what it is told to."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(worlds.VECTOR, worlds.CHOICE)
        self.render_mode = render_mode

    def render(self):
        return np.full((5, 7, 3), 90 * self.left % 256, np.uint8)


def test_the_first_image_is_kept_where_all_are_drawn_into_one_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneImage:
        image = np.zeros((2, 2, 3), np.uint8)

        def reset(self) -> None:
            pass

        def render(self) -> np.ndarray:
            return self.image

    added: list[bytes] = []
    monkeypatch.setattr(VideoFile, "__init__", lambda *_: None)
    monkeypatch.setattr(VideoFile, "add", lambda _, image: added.append(image))
    env = OneImage()
    film = VideoWriter(env, [Path("not written")])
    film.reset()
    env.image += 1  # as a step draws the next one
    film.step(over=False)
    assert added == [bytes([number] * 12) for number in (0, 1)]


class Blind(Painted):
    def render(self):
        return None


def fleet(render_mode: str | None = None, num_envs: int = 1) -> gymnasium.vector.VectorEnv:
    return gymnasium.vector.SyncVectorEnv([worlds.plain] * num_envs)


@pytest.mark.long
def test_images_with_odd_sides_become_videos_too(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain)
    played = juggler.evaluate(path, episodes=1, env=Painted, video=tmp_path / "videos")
    frames = imageio_ffmpeg.read_frames(str(played.videos[0]))
    assert next(frames)["size"] == (8, 6)
    assert len(list(frames)) == played.lengths[0] + 1


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (worlds.plain, "video of plain: it cannot be made"),
        (Blind, "video of Blind: it does not"),
        (fleet, "video of fleet: it makes a"),
    ],
)
def test_an_environment_that_shows_no_pictures_is_named(env, said, tmp_path: Path, capsys) -> None:
    path = worlds.written(tmp_path, worlds.plain)
    with pytest.raises(ValueError, match=said):
        juggler.evaluate(path, env=env, video=tmp_path / "videos")
    assert not (tmp_path / "videos").exists()


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("imageio_ffmpeg", re.escape(f"package imageio_ffmpeg: {installing('video')}")),
        ("pygame", "video of CartPole-v1: it cannot"),
    ],
)
def test_a_missing_package_is_named(
    package: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = worlds.written(tmp_path, **CARTPOLE)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=said):
        juggler.evaluate(path, video=tmp_path / "videos")
