"""`juggler evaluate`: plays the policy in a checkpoint, and records it."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from juggler.cli.arguments import Flag, command
from juggler.driver.config import ConfigError
from juggler.driver.reporting.episode_returns import ReturnStatistics, WithReturns
from juggler.driver.reporting.run_directory import to_json
from juggler.envrunner.agent_returns import MOST_WITH_METRICS


@dataclass(kw_only=True)
class PlayedArguments:
    """What to play."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or a run directory, whose newest good checkpoint is used; its `best`, as in
    runs/demo/best, has the checkpoint with the best evaluation."""

    seed: int = 0
    """Seed of the environments."""

    env: str | None = None
    """Environment to play instead of the run's."""


@dataclass(kw_only=True)
class Arguments(PlayedArguments):
    """Play whole episodes with the policies in a checkpoint.

    They take their most likely actions; --explore draws them instead.

    With --record, the episodes become a data set: see `juggler evaluate --record --help`.
    """

    episodes: int = 20
    """Number of episodes to play."""

    simulator: str | None = None
    """Command of a simulator to play with, as in "./game {address}", instead of an environment in
    Python. The run's simulators_per_runner copies are started."""

    video: str | None = None
    """Directory for a video of the first episode."""

    videos: int = 1
    """Number of episodes that --video films, starting with the first."""

    play: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Player of an agent, as AGENT=PLAYER; may be given several times. AGENT may be a pattern,
    such as player_*. PLAYER is a module of the run, "random", or the path of another run or
    checkpoint, followed by :MODULE if it has several. Wins, draws and losses are counted."""

    explore: Flag = False
    """Draw actions as in training, instead of taking the most likely ones. With several agents,
    only with --play."""

    json: Flag = False
    """Print one JSON object on stdout. Output of the environment goes to stderr."""


@dataclass(kw_only=True)
class RecordArguments(PlayedArguments):
    """Record whole episodes of a policy as a Minari data set.

    `juggler train --dataset` learns from the data set.
    """

    episodes: int = 100
    """Number of episodes to record."""

    to: str | None = None
    """Directory of the data set, which must not exist; none: demonstrations, in the run's
    directory."""

    explore: Flag = False
    """Draw actions as in training, instead of taking the most likely ones."""


def _evaluate(given: Arguments) -> int:
    from juggler.driver.play_checkpoint import evaluate, evaluate_with_simulators

    others = given.env, given.video, given.play, given.explore
    if given.simulator is not None and any(others):
        raise ConfigError(
            "--simulator: cannot be combined with --env, --video, --play or --explore"
        )
    if given.videos != 1 and given.video is None:
        raise ConfigError("--videos: also give their directory, with --video")
    if given.play:
        return _play(given)
    # The environment may print, too.
    with warnings_printed("evaluate"), stdout_kept(given.json):
        if given.simulator is not None:
            watch = EvaluationProgress(given.episodes)
            played = evaluate_with_simulators(
                given.checkpoint, given.simulator, given.episodes, given.seed, watch
            )
        else:
            played = evaluate(given.checkpoint, given.episodes, given.seed, **_how(given))
    if given.json:
        agents = [
            {"agent": agent, "module": module_id, "returns": returns}
            for (agent, module_id), returns in played.agent_returns.items()
        ]
        # JSON has no pairs as keys, and properties are no fields.
        statistics = {key: getattr(played, key) for key in ("mean", "deviation", "interval")}
        values = {**asdict(played), **statistics, "agent_returns": agents}
        print(json.dumps(to_json(values), default=str))
        return 0
    print(f"checkpoint: {played.checkpoint}")
    print(f"{in_words(played)}, mean length {sum(played.lengths) / len(played.lengths):.1f}")
    if (interval := played.interval) is not None:
        low, high = interval
        print(f"mean return: {low:.1f} to {high:.1f} (95 % interval)")
    for (agent, module_id), returns in list(played.agent_returns.items())[:MOST_WITH_METRICS]:
        each = ReturnStatistics.of(returns)
        print(f"{agent} ({module_id}): return {each.mean:.2f} ± {each.deviation:.2f}")
    _print_videos(played.videos)
    return 0


def _play(given: Arguments) -> int:
    from juggler.driver.play_checkpoint import play_matches

    players: dict[str, str] = {}
    for pair in given.play:
        agent, equals, player = pair.partition("=")
        if not (agent and equals and player):
            raise ConfigError(f"--play {pair}: expected AGENT=PLAYER, such as player_0=random")
        players[agent] = player
    with warnings_printed("evaluate"), stdout_kept(given.json):
        played = play_matches(given.checkpoint, players, given.episodes, given.seed, **_how(given))
    if given.json:
        print(json.dumps(to_json(asdict(played)), default=str))
        return 0
    print(played)
    _print_videos(played.videos)
    return 0


def _how(given: Arguments) -> dict[str, Any]:
    return {
        "env": given.env,
        "video": given.video,
        "videos": given.videos,
        "explore": given.explore,
        "watch": EvaluationProgress(given.episodes),
    }


def _print_videos(videos: Sequence[Path]) -> None:
    if videos:
        more = f", and {len(videos) - 1} more" if len(videos) > 1 else ""
        print(f"video: {videos[0]}{more}")


def _record(given: RecordArguments) -> int:
    from juggler.driver.play_checkpoint import record

    with warnings_printed("record"):
        watch = EvaluationProgress(given.episodes)
        how: dict[str, Any] = {"to": given.to, "env": given.env, "watch": watch}
        made = record(given.checkpoint, given.episodes, given.seed, **how, explore=given.explore)
    print(f"checkpoint: {made.checkpoint}")
    print(f"{in_words(made)}, {sum(made.lengths)} steps")
    print(f"data set: {made.dataset}")
    learn = ["juggler", "train", "--algorithm", "bc", "--dataset", str(made.dataset)]
    print(f"to learn from it: {shlex.join(learn)} --stop-steps 200000")
    return 0


PROGRESS_SECONDS = 5.0


class EvaluationProgress:
    """Prints a line every few seconds on stderr."""

    def __init__(self, total: int, noun: str = "episodes") -> None:
        self._total, self._noun = total, noun
        self._printed_at = time.monotonic()

    def __call__(self, ended: int, steps: int = 0) -> None:
        if ended == self._total or time.monotonic() - self._printed_at < PROGRESS_SECONDS:
            return
        self._printed_at = time.monotonic()
        step = f", step {steps}" if steps else ""
        print(f"{ended} of {self._total} {self._noun}{step}", file=sys.stderr)


@contextmanager
def warnings_printed(command: str) -> Iterator[None]:
    """Print warnings on one line of stderr, without their code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(
            f"juggler {command}: {message}", file=sys.stderr
        )
        yield


@contextmanager
def stdout_kept(for_json: bool) -> Iterator[None]:
    """Redirect prints, even of C code, to stderr: stdout has only JSON."""
    if not for_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the buffer of C code
        os.dup2(kept, 1)
        os.close(kept)


def in_words(played: WithReturns) -> str:
    """Describe the number of played episodes, and their returns."""
    if len(played.returns) == 1:
        return f"1 episode: return {played.mean:.1f}"
    return (
        f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f} "
        f"(standard deviation; min {min(played.returns):.1f}, max {max(played.returns):.1f})"
    )


_MODES = {"--record": command("record", RecordArguments, _record)}
run = command("evaluate", Arguments, _evaluate, _MODES)
