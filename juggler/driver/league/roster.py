"""Players of a league, and the commands that change them.

Terms:
    player: a policy of the league. It learns, or it is frozen.
    side: the agents of an environment that one player plays in a match: one agent, or a team.
    match: one episode. Its id is never used twice in a run.
    line-up: the player of each side of a match. It is kept until the match ends, its EnvRunner is
        gone, or a player cannot play any more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from juggler.runtime.near_matches import nearest

#: Source of a player's first weights, or of a reset: its policy before any training.
INITIAL: Final = "initial"
RANDOM: Final = "random"  # source of a player that draws every action at random


@dataclass(frozen=True, slots=True)
class AssignLineUp:
    """Command to an EnvRunner: play this match."""

    match_id: int
    players: Mapping[str, str]  # by agent, the id of its player
    home: str  # the player for which the match is held
    branch: str  # name of the rule that drew its opponents, for people


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

Command = AssignLineUp | BuilderCommand | Report


MAIN: Final = "main"
MAIN_EXPLOITER: Final = "main_exploiter"
LEAGUE_EXPLOITER: Final = "league_exploiter"
HISTORICAL: Final = "historical"
FIXED: Final = "fixed"

_PLAYER_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_PARENT: Final = 52  # leaves room for "-v" and a number


@dataclass(slots=True)
class Player:
    """One policy of the league."""

    player_id: str  # never reused
    role: str  # its role; copies are "historical"
    learning: bool  # whether it is trained
    source: str  # where its first weights came from: INITIAL, RANDOM, a player's id or another name
    parent: str = ""  # the player that was copied; "": not a copy
    origin: str = ""  # role of the parent; without a parent, its own role
    born_at: int = 0  # training steps of the parent when the copy was made
    steps: int = 0  # training steps
    frozen_at: int = -1  # its steps when it was last copied; -1: never
    reset_at: int = 0  # its steps when it was last reset
    reset_to: str = INITIAL  # source of its last reset, like `source`
    phase_games: int = 0  # games against other players since it was last copied or reset
    copies: int = 0  # number of copies made
    life: int = 0  # number of resets
    ready: bool = False  # whether it can play now
    retired: bool = False  # whether it has left permanently

    @property
    def plays(self) -> bool:
        """Whether the player can be in line-ups now."""
        return self.ready and not self.retired

    @property
    def phase_steps(self) -> int:
        """Training steps since the player was last copied or reset."""
        return self.steps - max(self.frozen_at, self.reset_at)


class Roster:
    """All players of the league, past and present, by id, oldest first."""

    def __init__(self, max_learning: int, players: list[Player] | None = None) -> None:
        self._max_learning = max_learning
        self.players = {player.player_id: player for player in players or []}
        # Kept separately, so that retired players do not make matches slower.
        self._present = {key: each for key, each in self.players.items() if not each.retired}

    def __getitem__(self, player_id: str) -> Player:
        """Return a present player, or raise a ValueError."""
        player = self.players.get(player_id)
        if player is None:
            known = [each.player_id for each in self.present()]
            raise ValueError(f"no player is called {player_id!r}{nearest(player_id, known)}")
        if player.retired:
            raise ValueError(f"the player {player_id!r} has been retired")
        return player

    def present(self) -> list[Player]:
        """Players that are not retired, in the order of creation."""
        return list(self._present.values())

    def modelled_on(self, player_id: str, first: Sequence[str]) -> str:
        """Return the ancestor, or first with its role, that lends its settings."""
        player = self.players[player_id]
        for _ in self.players:  # each descends from an earlier one
            if player.player_id in first:
                return player.player_id
            source = None if player.source == INITIAL else self.players.get(player.source)
            if source is None or not (source.learning or source.parent):
                break
            player = source
        known = {each: self.players[each].role for each in first if each in self.players}
        return next((each for each, role in known.items() if role == player.role), first[0])

    # These methods raise ValueError before they change anything.

    def add(self, command: AddPlayer) -> None:
        if not _PLAYER_ID.fullmatch(command.player_id):
            raise ValueError(
                f"{command.player_id[:100]!r} is not a player id: use letters, digits, '_' and "
                "'-', at most 64 of them"
            )
        if command.player_id in self.players:
            raise ValueError(f"the league has had a player {command.player_id!r}: use a new id")
        if command.role == HISTORICAL or not command.role:
            raise ValueError(f"role = {command.role!r}: give {command.player_id} another one")
        # A copy on its way has no weights yet.
        source = self.players.get(command.source)
        if command.learning:
            self._must_be_weights(command.source)
            if source is not None and source.parent and not source.ready:
                raise ValueError(
                    f"{command.player_id} cannot begin as {source.player_id}, which cannot play "
                    "yet: ask again once `results.players()` names it"
                )
            if len(self.learners()) >= self._max_learning:
                raise ValueError(  # without the id: a builder may keep asking, with new ids
                    f"at most max_learning = {self._max_learning} players learn at once, and  "
                    "all places are taken"
                )
        # Only FreezePlayer copies players, because it keeps their lineage.
        elif source is not None and (source.learning or source.parent):
            raise ValueError(
                f"{command.player_id} does not learn, so it cannot begin as {source.player_id}: "
                "FreezePlayer makes copies, which play under their own ids"
            )
        player = Player(command.player_id, command.role, command.learning, command.source)
        player.origin = command.role
        self._begin(player)

    def freeze(self, command: FreezePlayer) -> FreezePlayer:
        """Return the command with the copy's id filled in."""
        player = self._learner(command.player_id)
        if player.frozen_at >= 0 and player.phase_steps == 0:
            raise ValueError(
                f"{player.player_id} has not been trained since it was last copied or reset"
            )
        # An id has at most 64 letters, and is never used again.
        copy_id = f"{player.player_id[:_LONGEST_PARENT]}-v{player.copies}"
        while copy_id in self.players:
            copy_id += "x"
        copy = Player(
            copy_id,
            HISTORICAL,
            learning=False,
            source=player.player_id,
            parent=player.player_id,
            origin=player.role,
            born_at=player.steps,
        )
        # A new phase of the player begins with its copy.
        self._begin(copy)
        player.copies += 1
        player.frozen_at = player.steps
        player.phase_games = 0
        return FreezePlayer(player.player_id, copy_id)

    def reset(self, command: ResetPlayer, must_fit: Callable[[str, str], None]) -> None:
        """Reset a player, unless `must_fit` raises: the weights do not fit."""
        player = self._learner(command.player_id)
        self._must_be_weights(command.source)
        if not player.ready:
            raise ValueError(
                f"{player.player_id} cannot be reset while it cannot play: ask again once "
                "`results.players()` names it"
            )
        # A source that learns would change before its weights are sent.
        source = None if command.source == INITIAL else self[command.source]
        if source is not None and source.learning:
            raise ValueError(
                f"{player.player_id} cannot be reset to {source.player_id}, which learns: copy "
                "that player with FreezePlayer, and reset to the copy once `results.players()` "
                "names it"
            )
        if source is not None and not source.ready:
            raise ValueError(
                f"{player.player_id} cannot be reset to {source.player_id}, which cannot play yet: "
                "ask again once `results.players()` names it"
            )
        # Otherwise resets could loop.
        if player.steps <= player.reset_at:
            raise ValueError(f"{player.player_id} has not been trained since it was last reset")
        must_fit(player.player_id, command.source)
        player.reset_at, player.reset_to = player.steps, command.source
        player.phase_games = 0
        player.life += 1
        player.ready = False

    def retire(self, command: RetirePlayer) -> None:
        player = self[command.player_id]
        if player.learning and len(self.learners()) == 1:
            raise ValueError(f"{player.player_id} is the last learning player: add one first")
        self.remove(player)

    def remove(self, player: Player) -> None:
        player.retired, player.ready = True, False
        self._present.pop(player.player_id, None)

    def learners(self) -> list[Player]:
        """Players that learn, ready or not."""
        return [player for player in self.present() if player.learning]

    def _begin(self, player: Player) -> None:
        self.players[player.player_id] = self._present[player.player_id] = player

    def _learner(self, player_id: str) -> Player:
        if not (player := self[player_id]).learning:
            raise ValueError(f"{player_id} does not learn, so it is neither copied nor reset")
        return player

    def _must_be_weights(self, source: str) -> None:
        if source != INITIAL and (source == RANDOM or self[source].source == RANDOM):
            raise ValueError(f"{source!r} has no weights to begin with")
