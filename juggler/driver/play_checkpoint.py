"""Plays a checkpoint in this process: evaluations, matches and data sets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.checkpoint.first_weights import frozen_modules, parts_in
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.config import LeagueConfig
from juggler.driver.reporting.episode_returns import WithReturns
from juggler.driver.run_datasets import must_be_playable
from juggler.driver.script_classes import must_be_given_again
from juggler.envrunner.setup import RANDOM
from juggler.envrunner.setup import matches as fits
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read_or_warn
from juggler.runtime.checkpoints.weights import DIRECTORY, place_and_module, run_of
from juggler.runtime.connectors.config import own_connectors
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules.import_by_name import name_of
from juggler.runtime.near_matches import listed, nearest, one_of
from juggler.runtime.wire.spaces import space_to_message

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import VectorEnv

    from juggler.driver.checkpoint.first_weights import Parts
    from juggler.envrunner.evaluation import PlayedEpisodes

    Recording = Callable[
        [RunConfig, Path, VectorEnv[Any, Any, Any]],
        AbstractContextManager[VectorEnv[Any, Any, Any]],
    ]
    Build = Callable[[str, Space[Any], Space[Any]], Parts]
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots
    from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
    from juggler.policies.matches import MatchRecord, PlayedMatch
    from juggler.policies.policy import Policy


_MANY_STEPS: Final = 10_000  # longer than most episodes


@dataclass(frozen=True, slots=True)
class Evaluated(WithReturns):
    """Episodes that a checkpoint's policy played.

    Attributes:
        checkpoint: path of the policy's checkpoint.
        returns: undiscounted returns, by environment and then by time; with several agents, summed
            over the agents.
        lengths: numbers of environment steps, in the same order.
        videos: paths of the videos, by environment and then by time; empty if none were recorded.
        agent_returns: by agent and module, the agent's returns in the episodes in which it acted,
            in the same order; empty if there is one agent.
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
    explore: bool = False,
) -> Evaluated:
    """Play whole episodes with the policy in a checkpoint.

    With several agents, each is played by its module. A warning is shown if episodes do not end.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is used, with a
            warning if it is not the newest. A run's directory `best` has the best checkpoint.
        episodes: number of episodes.
        seed: of the environments.
        env: another environment than the run's; required if the run was trained on a callable.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the run's connectors again, if some of their classes cannot be imported by name.
        mapping: the run's function again, if it cannot be imported by name.
        video: a directory for videos. Environments are then stepped one after the other.
        videos: number of episodes that `video` films, starting with the first.
        watch: called after each step of all environments, with the number of finished episodes and
            of steps so far.
        recording: makes a recorder of every step, as for `juggler.record`; None: no recording.
        explore: draw actions as in training, instead of taking the most likely ones.

    Raises:
        ConfigError: `episodes` is below 1, `seed` is negative, the run needs objects of its script
            again, or a run with several agents cannot be recorded or explore.
        CheckpointError: there is no checkpoint, it is damaged, or it is of another module.
        EnvironmentFailed: an environment failed.
        ValueError: the environment cannot be recorded, or a package for videos is missing.
    """
    watch = warns_of_endless(watch)
    _must_be_possible(seed, episodes=episodes, videos=videos)
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own: dict[str, Any] = own_connectors(keys)
    if mapping is not None:
        own[str(name_of(mapping))] = mapping
    found, where, config = _opened(checkpoint, env, module, own, **keys)
    config.env_runner.envs_per_runner = min(config.env_runner.envs_per_runner, episodes)
    # `--simulator` cannot play the matches of a league.
    if not callable(env):
        alone = not config.agents.league
        must_be_playable(found.config, config.env_runner.env, with_simulator=alone)
    factory, given = (each if callable(each) else None for each in (env, module))
    # Some of the arguments are for one agent alone.
    several = bool(config.played_by)
    if several and recording is not None:
        raise ConfigError(
            f"the environment {config.env_runner.env} has several agents, and a Minari data set "
            "has the steps of one: this run cannot be recorded"
        )
    if several and explore:
        raise ConfigError(
            f"the environment {config.env_runner.env} has several agents: for them, explore is for "
            "matches between named players, with play_matches or --play"
        )
    # The first episodes are filmed, whichever environment plays them.
    films: list[Path] = []
    if video is not None:
        from juggler.envrunner.environments.video import record_videos, shares_of

        runner = config.env_runner
        shares = shares_of(Path(video), runner.envs_per_runner, min(videos, episodes))
        films = [path for share in shares for path in share]
        factory = record_videos(runner, factory, shares, several_agents=several)
        # In this process: the factory hands out the paths, one environment after the other.
        runner.vectorize = "sync"

    parts = _builder(found, where, config, given, own)
    if config.played_by:
        played = _play_together(config, factory, parts, own, episodes, seed, watch)
    else:
        to_play = config, factory, parts, where, recording
        played = _play_alone(*to_play, episodes, seed, watch, explore=explore)
    return Evaluated(where, played.returns, played.lengths, films, played.agent_returns)


