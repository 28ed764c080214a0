"""Any Gymnasium environment as a simulator. Gymnasium is imported only when it is needed."""

from __future__ import annotations

import importlib
from copy import deepcopy
from typing import Any, Literal

from juggler.client.connection import GatewayError
from juggler.client.local import LocalSession
from juggler.client.session import Session, connect


def play(
    env: Any,
    address: str,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    mode: Literal["remote", "local"] = "remote",
    **options: Any,
) -> list[float]:
    """Play an environment at a gateway: `play("CartPole-v1", "127.0.0.1:5005")`.

    If the gateway dies and another one takes its place within a minute, playing continues there
    with a new episode.

    Args:
        env: a Gymnasium id, or an environment.
        address: address of the gateway.
        episodes: how many to play; None: until the run ends.
        seed: seed of the environment.
        env_kwargs: keyword arguments for making an environment by its id.
        mode: who acts, as in `connect`.
        options: options of `connect`. Numbers that the environment puts into `info` reach the run's
            metrics if `info_names` has their names.

    Returns:
        The undiscounted return of each episode.

    Raises:
        GatewayError: the session failed. The end of the run is not an error.
        ModuleNotFoundError: `env` is an id, and Gymnasium is not installed.
    """
    made = isinstance(env, str)
    if made:
        env = _gymnasium().make(env, **(env_kwargs or {}))
    spaces = env.observation_space, env.action_space
    returns: list[float] = []
    try:
        while True:
            try:
                with connect(address, *spaces, mode=mode, **options) as session:
                    _play(env, session, episodes, seed, returns)
                break
            except GatewayError as error:
                if error.code == "ENDED":
                    break
                if error.code != "UNKNOWN_SESSION":
                    raise
                seed = None  # another gateway took the place of a dead one
    finally:
        if made:
            env.close()
    return returns


def _play(
    env: Any,
    session: Session | LocalSession,
    episodes: int | None,
    seed: int | None,
    returns: list[float],
) -> None:
    """Play in one session until there are as many returns as episodes."""
    observation, _ = env.reset(seed=seed)
    action, total = session.step(observation), 0.0
    while True:
        observation, reward, terminated, truncated, info = env.step(action)
        result = reward, terminated, truncated
        total += float(reward)
        final = None
        if terminated or truncated:
            returns.append(total)
            if len(returns) == episodes:
                session.step(observation, *result, infos=info)
                return
            # The reset may write into the same memory.
            total, final, info = 0.0, deepcopy(observation), dict(info)
            observation, _ = env.reset()
        action = session.step(observation, *result, final, infos=info)


def _gymnasium() -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        text = "environments by name need the package gymnasium: pip install gymnasium"
        raise ModuleNotFoundError(text) from error
