"""Events that the league books, and commands that it returns.

Terms
    player      a policy of the league. It learns, or it is frozen.
    side        the agents of an environment that one player plays in a match: one agent, or a team.
    match       one episode. Its id is never used twice in a run.
    line-up     the player of each side of a match. It is drawn once, and kept until the match ends.
    attempt     how often the line-up of a match has been redrawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: What a player begins as or is reset to: the policy that it had before any training.
INITIAL: Final = "initial"
#: What a player is that draws every action at random.
RANDOM: Final = "random"


@dataclass(frozen=True, slots=True)
class MatchRequested:
    """An EnvRunner can play a match."""


@dataclass(frozen=True, slots=True)
class MatchFinished:
    """A match is over."""

    match_id: int
    attempt: int  # of the line-up that was played; what comes of an earlier one does not count
    returns: Mapping[str, float]  # by agent, its return. An agent that never came is absent.
    length: int  # of the episode, in environment steps

    def __post_init__(self) -> None:
        for agent, value in self.returns.items():
            if not math.isfinite(value):
                raise ValueError(
                    f"match {self.match_id}: the return of {agent[:100]} is {value}: must be finite"
                )
        if self.length < 0:
            raise ValueError(f"match {self.match_id} had {self.length} steps: must be at least 0")


@dataclass(frozen=True, slots=True)
class MatchLost:
    """The EnvRunner of a match is gone, and will report no outcome."""

    match_id: int


@dataclass(frozen=True, slots=True)
class StepsTrained:
    """A player was trained on this many more steps."""

    player_id: str
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"{self.player_id} was trained on {self.steps} steps: at least 0")


@dataclass(frozen=True, slots=True)
class PlayerReady:
    """A player's weights can be fetched, so it can be in line-ups."""

    player_id: str


@dataclass(frozen=True, slots=True)
class PlayerLost:
    """A player cannot play until `PlayerReady`, because its learner is gone."""

    player_id: str


@dataclass(frozen=True, slots=True)
class PlayerRemoved:
    """A player is gone for good, or could not be copied."""

    player_id: str


Event = (
    MatchRequested
    | MatchFinished
    | MatchLost
    | StepsTrained
    | PlayerReady
    | PlayerLost
    | PlayerRemoved
)


@dataclass(frozen=True, slots=True)
class AssignLineUp:
    """Play this match."""

    match_id: int
    attempt: int  # 0, and 1 more each time that the line-up is redrawn
    players: Mapping[str, str]  # by agent, the id of the player that plays it
    home: str  # the player for whose sake the match is played
    branch: str  # the rule by which its opponents were drawn, for people


@dataclass(frozen=True, slots=True)
class CancelMatch:
    """No EnvRunner can play this match any more."""

    match_id: int


@dataclass(frozen=True, slots=True)
class AddPlayer:
    """Add a player, which is in line-ups once it is ready.

    Attributes:
        player_id: an id that the league has never had.
        role: "main", "main_exploiter", "league_exploiter", "fixed", or any other word.
        learning: whether it is trained.
        source: what it begins as. If it learns: INITIAL or the id of a player, which can play if it
            is a copy; if not: RANDOM or the id of a module with `train = false`.
    """

    player_id: str
    role: str
    learning: bool = True
    source: str = INITIAL


@dataclass(frozen=True, slots=True)
class FreezePlayer:
    """Copy a player that learns; the copy never learns.

    The copy has the role "historical".

    Attributes:
        player_id: whose copy it is.
        copy_id: the copy's id. A builder leaves it empty, and the league fills it in.
    """

    player_id: str
    copy_id: str = ""


@dataclass(frozen=True, slots=True)
class ResetPlayer:
    """Give a player other weights, a new optimizer, and schedules from 0.

    Attributes:
        player_id: of the player, which can play.
        source: whose weights: INITIAL, or the id of a player that can play and does not learn.
    """

    player_id: str
    source: str = INITIAL


@dataclass(frozen=True, slots=True)
class RetirePlayer:
    """Let go of a player. Its place in the lineage is kept."""

    player_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell people what the league could not do, and why."""

    message: str


#: What a builder may ask for.
BuilderCommand = AddPlayer | FreezePlayer | ResetPlayer | RetirePlayer

Command = AssignLineUp | CancelMatch | BuilderCommand | Report
