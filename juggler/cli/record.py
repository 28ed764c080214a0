"""`juggler record`: makes a data set of episodes with the policy in a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from juggler.cli.arguments import parse, report_errors
from juggler.cli.playing import Progress, in_words, warnings_told


@dataclass(kw_only=True)
class Arguments:
    """Play whole episodes with the policy in a checkpoint, which takes its most likely actions, and
    write them as a Minari data set, which juggler train --dataset learns from."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or a run directory, whose newest good checkpoint is taken; its `best`, as in
    runs/demo/best, has the checkpoint that played best in an evaluation."""

    episodes: int = 100
    """How many episodes to record."""

    to: str | None = None
    """The directory of the data set, which must not exist; none: demonstrations, in the run's
    directory."""

    seed: int = 0
    """Seed of the environments."""

    env: str | None = None
    """An environment to play instead of the run's."""


def run(arguments: Sequence[str]) -> int:
    given = parse(Arguments, arguments, "record")
    return report_errors("record", lambda: _record(given))


def _record(given: Arguments) -> int:
    from juggler.driver.recording import record

    with warnings_told("record"):
        made = record(
            given.checkpoint,
            given.episodes,
            given.seed,
            to=given.to,
            env=given.env,
            watch=Progress(given.episodes),
        )
    print(f"checkpoint: {made.checkpoint}")
    print(f"{in_words(made)}, {sum(made.lengths)} steps")
    print(f"data set: {made.dataset}")
    learn = ["juggler", "train", "--algorithm", "bc", "--dataset", str(made.dataset)]
    print(f"to learn from it: {shlex.join(learn)} --stop-steps 200000")
    return 0
