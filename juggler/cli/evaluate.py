"""`juggler evaluate`: plays with the policy in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from juggler.cli.arguments import Flag, parse, report_errors
from juggler.cli.playing import Progress, in_words, stdout_kept, warnings_told
from juggler.driver.config import ConfigError
from juggler.driver.record.episode_returns import Played
from juggler.driver.record.run_directory import to_json
from juggler.envrunner.agent_returns import MOST_WITH_METRICS


@dataclass(kw_only=True)
class Arguments:
    """Play whole episodes with the policies in a checkpoint. They take their most likely actions;
    in matches (--play), --explore draws them instead."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or a run directory, whose newest good checkpoint is taken; its `best`, as in
    runs/demo/best, has the checkpoint that played best in an evaluation."""

    episodes: int = 20
    """How many episodes to play."""

    seed: int = 0
    """Seed of the environments."""

    env: str | None = None
    """An environment to play instead of the run's."""

    video: str | None = None
    """A directory for a video of the first episode."""

    videos: int = 1
    """How many episodes --video films, from the first on."""

    play: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Who plays an agent, as AGENT=PLAYER; may be given several times. AGENT may be a pattern, such
    as player_*. PLAYER is a module of the run, "random", or the path of another run or checkpoint,
    with :MODULE behind it if it has several. Then wins, draws and losses are counted."""

    explore: bool = False
    """With --play: policies draw their actions as in training."""

    json: Flag = False
    """Print one JSON object on stdout. What the environment prints goes to stderr."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "evaluate")
    return report_errors("evaluate", lambda: _evaluate(given))


def _evaluate(given: Arguments) -> int:
    from juggler.driver.evaluating import evaluate

    if given.videos != 1 and given.video is None:
        raise ConfigError("--videos: give the directory for them, too, with --video")
    if given.play:
        return _play(given)
    if given.explore:
        raise ConfigError("--explore: only matches are played so; name players with --play")
    with warnings_told("evaluate"), stdout_kept(given.json):
        played = evaluate(
            given.checkpoint,
            given.episodes,
            given.seed,
            env=given.env,
            video=given.video,
            videos=given.videos,
            watch=Progress(given.episodes),
        )
    if given.json:
        agents = [
            {"agent": agent, "module": module_id, "returns": returns}
            for (agent, module_id), returns in played.agent_returns.items()
        ]
        of_returns = {"mean": played.mean, "deviation": played.deviation}
        _print(
            {**asdict(played), **of_returns, "interval": played.interval, "agent_returns": agents}
        )
        return 0
    print(f"checkpoint: {played.checkpoint}")
    print(f"{in_words(played)}, mean length {sum(played.lengths) / len(played.lengths):.1f}")
    if (interval := played.interval) is not None:
        low, high = interval
        print(f"mean return: {low:.1f} to {high:.1f} (95 % interval)")
    for (agent, module_id), returns in list(played.agent_returns.items())[:MOST_WITH_METRICS]:
        each = Played.of(returns)
        print(f"{agent} ({module_id}): return {each.mean:.2f} ± {each.deviation:.2f}")
    _tell_videos(played.videos)
    return 0


def _play(given: Arguments) -> int:
    from juggler.driver.line_ups import play_matches

    players: dict[str, str] = {}
    for pair in given.play:
        agent, equals, player = pair.partition("=")
        if not (agent and equals and player):
            raise ConfigError(f"--play {pair}: expected AGENT=PLAYER, such as player_0=random")
        players[agent] = player
    with warnings_told("evaluate"), stdout_kept(given.json):
        played = play_matches(
            given.checkpoint,
            players,
            given.episodes,
            given.seed,
            explore=given.explore,
            env=given.env,
            video=given.video,
            videos=given.videos,
            watch=Progress(given.episodes),
        )
    if given.json:
        _print(asdict(played))
        return 0
    print(played)
    _tell_videos(played.videos)
    return 0


def _print(said: Mapping[str, Any]) -> None:
    print(json.dumps(to_json(said), default=str))


def _tell_videos(videos: Sequence[Path]) -> None:
    if videos:
        more = f", and {len(videos) - 1} more" if len(videos) > 1 else ""
        print(f"video: {videos[0]}{more}")