def _opened(
    checkpoint: str | Path,
    env: object = None,
    module: object = None,
    own: Mapping[str, Any] = MappingProxyType({}),
    **keys: Any,
) -> tuple[Checkpoint, Path, RunConfig]:
    """Read a checkpoint, its path, and its configuration with these keys."""
    found = read_or_warn(checkpoint)
    where = found.path or Path(checkpoint)
    named = {key: name for key, name in (("env", env), ("module", module)) if type(name) is str}
    config = RunConfig.to_act({**found.config, **named, **keys}, where=str(where))
    must_be_given_again(config, env, module, own)
    return found, where, config


def _builder(
    found: Checkpoint,
    where: Path,
    config: RunConfig,
    module: Callable[..., Any] | None = None,
    own: Mapping[str, type[Any]] = MappingProxyType({}),
) -> Build:
    """Return a function that builds modules, trained or with their own checkpoint."""
    frozen = frozen_modules(config, run_of(where)) if config.played_by else {}

    def build(module_id: str, observed: Space[Any], acted: Space[Any]) -> Parts:
        if module_id in frozen:
            return frozen[module_id].parts(observed, acted, module, own)
        return parts_in(found, module_id, config.of(module_id), observed, acted, module, own)

    return build


def _play_alone(
    config: RunConfig,
    factory: Callable[..., Any] | None,
    parts: Build,
    where: Path,
    recording: Recording | None,
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None],
    *,
    explore: bool,
) -> PlayedEpisodes:
    """Play episodes of an environment with one agent."""
    # Imported here because these import torch, which the driver does not need.
    from juggler.envrunner.environments.vector import make_vector_env
    from juggler.envrunner.evaluation import evaluate as play
    from juggler.runtime.acting.actor import Actor

    envs = make_vector_env(config.env_runner, factory)
    try:
        spaces = envs.single_observation_space, envs.single_action_space
        built, env_to_module, module_to_env = parts(DEFAULT_MODULE, *spaces)
        policy = Actor(built, envs.num_envs, 1, seed, module_to_env, env_to_module)
        with recording(config, where, envs) if recording else nullcontext(envs) as playing:
            return play(playing, policy, episodes, seed, watch, explore=explore)
    finally:
        envs.close()


def _must_be_possible(seed: int, **numbers: int) -> None:
    if seed < 0:
        raise ConfigError(f"seed = {seed}: must be at least 0")
    for key, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{key} = {number}: must be at least 1")


def evaluate_with_simulators(
    checkpoint: str | Path,
    simulator: str,
    episodes: int = 20,
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
) -> Evaluated:
    """Play whole episodes of simulators with the policy in a checkpoint.

    It acts without exploration, and plays the episodes that begin first.

    Raises:
        ConfigError: `episodes` is below 1, the command is wrong, or the run has a league.
        CheckpointError: as `evaluate`.
        SimulatorFailed: a copy of the simulator keeps ending.
    """
    from juggler.gateway.standalone_gateway import evaluate_with_copies

    _must_be_possible(seed, episodes=episodes)
    found, where, config = _opened(checkpoint, simulator=simulator)
    if config.agents.league:
        raise ConfigError(
            f"{where}: a league has no line-up to evaluate with a simulator: `juggler league` "
            "shows how good its players are, and --play with --env plays them in Python"
        )
    # Modules that are not trained have checkpoints of their own.
    played = evaluate_with_copies(
        config.env_runner,
        config.agents.agents,
        config.agents.mapping,
        _builder(found, where, config),
        episodes,
        seed,
        found.counters["trained"],
        warnings.warn,
        warns_of_endless(watch),
    )
    return Evaluated(where, played.returns, played.lengths, [], played.agent_returns)


