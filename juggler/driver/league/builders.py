"""The builders of leagues that ship, and builders of users, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

import msgspec

from juggler.driver.league.league_builder import LeagueBuilder, Pairing, exploiters
from juggler.driver.league.pfsp import Weighting, find_weighting
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    FIXED,
    HISTORICAL,
    LEAGUE_EXPLOITER,
    MAIN,
    MAIN_EXPLOITER,
    RANDOM,
    AddPlayer,
    BuilderCommand,
    FreezePlayer,
    ResetPlayer,
    RetirePlayer,
)
from juggler.driver.league.self_play import Fictitious, SelfPlay, SelfPlayWindow
from juggler.runtime.annotations import typed_by
from juggler.runtime.modules.import_by_name import NamedClasses
from juggler.runtime.near_matches import nearest
from juggler.runtime.wrong_value import misfit


# O. Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning,
# 2019. The rules follow the pseudocode published with the paper.
@dataclass(kw_only=True)
class AlphaStar(LeagueBuilder):
    """Mains, main exploiters and league exploiters.

    Every learning player gets the same number of its own matches. A *main* plays against all
    frozen players, against itself and the other mains, and sometimes against copies that beat it.
    It is copied, and never reset. A *main exploiter* plays against a main, or against copies of it
    while the main is too strong. It is copied and reset. A *league exploiter* plays against all
    frozen players. It is copied, and sometimes reset.

    Frozen players are the copies and the fixed ones. If a rule finds no opponent, it is a main.
    """

    mains: int = 3
    """Number of players with the role main."""

    main_exploiters: int = 3
    """Number of players that look for flaws of the mains."""

    league_exploiters: int = 6
    """Number of players that look for flaws of the whole league."""

    main_weighting: Weighting = "squared"
    """Weighting of frozen opponents of mains: squared, variance, linear, linear_capped, uniform, or
    "package.module:function", from win rate to weight."""

    league_weighting: Weighting = "linear_capped"
    """Weighting of opponents of league exploiters."""

    pfsp_probability: float = 0.5
    """Probability that a main plays against frozen players."""

    verification_probability: float = 0.15
    """Probability that a main plays against copies that beat it, if there are any."""

    exploited_below: float = 0.3
    """Win rate of a main below which copies of main exploiters beat it."""

    forgotten_below: float = 0.7
    """Win rate of a main against a main's copy below which it has forgotten how to beat it."""

    self_play_above: float = 0.3
    """Win rate above which a main plays against another main; below it, against copies of that
    main."""

    main_above: float = 0.1
    """Win rate above which a main exploiter plays against a main; below it, against copies of that
    main."""

    snapshot_above: float = 0.7
    """Win rate against each frozen player (main exploiters: each main) above which a player is
    copied."""

    min_phase_steps: int = 500_000
    """Minimum number of training steps between copies of a player, or since its reset.
    (AlphaStar: 2e9)"""

    max_phase_steps: int = 1_000_000
    """Maximum number of training steps before a player is copied. (AlphaStar: 4e9)"""

    league_reset_probability: float = 0.25
    """Probability that a league exploiter is reset when it is copied."""

    last_copy_steps: int | None = None
    """Number of training steps of all players after which none is copied or reset, exploiters
    retire, and mains learn to beat the last copies; none: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("main_exploiters", "league_exploiters", "min_phase_steps"):
            self.check_at_least(key, 0)
        self.check_at_least("max_phase_steps", max(self.min_phase_steps, 1))
        if self.last_copy_steps is not None:
            self.check_at_least("last_copy_steps", 0)
        # Probabilities, and limits of win rates.
        self.check_fractions(
            "pfsp_probability",
            "verification_probability",
            "exploited_below",
            "forgotten_below",
            "self_play_above",
            "main_above",
            "snapshot_above",
            "league_reset_probability",
        )
        find_weighting(self.main_weighting, "main_weighting")
        find_weighting(self.league_weighting, "league_weighting")
        self._check_sum("pfsp_probability", "verification_probability")

    def initial(self) -> Iterable[BuilderCommand]:
        mains = list(super().initial())
        others = exploiters(self.main_exploiters, self.league_exploiters)
        return [*mains, *others, *(FreezePlayer(main.player_id) for main in mains)]

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        if self.last_copy_steps is not None and results.steps >= self.last_copy_steps:
            for role in (MAIN_EXPLOITER, LEAGUE_EXPLOITER):
                yield from map(RetirePlayer, results.players(role))
            return
        for player in results.players(learning=True):
            role = results.player(player).role
            measure = results.mains() if role == MAIN_EXPLOITER else _frozen(results)
            if not self._ready(player, measure, results):
                continue
            yield FreezePlayer(player)
            if role == MAIN_EXPLOITER or (
                role == LEAGUE_EXPLOITER and results.random.random() < self.league_reset_probability
            ):
                yield ResetPlayer(player)

    def _ready(self, player: str, measure: list[str], results: LeagueResults) -> bool:
        steps = results.player(player).phase_steps
        least = results.least_win_rate(player, measure)
        beats_all = least is not None and least > self.snapshot_above
        return steps >= self.max_phase_steps or (steps >= self.min_phase_steps and beats_all)

    def match(self, results: LeagueResults) -> Pairing:
        home = results.random.choice(results.players(learning=True))
        match results.player(home).role:
            case "main":
                return self._match_of_main(home, results)
            case "main_exploiter":
                return self._match_of_main_exploiter(home, results)
            case _:
                frozen = results.pfsp(home, _frozen(results), self.league_weighting)
                mains = dict.fromkeys(results.mains() or [home], 1.0)
                return Pairing(home, frozen or mains, "league")

    def _match_of_main(self, home: str, results: LeagueResults) -> Pairing:
        coin = results.random.random()
        if coin < self.pfsp_probability and (frozen := _frozen(results)):
            return Pairing(home, results.pfsp(home, frozen, self.main_weighting), "pfsp")
        opponent = results.random.choice(results.mains())
        verifies = (
            self.pfsp_probability <= coin < (self.pfsp_probability + self.verification_probability)
        )
        if verifies and (rivals := self._verification(home, opponent, results)):
            return Pairing(home, results.pfsp(home, rivals, self.main_weighting), "verification")
        copies = results.players(parent=opponent)
        if results.win_rate(home, opponent) > self.self_play_above or not copies:
            return Pairing(home, {opponent: 1.0}, "self-play")
        return Pairing(home, results.pfsp(home, copies, "variance"), "curriculum")

    def _verification(self, home: str, opponent: str, results: LeagueResults) -> list[str]:
        """Return copies that beat it."""
        exploiters = results.players(HISTORICAL, origin=MAIN_EXPLOITER)
        least = results.least_win_rate(home, exploiters)
        if least is not None and least < self.exploited_below:
            return exploiters
        copies = without_monotonic_suffix(
            {copy: results.win_rate(home, copy) for copy in results.players(parent=opponent)}
        )
        least = results.least_win_rate(home, copies)
        return copies if least is not None and least < self.forgotten_below else []

    def _match_of_main_exploiter(self, home: str, results: LeagueResults) -> Pairing:
        opponent = results.random.choice(results.mains() or [home])
        copies = results.players(parent=opponent)
        if results.win_rate(home, opponent) > self.main_above or not copies:
            return Pairing(home, {opponent: 1.0}, "exploit")
        return Pairing(home, results.pfsp(home, copies, "variance"), "curriculum")


def without_monotonic_suffix(win_rates: dict[str, float]) -> list[str]:
    """Leave out the newest opponents, while win rates only fall.

    Copies that improve become harder to beat. An older copy that is harder to beat than a newer one
    shows that something was forgotten.

    Args:
        win_rates: by opponent, the oldest first.
    """
    opponents, rates = list(win_rates), list(win_rates.values())
    for last in range(len(rates) - 1, 0, -1):
        if rates[last - 1] < rates[last]:
            return opponents[: last + 1]
    return []


def _frozen(results: LeagueResults) -> list[str]:
    """Return copies and fixed players, without mains that do not learn."""
    frozen = results.players(learning=False)
    return [player for player in frozen if results.player(player).role != MAIN]


@dataclass(kw_only=True)
class Rllib(LeagueBuilder):
    """One main, exploiters and random players; frequent winners are copied.

    With the probabilities below, a match is for a league exploiter, for a main exploiter, or for a
    main against itself. A league exploiter plays against any frozen player. A main exploiter plays
    against a main or against copies of mains. No player is reset.

    Differences from RLlib: one draw decides both sides of a match; a draw counts as half a win,
    and win rates forget slowly; a player is copied only after `min_matches` games and some
    training since its last copy; exploiters play from the start, before any main is copied.
    """

    random_players: int = 2
    """Number of players that act at random."""

    main_exploiters: int = 4
    """Number of players that look for flaws of the main."""

    league_exploiters: int = 4
    """Number of players that look for flaws of the whole league."""

    snapshot_at: float = 0.9
    """Win rate over all opponents from which on a player is copied."""

    keep_training_probability: float = 0.0
    """Probability that a new copy of an exploiter continues to learn as its own player."""

    league_exploiter_probability: float = 0.33
    """Probability that a match is for a league exploiter."""

    main_exploiter_probability: float = 0.33
    """Probability that a match is for a main exploiter."""

    learning_main_probability: float = 0.5
    """Probability that a main exploiter plays against a learning main instead of a copy."""

    min_matches: int = 100
    """Number of games against other players before a player is copied, and between copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("random_players", "main_exploiters", "league_exploiters"):
            self.check_at_least(key, 0)
        self.check_at_least("min_matches", 1)
        self.check_fractions(
            "snapshot_at",
            "keep_training_probability",
            "league_exploiter_probability",
            "main_exploiter_probability",
            "learning_main_probability",
        )
        self._check_sum("league_exploiter_probability", "main_exploiter_probability")

    def initial(self) -> Iterable[BuilderCommand]:
        yield from super().initial()
        yield from exploiters(self.main_exploiters, self.league_exploiters)
        for number in range(self.random_players):
            yield AddPlayer(f"random-{number}", FIXED, learning=False, source=RANDOM)

    def build(self, results: LeagueResults) -> Iterable[BuilderCommand]:
        for player_id in results.players(learning=True):
            player = results.player(player_id)
            if player.phase_games < self.min_matches or player.phase_steps == 0:
                continue
            rate = results.overall_win_rate(player_id, self.min_matches)
            if rate is None or rate < self.snapshot_at:
                continue
            continues = results.random.random() < self.keep_training_probability
            if continues and player.role != MAIN:
                yield AddPlayer(f"{player_id}-{player.copies}", player.role, source=player_id)
            yield FreezePlayer(player_id)

    def match(self, results: LeagueResults) -> Pairing:
        exploiters = (
            (LEAGUE_EXPLOITER, self.league_exploiter_probability),
            (MAIN_EXPLOITER, self.main_exploiter_probability),
        )
        coin = results.random.random()
        for role, probability in exploiters:
            if coin < probability and (homes := results.players(role, learning=True)):
                return self._match_of_exploiter(results.random.choice(homes), role, results)
            coin -= probability
            if coin < 0:
                break
        home = results.random.choice(results.mains() or results.players(learning=True))
        return Pairing(home, {home: 1.0}, "self-play")

    def _match_of_exploiter(self, home: str, role: str, results: LeagueResults) -> Pairing:
        mains = results.players(MAIN, learning=True) or [home]
        if role == LEAGUE_EXPLOITER:
            opponents = results.players(learning=False)
        elif results.random.random() < self.learning_main_probability:
            opponents = mains
        else:
            opponents = results.players("historical", origin=MAIN)
        return Pairing(home, dict.fromkeys(opponents or mains, 1.0), role)


