"""Evaluates a checkpoint in this process, without workers or streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.checkpoint.frozen_modules import FrozenModule, frozen_modules
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.record.episode_returns import WithReturns
from juggler.driver.script_classes import must_be_given_again
from juggler.driver.with_dataset import must_be_playable
from juggler.runtime.checkpoints.checkpoint import read_or_warn
from juggler.runtime.checkpoints.frozen import run_of
from juggler.runtime.connectors.pipeline import own_connectors
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.by_name import given_or_named, name_of

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import VectorEnv

    from juggler.envrunner.datasets.episode_recorder import EpisodeRecorder
    from juggler.envrunner.evaluation import PlayedEpisodes

    #: Gives a recorder for a run's configuration, a checkpoint and the environments it plays.
    Recording = Callable[
        [RunConfig, Path, VectorEnv[Any, Any, Any]], AbstractContextManager[EpisodeRecorder]
    ]

_MANY_STEPS: Final = 10_000  # longer than most episodes


@dataclass(frozen=True, slots=True)
class Evaluated(WithReturns):
    """Episodes that a checkpoint's policy played deterministically.

    Attributes:
        checkpoint: path of the policy's checkpoint.
        returns: undiscounted returns, by environment and then by time; with several agents, the
            sums over them.
        lengths: numbers of environment steps, in the same order.
        videos: paths of the videos, by environment and then by time; empty if none were recorded.
        agent_returns: by agent and the module that played it, what it got in the episodes in which
            it acted; empty if there is one agent.
    """

    checkpoint: Path
    returns: list[float]
    lengths: list[int]
    videos: list[Path]
    agent_returns: dict[tuple[str, str], list[float]] = field(default_factory=dict)


def evaluate(
    checkpoint: str | Path,
    episodes: int = 20,
    seed: int = 0,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    mapping: Callable[..., Any] | None = None,
    video: str | Path | None = None,
    videos: int = 1,
    watch: Callable[[int, int], None] | None = None,
    recording: Recording | None = None,
) -> Evaluated:
    """Play whole episodes with the policy in a checkpoint, without exploration. Where there are
    several agents, each is played by its module. A warning comes if episodes do not end.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is taken, with a
            warning if it is not the newest. A run's directory `best` has the one that played best.
        episodes: number of episodes.
        seed: of the environments.
        env: another environment than the run's; required if the run was trained on a callable.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the run's connectors again, if some of their classes cannot be imported by name.
        mapping: the run's function again, if it cannot be imported by name.
        video: a directory for videos. Environments are then stepped one after the other.
        videos: how many episodes `video` films, from the first on.
        watch: called after each step of all environments, with the number of finished episodes and
            of steps so far.
        recording: makes what hears of every step, as `juggler.record` does; None: nobody does.

    Raises:
        ConfigError: `episodes` is below 1, the run needs something of a script again, or a run with
            several agents is to be recorded.
        CheckpointError: there is no checkpoint, it is damaged, or it is another module's.
        EnvironmentFailed: an environment failed.
        ValueError: the environment cannot be recorded, or a package for videos is missing.
    """
    # Imported here because they import torch, which the driver does without.
    from juggler.envrunner.environments.vector import make_vector_env
    from juggler.envrunner.environments.video import record_videos, shares_of
    from juggler.envrunner.evaluation import evaluate as play
    from juggler.policies.loading import PolicyConfig, restore_parts
    from juggler.runtime.acting.actor import Actor

    watch = warns_of_endless(watch)
    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: must be at least 1")
    if videos < 1:
        raise ConfigError(f"videos = {videos}: must be at least 1")
    filmed = min(videos, episodes)
    found = read_or_warn(checkpoint)
    where = found.path or Path(checkpoint)
    films: list[Path] = []
    named = {key: name for key, name in (("env", env), ("module", module)) if type(name) is str}
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own: dict[str, Any] = own_connectors(keys)
    if mapping is not None:
        own[str(name_of(mapping))] = mapping
    config = RunConfig.to_act({**found.config, **named, **keys}, where=str(where))
    must_be_given_again(config, env, module, own)
    if not callable(env):
        gateway = found.config.get("gateway", "") if env is None else ""
        must_be_playable(found.config.get("dataset", ""), config.env_runner.env, gateway)
    config.env_runner.envs_per_runner = min(config.env_runner.envs_per_runner, episodes)
    factory = env if callable(env) else None

    def parts(module_id: str, observed: Space[Any], acted: Space[Any]) -> Any:
        """A module, and the connectors on both sides of it."""
        of_module = config.of(module_id)
        given = given_or_named(of_module.module.module, module if callable(module) else None, own)
        policy_config = PolicyConfig(
            of_module.module, of_module.connectors.parsed(), given if callable(given) else None, own
        )
        return restore_parts(found, policy_config, observed, acted, module_id)

    if config.played_by and recording is not None:
        raise ConfigError(
            f"the environment {config.env_runner.env} has several agents, and a Minari data set "
            "has the steps of one: nothing can be recorded of this run"
        )
    if config.played_by:
        if video is not None:
            from juggler.envrunner.multi_agent.game_videos import record_games

            shares = shares_of(Path(video), config.env_runner.envs_per_runner, filmed)
            films = [path for share in shares for path in share]
            factory = record_games(config.env_runner, factory, shares)
        frozen = frozen_modules(config, run_of(where))
        given = module if callable(module) else None
        played = _play_together(config, factory, parts, frozen, given, own, episodes, seed, watch)
        return Evaluated(where, played.returns, played.lengths, films, played.agent_returns)
    if video is not None:
        factory, films = record_videos(config.env_runner, factory, Path(video), filmed)
        config.env_runner.vectorize = "sync"
    environments = make_vector_env(config.env_runner, factory)
    try:
        built, env_to_module, module_to_env = parts(
            DEFAULT_MODULE, environments.single_observation_space, environments.single_action_space
        )
        policy = Actor(built, environments.num_envs, 1, seed, module_to_env, env_to_module)
        with recording(config, where, environments) if recording else nullcontext() as recorder:
            played = play(environments, policy, episodes, seed, watch, recorder=recorder)
    finally:
        environments.close()
    return Evaluated(where, played.returns, played.lengths, films)


def warns_of_endless(watch: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """Call `watch`, and warn once if no episode ends after many steps."""
    last, since, told = 0, 0, False

    def see(ended: int, steps: int) -> None:
        nonlocal last, since, told
        if ended != last:
            last, since = ended, steps
        elif steps - since >= _MANY_STEPS and not told:
            told = True
            warnings.warn(
                f"no episode has ended in {_MANY_STEPS:,} steps of each environment. If they may "
                "never end, interrupt this, and set a limit: with gymnasium.wrappers.TimeLimit "
                "around the environment, or max_episode_steps in the run",
                stacklevel=2,
            )
        if watch is not None:
            watch(ended, steps)

    return see


def _play_together(
    config: RunConfig,
    factory: Callable[..., Any] | None,
    parts: Callable[[str, Space[Any], Space[Any]], Any],
    frozen: Mapping[str, FrozenModule],
    module: Callable[..., Any] | None,
    own: Mapping[str, type[Any]],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None,
) -> PlayedEpisodes:
    """Episodes of several agents, each played by its module."""
    from juggler.driver.frozen_policies import frozen_parts
    from juggler.envrunner.multi_agent.casting import cast, random_roles
    from juggler.envrunner.multi_agent.line_up import line_ups_of
    from juggler.envrunner.multi_agent.making import make_multi_agent_envs
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots
    from juggler.envrunner.multi_agent.whole_episodes import play_whole_episodes
    from juggler.runtime.acting.actor import Actor

    envs = make_multi_agent_envs(config.env_runner, factory)

    try:
        modules, tables = [], config.agents
        played_by = config.played_by_in([group.agents for group in envs.groups])
        ids = [*config.module_ids, *tables.frozen_ids]
        for module_id, role in cast(envs, played_by, ids).items():
            spaces = role.spaces.observation_space, role.spaces.action_space
            built, connectors, module_to_env = (
                frozen_parts(frozen[module_id], *spaces, module, own)
                if module_id in frozen
                else parts(module_id, *spaces)
            )
            policy = Actor(built, 1, 0, seed, module_to_env, connectors)
            modules.append(ModuleSlots(role, envs.num_envs, envs.agents, policy, connectors, 1, 0))
        modules += [
            ModuleSlots.at_random(role, envs.num_envs, envs.agents, 1, seed)
            for role in random_roles(envs, played_by)
        ]
        line_ups = line_ups_of(envs.agents, played_by, tables.mapping, own)
        return play_whole_episodes(envs, modules, episodes, seed, watch, line_ups=line_ups)
    finally:
        envs.close()