def warns_of_endless(watch: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """Call `watch`, and warn once if no episode ends after many steps."""
    last, since, warned = 0, 0, False

    def see(ended: int, steps: int) -> None:
        nonlocal last, since, warned
        if ended != last:
            last, since = ended, steps
        # It may never end, so the advice cannot wait.
        elif steps - since >= _MANY_STEPS and not warned:
            warned = True
            warnings.warn(
                f"no episode has ended in {_MANY_STEPS:,} steps of each environment. If they may "
                "never end, interrupt this, and set a limit: in the simulator, with "
                "gymnasium.wrappers.TimeLimit around the environment, or max_episode_steps in the "
                "run",
                stacklevel=2,
            )
        if watch is not None:
            watch(ended, steps)

    return see


def _play_together(
    config: RunConfig,
    factory: Callable[..., Any] | None,
    parts: Build,
    own: Mapping[str, type[Any]],
    episodes: int,
    seed: int,
    watch: Callable[[int, int], None] | None,
) -> PlayedEpisodes:
    """Play episodes of several agents, each with its module."""
    from juggler.envrunner.evaluation import play_whole_episodes
    from juggler.envrunner.multi_agent.line_up import cast, line_ups_of, random_roles
    from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots
    from juggler.runtime.acting.actor import Actor

    envs = make_multi_agent_envs(config.env_runner, factory)

    # Environments may hold processes, which would stay.
    try:
        modules, tables = [], config.agents
        played_by = config.played_by_in([group.agents for group in envs.groups])
        ids = [*config.module_ids, *tables.frozen_ids]
        for module_id, role in cast(envs, played_by, ids).items():
            spaces = role.spaces.observation_space, role.spaces.action_space
            built, connectors, module_to_env = parts(module_id, *spaces)
            policy = Actor(built, 1, 0, seed, module_to_env, connectors)
            modules.append(ModuleSlots(role, envs.num_envs, envs.agents, policy, 1, 0))
        # "random" has neither a table nor weights.
        modules += [
            ModuleSlots.at_random(role, envs.num_envs, envs.agents, 1, seed)
            for role in random_roles(envs, played_by)
        ]
        line_ups = line_ups_of(envs.agents, played_by, tables.mapping, own)
        return play_whole_episodes(envs, modules, episodes, seed, watch, line_ups=line_ups)
    finally:
        envs.close()


@dataclass(frozen=True, slots=True, repr=False)
class PlayedMatches:
    """Matches between given players.

    Attributes:
        checkpoint: path of the checkpoint with the environment and modules.
        players: names of the players, by agent.
        matches: in the order in which they began.
        records: by agent, its returns, wins, draws and losses.
        videos: paths of the videos, in the order of the matches; empty if none were recorded.
    """

    checkpoint: Path
    players: dict[str, str]
    matches: list[PlayedMatch]
    records: dict[str, MatchRecord]
    videos: list[Path]

    def __repr__(self) -> str:
        lines = [f"checkpoint: {self.checkpoint}"]
        for agent, record in self.records.items():
            low, high = record.interval()
            known = not math.isnan(record.error)
            error = f" (standard error {record.error:.2f})" if known else ""
            lines.append(
                f"{agent} ({self.players[agent]}): return {record.mean:.2f}{error}; "
                f"{record.wins} won, {record.draws} drawn, {record.losses} lost: "
                f"score {record.score:.2f} (95 %: {low:.2f} to {high:.2f})"
            )
        return "\n".join(lines)


def play_matches(
    checkpoint: str | Path,
    players: Mapping[str, str | Policy],
    episodes: int = 100,
    seed: int = 0,
    *,
    explore: bool = False,
    env: str | Callable[..., Any] | None = None,
    video: str | Path | None = None,
    videos: int = 1,
    watch: Callable[[int, int], None] = lambda *_: None,
) -> PlayedMatches:
    """Play whole episodes of a run's environment with given players.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is used.
        players: by agent, or by a pattern of agents' names with `*`, `?` and `[...]`, its player:
            the id of a module in the checkpoint; "random"; the path of another checkpoint or run,
            followed by ":" and the id of a module if it has several; or a policy. The first
            pattern that matches counts. Other agents are played by their own modules.
        episodes: number of matches.
        seed: of the environments and of the policies' draws. Each player gets its own random
            stream, and given policies are reseeded: the same seed gives the same matches.
        explore: policies draw their actions as in training, instead of taking the most likely ones.
            Without it, policies repeat the same match if neither they nor the game draw anything.
        env: another environment than the run's; required if the run was trained on a callable.
        video: a directory for videos.
        videos: number of matches that `video` films, starting with the first.
        watch: called after each step of all environments, with the number of finished matches and
            of steps so far.

    Raises:
        ConfigError: the run has environments with one agent, or a named player does not exist.
        CheckpointError: a checkpoint is missing or damaged.
        EnvironmentFailed: an environment failed.
        ValueError: a policy does not fit an agent's spaces; or the environment cannot be recorded,
            or a package for videos is missing.
    """
    # Imported here because they import torch, which the driver does not need.
    from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
    from juggler.policies import matches

    _must_be_possible(seed, episodes=episodes, videos=videos)
    # No mapping: the caller names the players.
    found, where, config = _opened(checkpoint, env, mapping="")
    if not config.played_by:
        raise ConfigError(
            f"{where}: its environment {config.env_runner.env} has one agent, so there are no "
            "matches: use juggler evaluate without --play"
        )
    config.env_runner.envs_per_runner = min(config.env_runner.envs_per_runner, episodes)
    if not callable(env):
        must_be_playable(found.config, config.env_runner.env, with_simulator=False)
    factory, films = env if callable(env) else None, list[Path]()
    if video is not None:
        from juggler.envrunner.environments.video import record_videos

        films = [Path(video) / f"match-{number}.mp4" for number in range(min(videos, episodes))]
        # A copy, because recording takes the paths out of the list.
        factory = record_videos(config.env_runner, factory, [[*films]], several_agents=True)
    envs = make_multi_agent_envs(config.env_runner, factory)
    try:
        own = config.played_by_in([group.agents for group in envs.groups])
        chosen = _chosen(envs.agents, players, own)
        # In a league, only the checkpoint knows all players.
        known = tuple(dict.fromkeys([*config.agents.acting_ids, *found.modules]))
        modules = _seated(envs, chosen, seed, lambda player: _policy(player, where, known))
        watch = warns_of_endless(watch)
        played = matches.play_matches(envs, modules, episodes, seed, watch, explore=explore)
    finally:
        envs.close()
    league = LeagueConfig.from_table(config.agents.league)
    records = matches.records(played, league.teams, league.draw_margin)
    words = {agent: each if isinstance(each, str) else repr(each) for agent, each in chosen.items()}
    return PlayedMatches(where, words, played, records, films)


def _chosen(
    agents: tuple[str, ...], players: Mapping[str, str | Policy], own: Mapping[str, Sequence[str]]
) -> dict[str, str | Policy]:
    """Find the player of each agent; `own` has modules for the others."""
    for pattern in players:
        if not any(fits(agent, pattern) for agent in agents):
            raise ConfigError(f"no agent is called {pattern!r}{nearest(pattern, agents)}")
    chosen = {}
    for agent in agents:
        named = next((each for pattern, each in players.items() if fits(agent, pattern)), None)
        if named is None and len(own[agent]) > 1:
            raise ConfigError(
                f"agent {agent!r} is played by {listed(own[agent], one_of)} in each episode of "
                "this run: name a player for it"
            )
        chosen[agent] = own[agent][0] if named is None else named
    return chosen


def _seated(
    envs: MultiAgentEnvs,
    chosen: Mapping[str, str | Policy],
    seed: int,
    named: Callable[[str], Policy],
) -> list[ModuleSlots]:
    """Make the players, each once so that it acts in batches."""
    from juggler.envrunner.environments.seeding import player_seed
    from juggler.envrunner.multi_agent.line_up import Role
    from juggler.envrunner.multi_agent.module_slots import ModuleSlots
    from juggler.policies.policy import Policy

    number_of = {agent: k for k, group in enumerate(envs.groups) for agent in group.agents}
    agents_of: dict[tuple[str | Policy, int], list[str]] = {}
    for agent in envs.agents:
        agents_of.setdefault((chosen[agent], number_of[agent]), []).append(agent)
    made: list[ModuleSlots] = []
    for (given, number), agents in agents_of.items():
        # "random" may play in several groups; its name is only for messages.
        role = Role(str(given), tuple(agents), number, envs.groups[number])
        # With one seed for all, equal policies would always act the same.
        own_seed = player_seed(seed, len(made))
        if given == RANDOM:
            made.append(ModuleSlots.at_random(role, envs.num_envs, envs.agents, 1, own_seed))
            continue
        policy = named(given) if isinstance(given, str) else given
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"{given!r} cannot play {', '.join(role.agents)}: a player is a name, the path of "
                "a checkpoint, or a policy from juggler.load_policy"
            )
        _must_fit(policy, given, role.spaces)
        policy.seed(own_seed)
        made.append(ModuleSlots(role, envs.num_envs, envs.agents, policy.actor(), 1, 0))
    return made


