"""Commands of the league and of its builder.

Terms player a policy of the league. It learns, or it is frozen. side the agents of an environment
    that one player plays in a match: one agent, or a team. match one episode. Its id is never used
    twice in a run. line-up the player of each side of a match. It is drawn once, and kept until
    the match ends. attempt number of times that the line-up of a match was redrawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: Source of a player's first weights, or of a reset: its policy before any training.
INITIAL: Final = "initial"
#: Source of a player that draws every action at random.
RANDOM: Final = "random"


@dataclass(frozen=True, slots=True)
class AssignLineUp:
    """Command to an EnvRunner: play this match."""

    match_id: int
    attempt: int  # 0, and 1 more each time that the line-up is redrawn
    players: Mapping[str, str]  # by agent, the id of its player
    home: str  # the player for which the match is held
    branch: str  # name of the rule that drew its opponents, for people


@dataclass(frozen=True, slots=True)
class CancelMatch:
    """Command to forget a match that no EnvRunner can play any more."""

    match_id: int


@dataclass(frozen=True, slots=True)
class AddPlayer:
    """Adds a player, which plays once it is ready.

    Attributes:
        player_id: an id that the league has never had.
        role: "main", "main_exploiter", "league_exploiter", "fixed", or any other word.
        learning: whether it is trained.
        source: where its first weights come from. A learning player: INITIAL or a player's id;
            copies must be ready. A frozen player: RANDOM or the id of a module with `train =
            false`.
    """

    player_id: str
    role: str
    learning: bool = True
    source: str = INITIAL


@dataclass(frozen=True, slots=True)
class FreezePlayer:
    """Command to copy a learning player; the copy never learns.

    The copy has the role "historical".

    Attributes:
        player_id: the player to copy.
        copy_id: the copy's id. A builder leaves it empty, and the league fills it in.
    """

    player_id: str
    copy_id: str = ""


@dataclass(frozen=True, slots=True)
class ResetPlayer:
    """Command to replace a player's weights and restart optimizer and schedules.

    Attributes:
        player_id: a player that can play.
        source: source of the weights: INITIAL, or the id of a frozen player that can play.
    """

    player_id: str
    source: str = INITIAL


@dataclass(frozen=True, slots=True)
class RetirePlayer:
    """Command to retire a player, which keeps its place in the lineage."""

    player_id: str


@dataclass(frozen=True, slots=True)
class Report:
    """Message for people: what the league could not do, and why."""

    message: str


#: Commands that a builder may give.
BuilderCommand = AddPlayer | FreezePlayer | ResetPlayer | RetirePlayer

Command = AssignLineUp | CancelMatch | BuilderCommand | Report
