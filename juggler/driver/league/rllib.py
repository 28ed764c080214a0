"""The league of RLlib's AlphaStar, without its known defects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from juggler.driver.league.builder import LeagueBuilder, Pairing, exploiters
from juggler.driver.league.results import LeagueResults
from juggler.driver.league.roster import (
    FIXED,
    LEAGUE_EXPLOITER,
    MAIN,
    MAIN_EXPLOITER,
    RANDOM,
    AddPlayer,
    BuilderCommand,
    FreezePlayer,
)


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