def _policy(player: str, checkpoint: Path, module_ids: Sequence[str]) -> Policy:
    """Load a named player: a module, a copy, or another checkpoint."""
    from juggler.policies.policy import load_policy

    if player in module_ids:
        return load_policy(checkpoint, module_id=player)
    kept = run_of(checkpoint) / DIRECTORY  # has the copies of a league
    if found := place_and_module(player) or place_and_module(str(kept / player)):
        return load_policy(found[0], module_id=found[1])
    copies = sorted(each.name for each in kept.iterdir()) if kept.is_dir() else []
    known = dict.fromkeys([*module_ids, *copies, RANDOM])
    kinds = "a module or a copy" if copies else "a module"
    raise ConfigError(
        f"{player!r} is neither {kinds} of this run nor the path of a checkpoint"
        f"{nearest(player, known)}"
    )


def _must_fit(policy: Policy, player: str | Policy, group: AgentGroup) -> None:
    for name in ("observation_space", "action_space"):
        has, needs = getattr(policy, name), getattr(group, name)
        # Messages are compared, since a checkpoint holds MultiBinary([5]) as MultiBinary(5).
        if has != needs and space_to_message(has) != space_to_message(needs):
            raise ValueError(
                f"{player} cannot play {', '.join(group.agents)}: its {name} is {has}, and theirs "
                f"is {needs}"
            )


