"""Records videos of episodes with ffmpeg."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.find_environment import find_environment
from juggler.envrunner.failures import VideoFailed
from juggler.runtime.install_commands import installing
from juggler.runtime.wire.flags import as_flag

Image = NDArray[np.uint8]

_RENDERING = {"render_mode": "rgb_array"}


def record_videos(
    config: EnvRunnerConfig,
    factory: Callable[..., Any] | None,
    shares: Sequence[list[Path]],
    *,
    several_agents: bool = False,
) -> Callable[..., Any]:
    """Prepare environments that record their first episodes.

    Args:
        shares: the paths of the videos of each environment; or one list for all environments,
            filled by the episodes that begin first.

    Returns:
        A factory that makes environments 0, 1, … in this order.

    Raises:
        ValueError: the environment cannot render images, or a package is missing.
    """
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ValueError(f"a video needs the package imageio_ffmpeg: {installing('video')}")
    # Without a screen, SDL would print that XDG_RUNTIME_DIR is missing.
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    make, name = (_find_games if several_agents else _find_single)(config, factory)
    # One environment is made to check that it renders, before a directory is created.
    env = _rendering(make, name, config.env_kwargs, several_agents)
    try:
        _must_render(env, name)
    finally:
        if callable(close := getattr(env, "close", None)):
            close()
    # Before the first episode, which may take long.
    for path in (path for share in shares for path in share):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot make the directory of videos {path.parent}: {error.strerror}"
            raise ValueError(why) from error
    paths = cycle(shares)
    wrap = VideoGame if several_agents else VideoEnvironment

    def recorded(**env_kwargs: Any) -> Any:
        return wrap(_rendering(make, name, env_kwargs, several_agents), next(paths))

    recorded.__qualname__ = name
    return recorded


def _rendering(
    make: Callable[..., Any], name: str, env_kwargs: dict[str, Any], several_agents: bool
) -> Any:
    """Make an environment that renders images."""
    try:
        env = make(**{**env_kwargs, **_RENDERING})
    except Exception as error:
        advice = ": let its constructor take render_mode" if type(error) is TypeError else ""
        raise ValueError(
            f"a video of {name}: it cannot be made with render_mode='rgb_array': "
            f"{type(error).__name__}: {error}{advice}"
        ) from error
    if several_agents or isinstance(env, gymnasium.Env):
        return env
    env.close()
    raise ValueError(
        f"a video of {name}: it makes a {type(env).__name__}, and only single environments "
        "can be recorded"
    )


def shares_of(directory: Path, num_envs: int, videos: int) -> list[list[Path]]:
    """Return the paths of each environment's share of the videos [num_envs]."""
    return [
        [
            directory / f"environment-{i}-episode-{k}.mp4"
            for k in range(len(range(i, videos, num_envs)))
        ]
        for i in range(num_envs)
    ]


def _find_single(
    config: EnvRunnerConfig, factory: Callable[..., Any] | None
) -> tuple[Callable[..., Any], str]:
    """Return the factory of environments with one agent, and its name."""
    if factory is None and config.env.startswith((SCHEME, ENVPOOL)):
        raise ValueError(f"env {config.env!r} runs outside Python and shows no pictures here")
    source = factory or find_environment(config.env)
    if isinstance(source, EnvSpec):
        return functools.partial(gymnasium.make, source, disable_env_checker=True), source.id
    return source, getattr(source, "__qualname__", type(source).__name__)


def _find_games(
    config: EnvRunnerConfig, factory: Callable[..., Any] | None
) -> tuple[Callable[..., Any], str]:
    """Return the factory of games with PettingZoo's interfaces, and its name."""
    # Imported here, because an EnvRunner of environments with one agent does not need it.
    from juggler.envrunner.multi_agent.make_envs import find_games, steps_all_at_once
    from juggler.envrunner.multi_agent.pettingzoo_games import native

    make, name = find_games(config, factory)
    if steps_all_at_once(make):
        raise ValueError(
            f"a video of {name}: it steps all of its environments at once as arrays, and shows no "
            "pictures; only an environment with PettingZoo's interfaces can be recorded"
        )
    return lambda **env_kwargs: native(make(**env_kwargs)), name


def _must_render(env: Any, name: str) -> None:
    try:
        env.reset()
        image: Any = env.render()
    except Exception as error:
        raise ValueError(
            f"a video of {name}: it cannot be shown: {type(error).__name__}: {error}"
        ) from error
    # ffmpeg would take any bytes, and show noise.
    what = type(image).__name__
    if isinstance(image, np.ndarray):
        what = f"{image.dtype} of shape {list(image.shape)}"
        if image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3:
            return
    raise ValueError(
        f"a video of {name}: it does not render: with render_mode='rgb_array' its render() must "
        f"return uint8 [H, W, 3], and returned {what}"
    )