NO_BUILDER: Final = "none"  # the builder that begins with learning players, and changes nothing

#: The builders that ship.
BUILDERS: Final[dict[str, type[LeagueBuilder]]] = {
    "alphastar": AlphaStar,
    "fictitious": Fictitious,
    NO_BUILDER: LeagueBuilder,
    "rllib": Rllib,
    "self_play": SelfPlay,
    "self_play_window": SelfPlayWindow,
}

#: Types of keys whose values are checked: a user's builder may have keys of other types.
_PLAIN: Final = (int, float, str, bool, int | None, float | None, str | None, bool | None)


def _checked(name: str, kind: object) -> type[LeagueBuilder]:
    """Check that this is a builder class with types for its keys."""
    if not (isinstance(kind, type) and issubclass(kind, LeagueBuilder)):
        raise ValueError(
            f"builder {name!r} must be a class derived from juggler.LeagueBuilder, not {kind!r}"
        )
    own = [key for key in typed_by(kind) if not key.startswith("_")]
    if own and "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"builder {name!r} has its own keys, such as {own[0]!r}: write "
            "@dataclass(kw_only=True) above the class"
        )
    assert is_dataclass(kind)
    return kind


_classes = NamedClasses("builder", BUILDERS, _checked, "league={{'builder': {}, ...}}")
find_builder = _classes.find
register_builder = _classes.register


def make_builder(name: object, options: Mapping[str, Any]) -> LeagueBuilder:
    """Make the builder of a league.

    Raises:
        ValueError: there is no such builder, or it has no such key, or a value is wrong.
    """
    kind = find_builder(name)
    must_be_keys(options, kind, "options")
    try:
        hints = get_type_hints(kind)
    except NameError:  # the types are imported only for a type checker
        hints = {}
    try:
        values = {
            key: of_type(key, value, hints[key]) if hints.get(key) in _PLAIN else value
            for key, value in options.items()
        }
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options: {error}") from None


def must_be_keys(table: Mapping[str, Any], kind: type[Any], name: str) -> None:
    """Check that a dataclass has all keys of a table.

    Raises:
        ValueError: the table has an unknown key; names the nearest one.
    """
    known = [each.name for each in fields(kind)]
    for key in table:
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}{nearest(key, known)}")


def of_type(key: str, value: object, hint: Any) -> Any:
    """Convert a key's value from a file or a script.

    Raises:
        ValueError: it has another type than its key.
    """
    if NoneType in get_args(hint) and isinstance(value, str) and value == "none":
        value = None  # TOML has no None
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise ValueError(f"{key}: {misfit(hint, value)}") from None
    return value
