"""Plays matches between given players, in this process, without workers or streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.evaluating import warns_of_endless
from juggler.driver.league.config import LeagueConfig
from juggler.driver.script_classes import must_be_given_again
from juggler.envrunner.agent_names import matches as fits
from juggler.envrunner.setup import RANDOM
from juggler.runtime.checkpoints.checkpoint import read_or_warn
from juggler.runtime.checkpoints.frozen import DIRECTORY, place_and_module, run_of
from juggler.runtime.nearest import listed, nearest, one_of
from juggler.runtime.wire.spaces import space_to_message

if TYPE_CHECKING:
    from juggler.envrunner.multi_agent.turns import AgentGroup
    from juggler.policies.matches import Match, Player, Record
    from juggler.policies.policy import Policy


@dataclass(frozen=True, slots=True, repr=False)
class PlayedMatches:
    """Matches between given players.

    Attributes:
        checkpoint: path of the checkpoint whose environment and modules were played.
        players: by agent, who played it, for people.
        matches: in the order in which they began.
        records: by agent, its returns, wins, draws and losses.
        videos: paths of the videos, in the order of the matches; empty if none were recorded.
    """

    checkpoint: Path
    players: dict[str, str]
    matches: list[Match]
    records: dict[str, Record]
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
    """Play whole episodes of the environment of a run, with given players for its agents.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is taken.
        players: by agent, or by a pattern of agents' names with `*`, `?` and `[...]`, who plays it:
            the id of a module in the checkpoint; "random"; the path of another checkpoint or run,
            with ":" and the id of a module behind it if it has several; or a policy. The first
            pattern that matches counts. Other agents are played by their own modules.
        episodes: how many matches to play.
        seed: of the environments and of the draws. Each player draws numbers of its own: given
            policies are seeded anew, too, so that the same seed gives the same matches.
        explore: policies draw their actions as in training, instead of taking the most likely ones.
            Without it, policies repeat the same match if neither they nor the game draw anything.
        env: another environment than the run's; required if the run was trained on a callable.
        video: a directory for videos.
        videos: how many matches `video` films, from the first on.
        watch: called after each step of all environments, with the number of matches that are over
            and of steps so far.

    Raises:
        ConfigError: the run has environments with one agent, or nobody is called like a player.
        CheckpointError: a checkpoint is missing or damaged.
        EnvironmentFailed: an environment failed.
        ValueError: a policy does not fit an agent's spaces; or the environment cannot be recorded,
            or a package for videos is missing.
    """
    # Imported here because they import torch, which the driver does without.
    from juggler.envrunner.multi_agent.making import make_multi_agent_envs
    from juggler.policies import matches

    if episodes < 1:
        raise ConfigError(f"episodes = {episodes}: must be at least 1")
    if videos < 1:
        raise ConfigError(f"videos = {videos}: must be at least 1")
    found = read_or_warn(checkpoint)
    where = found.path or Path(checkpoint)
    named = {"env": env} if isinstance(env, str) else {}
    config = RunConfig.to_act({**found.config, **named}, where=str(where))
    config.agents.mapping = ""  # who plays is said here
    must_be_given_again(config, env, None, {})
    if not config.played_by:
        raise ConfigError(
            f"{where}: its environment {config.env_runner.env} has one agent, so there are no "
            "matches: use juggler evaluate without --play"
        )
    config.env_runner.envs_per_runner = min(config.env_runner.envs_per_runner, episodes)
    factory, films = env if callable(env) else None, list[Path]()
    if video is not None:
        from juggler.envrunner.multi_agent.game_videos import record_games

        films = [Path(video) / f"match-{number}.mp4" for number in range(min(videos, episodes))]
        factory = record_games(config.env_runner, factory, [list(films)])
    envs = make_multi_agent_envs(config.env_runner, factory)
    try:
        own = config.played_by_in([group.agents for group in envs.groups])
        chosen = _chosen(envs.agents, players, own)
        known = tuple(dict.fromkeys([*config.agents.acting_ids, *found.modules]))
        seats = _Seats(where, known, seed, explore)
        group_of = {agent: group for group in envs.groups for agent in group.agents}
        seated = {agent: seats.player(chosen[agent], group_of[agent]) for agent in envs.agents}
        played = matches.play_matches(envs, seated, episodes, seed, warns_of_endless(watch))
    finally:
        envs.close()
    league = LeagueConfig.from_table(config.agents.league)
    records = matches.records(played, league.teams, league.draw_margin)
    words = {agent: who if isinstance(who, str) else repr(who) for agent, who in chosen.items()}
    return PlayedMatches(where, words, played, records, films)


def _chosen(
    agents: tuple[str, ...], players: Mapping[str, str | Policy], own: Mapping[str, Sequence[str]]
) -> dict[str, str | Policy]:
    """Who plays each agent.

    Args:
        agents: their names.
        players: given, by name or pattern.
        own: by agent, the modules that may play it where nobody is given.

    Raises:
        ConfigError: a pattern matches no agent, or it is not said who plays an agent.
    """
    for pattern in players:
        if not any(fits(agent, pattern) for agent in agents):
            raise ConfigError(f"no agent is called {pattern!r}{nearest(pattern, agents)}")
    chosen = {}
    for agent in agents:
        named = next((who for pattern, who in players.items() if fits(agent, pattern)), None)
        if named is None and len(own[agent]) > 1:
            raise ConfigError(
                f"agent {agent!r} is played by {listed(own[agent], one_of)} in each episode of "
                "this run: name a player for it"
            )
        chosen[agent] = own[agent][0] if named is None else named
    return chosen


class _Seats:
    """The players, each made once, so that agents that share one act in one batch.

    Args:
        checkpoint: of the run.
        module_ids: its modules.
        seed: of the draws.
        explore: see `play_matches`.
    """

    def __init__(
        self, checkpoint: Path, module_ids: tuple[str, ...], seed: int, explore: bool
    ) -> None:
        self._checkpoint, self._module_ids = checkpoint, module_ids
        self._seed, self._explore = seed, explore
        self._made: dict[Any, Player] = {}

    def player(self, who: str | Policy, group: AgentGroup) -> Player:
        """
        Raises:
            ConfigError: nobody is called so, or it is no player.
            ValueError: the policy does not fit the agents' spaces.
        """
        from juggler.envrunner.environments.seeding import player_seed
        from juggler.policies.matches import PolicyPlayer, RandomPlayer
        from juggler.policies.policy import Policy

        key = (who, group.agents) if who == RANDOM else who
        if key not in self._made:
            # With one seed for all, equal policies would always do the same.
            own_seed = player_seed(self._seed, len(self._made))
            if who == RANDOM:
                self._made[key] = RandomPlayer(group.action_space, own_seed)
            else:
                policy = self._policy(who) if isinstance(who, str) else who
                if not isinstance(policy, Policy):
                    raise ConfigError(
                        f"{who!r} cannot play {', '.join(group.agents)}: a player is a name, the "
                        "path of a checkpoint, or what juggler.load_policy returns"
                    )
                _must_fit(policy, who, group)
                policy.seed(own_seed)
                self._made[key] = PolicyPlayer(policy, self._explore)
        return self._made[key]

    def _policy(self, who: str) -> Policy:
        from juggler.policies.loading import load_policy

        if who in self._module_ids:
            return load_policy(self._checkpoint, module_id=who)
        kept = run_of(self._checkpoint) / DIRECTORY  # has the copies of a league
        if found := place_and_module(who) or place_and_module(str(kept / who)):
            return load_policy(found[0], module_id=found[1])
        copies = sorted(each.name for each in kept.iterdir()) if kept.is_dir() else []
        known = dict.fromkeys([*self._module_ids, *copies, RANDOM])
        kinds = "a module or a copy" if copies else "a module"
        raise ConfigError(
            f"{who!r} is neither {kinds} of this run nor the path of a checkpoint"
            f"{nearest(who, known)}"
        )


def _must_fit(policy: Policy, who: str | Policy, group: AgentGroup) -> None:
    for name in ("observation_space", "action_space"):
        has, needs = getattr(policy, name), getattr(group, name)
        # Messages are compared, since a checkpoint holds MultiBinary([5]) as MultiBinary(5).
        if has != needs and space_to_message(has) != space_to_message(needs):
            raise ValueError(
                f"{who} cannot play {', '.join(group.agents)}: its {name} is {has}, and theirs is "
                f"{needs}"
            )
