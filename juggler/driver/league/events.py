"""What the league is told (events) and what it asks for in return (commands).

Terms
    player      a policy of the league. It learns, or it is frozen.
    side        the agents of an environment that one player plays in a match: one agent, or a team.
    match       one episode. Its id is never used twice in a run.
    line-up     who plays each side of a match. It is drawn once, and holds until the match ends.
    attempt     how often the line-up of a match has been drawn anew.
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
    """Somebody can play a match."""


@dataclass(frozen=True, slots=True)
class MatchFinished:
    """A match is over.

    Attributes:
        match_id: of the match.
        attempt: of the line-up that was played; what comes of an earlier one does not count.
        returns: by agent, its return. An agent that never came is absent.
        length: of the episode, in environment steps.
    """

    match_id: int
    attempt: int
    returns: Mapping[str, float]
    length: int

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
    """Who played the match is gone, and brings no outcome."""

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
    """A player's weights can be fetched: from now on it can be in line-ups."""

    player_id: str


@dataclass(frozen=True, slots=True)
class PlayerLost:
    """A player cannot play for now, because its learner is gone. `PlayerReady` brings it back."""

    player_id: str


@dataclass(frozen=True, slots=True)
class PlayerRemoved:
    """A player is gone for good, or the copy that it was to be could not be made."""

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
    """Play this match.

    Attributes:
        match_id: of the match.
        attempt: 0, and 1 more each time that the line-up is drawn anew.
        players: by agent, the id of the player that plays it.
        home: the player for whose sake the match is played.
        branch: the rule by which its opponents were drawn, for people.
    """

    match_id: int
    attempt: int
    players: Mapping[str, str]
    home: str
    branch: str


@dataclass(frozen=True, slots=True)
class CancelMatch:
    """Nobody can play this match any more."""

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
    """Copy a player that learns. The copy never learns, and has the role "historical".

    Attributes:
        player_id: whose copy it is.
        copy_id: the copy's id. A builder leaves it empty, and the league fills it in.
    """

    player_id: str
    copy_id: str = ""


@dataclass(frozen=True, slots=True)
class ResetPlayer:
    """Give a player that learns other weights and a new optimizer; its schedules begin at 0.

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
