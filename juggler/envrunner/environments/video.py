"""Records videos of episodes."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.naming import Env, EnvironmentFactory, find_environment
from juggler.runtime.installing import installing
from juggler.runtime.wire.flags import as_flag

if TYPE_CHECKING:
    from juggler.envrunner.environments.film_file import FilmFile

Image = NDArray[np.uint8]

RENDERING = {"render_mode": "rgb_array"}


def record_videos(
    config: EnvRunnerConfig, factory: EnvironmentFactory | None, directory: Path, videos: int
) -> tuple[Callable[..., Env], list[Path]]:
    """Prepare environments that record their first episodes.

    Args:
        config: the environments and their number.
        factory: makes the environments instead of `config.env`.
        directory: of the videos; created if it is missing.
        videos: how many, over all environments.

    Returns:
        A factory that makes environments 0, 1, … in this order, and the paths of the videos, by
        environment and then by time.

    Raises:
        ValueError: the environment cannot render images, or a package is missing.
    """
    shares = shares_of(directory, config.envs_per_runner, videos)
    makes = _recording(config, factory, shares)
    directory.mkdir(parents=True, exist_ok=True)
    return makes, [path for share in shares for path in share]


def must_be_filmable(config: EnvRunnerConfig, factory: EnvironmentFactory | None) -> None:
    """Make an environment, and have it render.

    Raises:
        ValueError: it cannot render images, or a package is missing.
    """
    _recording(config, factory, [[]])(**config.env_kwargs).close()


def _recording(
    config: EnvRunnerConfig, factory: EnvironmentFactory | None, shares: list[list[Path]]
) -> _Recording:
    """
    Raises:
        ValueError: the environment cannot render images, or a package is missing.
    """
    if factory is None and config.env.startswith((SCHEME, ENVPOOL)):
        raise ValueError(f"env {config.env!r} runs outside of Python and shows no pictures here")
    source = factory or find_environment(config.env)
    name: str = getattr(source, "id", "") or getattr(source, "__qualname__", type(source).__name__)
    return _Recording(source, name, config.env_kwargs, shares)


def shares_of(directory: Path, num_envs: int, videos: int) -> list[list[Path]]:
    """The paths of the videos of each environment, [num_envs]; each has its share of them."""
    return [
        [
            directory / f"environment-{i}-episode-{k}.mp4"
            for k in range(len(range(i, videos, num_envs)))
        ]
        for i in range(num_envs)
    ]


def check_package() -> None:
    """
    Raises:
        ValueError: the package that writes videos is not installed.
    """
    try:
        importlib.import_module("imageio_ffmpeg")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a video needs the package {error.name}: {installing('video')}"
        ) from error


def draw_without_screen() -> None:
    """Have SDL, with which many environments draw, look for no screen and no sound where there is
    no screen: it would print that XDG_RUNTIME_DIR is missing."""
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")


class _Recording:
    """Makes environments that record. The first is made at once, to check that it renders."""

    def __init__(
        self,
        source: EnvSpec | EnvironmentFactory,
        name: str,
        env_kwargs: dict[str, Any],
        shares: list[list[Path]],
    ) -> None:
        check_package()
        draw_without_screen()
        self._source, self.__qualname__ = source, name
        self._shares = iter(shares)
        self._first: Env | None = self._make(**env_kwargs)
        must_render(self._first, name)

    def __call__(self, **env_kwargs: Any) -> Env:
        env, self._first = self._first, None
        return Recorded(env or self._make(**env_kwargs), next(self._shares))

    def _make(self, **env_kwargs: Any) -> Env:
        arguments = {**env_kwargs, **RENDERING}
        try:
            if isinstance(self._source, EnvSpec):
                return gymnasium.make(self._source, disable_env_checker=True, **arguments)
            made = self._source(**arguments)
        except Exception as error:
            raise not_made(self.__qualname__, error) from error
        if not isinstance(made, gymnasium.Env):
            made.close()
            raise ValueError(
                f"a video of {self.__qualname__}: it makes a {type(made).__name__}, and only "
                "single environments can be recorded"
            )
        return made


class Recorded(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose first episodes are written to videos, one for each path."""

    def __init__(self, env: Env, paths: list[Path]) -> None:
        super().__init__(env)
        self._film = Film(env, paths)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self._film.stop()
        observation, info = self.env.reset(**arguments)
        self._film.begin()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        ends = as_flag("terminated", terminated), as_flag("truncated", truncated)
        self._film.step(over=any(ends))
        return observation, reward, *ends, info

    def close(self) -> None:
        self._film.stop()
        super().close()


class Film:
    """Writes episodes of an environment to videos.

    Args:
        env: renders images.
        paths: of the videos that are yet to be written; each episode that begins takes the first
            one. Environments may share the list.
    """

    def __init__(self, env: Any, paths: list[Path]) -> None:
        self._env, self._paths = env, paths
        self._fps = float(getattr(env, "metadata", {}).get("render_fps", 30))
        self._first: Image | None = None
        self._video: FilmFile | None = None

    def begin(self) -> None:
        """An episode begins."""
        # A video starts with the first step, because a reset may only serve to look at the spaces.
        self._first = self._image() if self._paths else None

    def step(self, over: bool) -> None:
        """The environment was stepped; `over`: the episode has ended with that."""
        if self._first is not None and self._paths:
            self._start(self._first)
        self._first = None
        if self._video is not None:
            self._add(self._image())
            if over:
                self.stop()

    def stop(self) -> None:
        """Nothing more comes of the running episode."""
        video, self._video = self._video, None
        if video is not None:
            video.finish()

    def _image(self) -> Image:
        return np.array(self._env.render(), order="C")  # [H, W, 3]

    def _start(self, image: Image) -> None:
        from juggler.envrunner.environments.film_file import FilmFile  # its package may be missing

        height, width, _ = image.shape
        self._video = FilmFile(self._paths.pop(0), width, height, self._fps)
        self._add(image)

    def _add(self, image: Image) -> None:
        assert self._video is not None
        try:
            self._video.add(image.tobytes())
        except OSError:
            self._video = None  # there is nothing to finish any more
            raise


def not_made(name: str, error: Exception) -> ValueError:
    """What to raise where an environment cannot be made to render images."""
    advice = ": let its constructor take render_mode" if isinstance(error, TypeError) else ""
    return ValueError(
        f"a video of {name}: it cannot be made with render_mode='rgb_array': "
        f"{type(error).__name__}: {error}{advice}"
    )


def must_render(env: Any, name: str) -> None:
    """Check that an environment renders RGB images.

    Raises:
        ValueError: it does not.
    """
    try:
        env.reset()
        image: Any = env.render()
    except Exception as error:
        _close(env)
        raise ValueError(
            f"a video of {name}: it cannot be shown: {type(error).__name__}: {error}"
        ) from error
    what = type(image).__name__
    if isinstance(image, np.ndarray):
        what = f"{image.dtype} of shape {list(image.shape)}"
        if image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] == 3:
            return
    _close(env)
    raise ValueError(
        f"a video of {name}: it does not render: with render_mode='rgb_array' its render() must "
        f"return uint8 [H, W, 3], and returned {what}"
    )


def _close(env: Any) -> None:
    if callable(close := getattr(env, "close", None)):
        close()
