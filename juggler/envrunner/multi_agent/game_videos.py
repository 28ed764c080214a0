"""Records videos of episodes with several agents."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.video import (
    RENDERING,
    Film,
    check_package,
    draw_without_screen,
    must_render,
    not_made,
)
from juggler.envrunner.multi_agent.making import MultiAgentFactory, find_games, steps_all_at_once
from juggler.envrunner.multi_agent.pettingzoo_games import native


def record_games(
    config: EnvRunnerConfig,
    factory: MultiAgentFactory | None,
    shares: list[list[Path]],
) -> Callable[..., Any]:
    """Prepare environments that record their first episodes.

    Args:
        config: the environments.
        factory: makes the environments instead of `config.env`.
        shares: the paths of the videos of each environment, or one list that all of them share:
            then the first episodes that begin are recorded, in this order.

    Returns:
        A factory that makes environments 0, 1, … in this order.

    Raises:
        ValueError: the environment cannot render images, or a package is missing.
    """
    check_package()
    draw_without_screen()
    make, name = find_games(config, factory)
    if steps_all_at_once(make):
        raise ValueError(
            f"a video of {name}: it steps all of its environments at once as arrays, and shows no "
            "pictures; only an environment with PettingZoo's interfaces can be recorded"
        )
    makes = _Recording(make, name, itertools.cycle(shares))
    makes.check(config.env_kwargs)
    for path in itertools.chain.from_iterable(shares):
        path.parent.mkdir(parents=True, exist_ok=True)
    return makes


class _Recording:
    def __init__(self, make: MultiAgentFactory, name: str, shares: itertools.cycle[Any]) -> None:
        self._make, self.__qualname__, self._shares = make, name, shares

    def __call__(self, **env_kwargs: Any) -> Any:
        return RecordedGame(self._made(env_kwargs), next(self._shares))

    def check(self, env_kwargs: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the environment cannot be made to render images.
        """
        env = RecordedGame(self._made(env_kwargs), [])
        must_render(env, self.__qualname__)
        env.close()

    def _made(self, env_kwargs: dict[str, Any]) -> Any:
        try:
            return native(self._make(**{**env_kwargs, **RENDERING}))
        except Exception as error:
            raise not_made(self.__qualname__, error) from error


class RecordedGame:
    """An environment of PettingZoo's interfaces whose episodes are written to videos.

    Args:
        env: renders images.
        paths: as for a `Film`.
    """

    def __init__(self, env: Any, paths: list[Path]) -> None:
        self._env, self._film = env, Film(env, paths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, **arguments: Any) -> Any:
        """Begin an episode."""
        self._film.stop()
        told = self._env.reset(**arguments)
        self._film.begin()
        return told

    def step(self, actions: Any) -> Any:
        """Carry out an action, or those of all agents."""
        told = self._env.step(actions)
        if actions is not None:  # else an agent only takes its leave
            self._film.step(over=not self._env.agents)
        return told

    def close(self) -> None:
        """Finish the video, and close the environment."""
        self._film.stop()
        if callable(close := getattr(self._env, "close", None)):
            close()
