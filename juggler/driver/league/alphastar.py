"""AlphaStar's league: mains, and exploiters that look for their flaws.

O. Vinyals et al., Grandmaster level in StarCraft II using multi-agent reinforcement learning, 2019.
The rules follow the pseudocode published with the paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from juggler.driver.league.builder import LeagueBuilder, Pairing, exploiters
from juggler.driver.league.pfsp import Weighting, find_weighting
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    HISTORICAL,
    LEAGUE_EXPLOITER,
    MAIN,
    MAIN_EXPLOITER,
    BuilderCommand,
    FreezePlayer,
    ResetPlayer,
    RetirePlayer,
)


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

    # Copies and resets.

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

    # Matches.

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