class VideoEnvironment(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that writes its first episodes to videos."""

    def __init__(self, env: gymnasium.Env[Any, Any], paths: list[Path]) -> None:
        super().__init__(env)
        self._film = VideoWriter(env, paths)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        result: tuple[Any, dict[str, Any]] = self._film.reset(**arguments)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        ends = as_flag("terminated", terminated), as_flag("truncated", truncated)
        self._film.step(over=any(ends))
        return observation, reward, *ends, info

    def close(self) -> None:
        self._film.stop()
        super().close()


class VideoGame:
    """A game of PettingZoo's interfaces that writes its first episodes to videos."""

    def __init__(self, env: Any, paths: list[Path]) -> None:
        self._env, self._film = env, VideoWriter(env, paths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode."""
        return self._film.reset(**arguments)

    def step(self, actions: Any) -> Any:
        """Carry out an action, or the actions of all agents."""
        result = self._env.step(actions)
        if actions is not None:  # else an agent only leaves the game
            self._film.step(over=not self._env.agents)
        return result

    def close(self) -> None:
        """Finish the video, and close the environment."""
        self._film.stop()
        if callable(close := getattr(self._env, "close", None)):
            close()


class VideoWriter:
    """Writes episodes of an environment to videos.

    Args:
        env: renders images.
        paths: of the remaining videos; each episode that begins takes the first. Environments may
            share the list.
    """

    def __init__(self, env: Any, paths: list[Path]) -> None:
        self._env, self._paths = env, paths
        self._fps = float(getattr(env, "metadata", {}).get("render_fps", 30))
        self._first: Image | None = None
        self._video: VideoFile | None = None

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode, whose video starts with its first step."""
        self.stop()
        self._first = None
        result = self._env.reset(**arguments)
        # No file yet, because a reset may only serve to read the spaces.
        self._first = self._image() if self._paths else None
        return result

    def step(self, over: bool) -> None:
        """Add an image after a step; `over`: the step ended the episode."""
        if self._first is not None and self._paths:
            height, width, _ = self._first.shape
            self._video = VideoFile(self._paths.pop(0), width, height, self._fps)
            self._add(self._first)
        self._first = None
        if self._video is not None:
            self._add(self._image())
            if over:
                self.stop()

    def stop(self) -> None:
        """Finish the video of the running episode."""
        video, self._video = self._video, None
        if video is not None:
            video.finish()

    def _image(self) -> Image:
        return np.array(self._env.render(), order="C")  # [H, W, 3]

    def _add(self, image: Image) -> None:
        assert self._video is not None
        try:
            self._video.add(image.tobytes())
        except OSError:
            self._video = None  # `stop` must not finish it
            raise


class VideoFile:
    """Encodes a video; its file appears when complete.

    ffmpeg writes to a file without a name: if this process is killed, nothing is left.
    """

    def __init__(self, path: Path, width: int, height: int, fps: float) -> None:
        from imageio_ffmpeg import get_ffmpeg_exe  # an extra

        self._path = path
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._video: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        rate = str(Fraction(fps).limit_denominator())
        images = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {rate} -i -"
        # Most players only know this pixel format, which needs even sides.
        size = f"scale={width + width % 2}:{height + height % 2}"
        video = f"-an -vf {size} -pix_fmt yuv420p -f mp4 -y /dev/fd/{self._video.fileno()}"
        # In its own session, because a terminal sends Ctrl-C to all processes of a session. This
        # start does not fork: gRPC's fork handlers have ended ffmpeg if gRPC was imported before
        # Juggler.
        self._process = subprocess.Popen(
            [get_ffmpeg_exe(), *f"-v error {images} {video}".split()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=[self._video.fileno()],
            start_new_session=True,
        )

    def add(self, image: bytes) -> None:
        """Add an image, [height, width, 3] of uint8.

        Raises:
            VideoFailed: ffmpeg has failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(image)
        except BrokenPipeError:
            self.finish()  # raises ffmpeg's error

    def finish(self) -> None:
        """Encode the remaining images, and write the file.

        Raises:
            VideoFailed: ffmpeg has failed, or the file cannot be written. No file is left.
        """
        part = self._path.with_name(f".{self._path.name}.part")
        with self._log, self._video:
            self._process.communicate()
            if self._process.returncode:
                self._log.seek(0)
                lines = self._log.read().decode(errors="replace").strip().splitlines()
                why = lines[-1] if lines else f"it ended with status {self._process.returncode}"
                raise VideoFailed(f"the video {self._path} could not be encoded by ffmpeg: {why}")
            # Written beside its place, so that a reader never sees a part of it.
            self._video.seek(0)
            try:
                with part.open("wb") as file:
                    shutil.copyfileobj(self._video, file)
                part.replace(self._path)
            except OSError as error:
                with suppress(OSError):
                    part.unlink()
                why = error.strerror or str(error)
                raise VideoFailed(f"the video {self._path} could not be written: {why}") from error