#: Default directory of demonstrations within a run's directory.
DEMONSTRATIONS: Final = "demonstrations"


@dataclass(frozen=True, slots=True)
class Demonstrations(Evaluated):
    """A data set of episodes that a checkpoint's policy played deterministically.

    Attributes:
        dataset: its directory.
    """

    dataset: Path = Path()


def record(
    checkpoint: str | Path,
    episodes: int = 100,
    seed: int = 0,
    *,
    to: str | Path | None = None,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    watch: Callable[[int, int], None] | None = None,
    explore: bool = False,
) -> Demonstrations:
    """Record whole episodes of a policy as a Minari data set.

    The policy plays as in `evaluate`. The data set has observations as the environment gave them,
    and actions as it received them.

    The data set appears once all episodes are recorded; a failed recording leaves no data set.

    Args:
        checkpoint: as in `evaluate`.
        episodes: number of episodes.
        seed: of the environments.
        to: the data set's directory, which must not exist; None: `demonstrations` in the run's
            directory.
        env: another environment than the run's.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the run's connectors again.
        watch: as in `evaluate`.
        explore: draw actions as in training, instead of taking the most likely ones. The data set
            then has other actions than the best ones, as algorithms for data sets need.

    Raises:
        ConfigError: as `evaluate`, or the run has several agents.
        CheckpointError: as `evaluate`.
        EnvironmentFailed: an environment failed.
        DatasetError: the data set cannot be written.
    """
    played = evaluate(
        checkpoint,
        episodes,
        seed,
        env=env,
        module=module,
        connectors=connectors,
        watch=watch,
        recording=partial(_recording, to, env if callable(env) else None, episodes, explore),
        explore=explore,
    )
    # Only now: a failed recording raises, and leaves no directory.
    place = _place_of(to, played.checkpoint)
    return Demonstrations(played.checkpoint, played.returns, played.lengths, [], {}, dataset=place)


def _place_of(to: str | Path | None, checkpoint: Path) -> Path:
    return Path(to).expanduser() if to is not None else run_of(checkpoint) / DEMONSTRATIONS


@contextmanager
def _recording(
    to: str | Path | None,
    factory: Callable[..., Any] | None,
    episodes: int,
    explore: bool,
    config: RunConfig,
    where: Path,
    envs: VectorEnv[Any, Any, Any],
) -> Iterator[VectorEnv[Any, Any, Any]]:
    """Record episodes of these environments as a data set."""
    from juggler.envrunner.datasets import dataset_writer as writers
    from juggler.envrunner.evaluation import shares

    about = {
        "algorithm_name": "juggler",
        "description": f"{episodes} episodes of the policy in {where.name}, which "
        + ("drew its actions" if explore else "took its most likely actions"),
    }
    spaces = envs.single_observation_space, envs.single_action_space
    spec = writers.spec_of(config.env_runner, factory)
    name = f"juggler/{writers.name_for_minari(config.env_runner.env)}-v0"
    with writers.writing(_place_of(to, where), name, *spaces, spec, about) as writer:
        yield writers.EpisodeRecorder(envs, writer.add, shares(episodes, envs.num_envs))
