"""The keys of a league, and those of its builders."""

from __future__ import annotations

import pytest

from juggler.driver.config import RunConfig
from juggler.driver.league.config import LeagueConfig


@pytest.mark.parametrize("given", ["none", None])
def test_none_is_the_word_for_none_in_a_key_of_a_builder_too(given) -> None:
    options = {"last_copy_steps": given, "mains": 2}
    builder = LeagueConfig.from_table({"builder": "alphastar", "options": options}).make_builder()
    assert builder.last_copy_steps is None  # type: ignore[attr-defined]


def test_the_name_of_a_builder_stands_for_a_table_with_it() -> None:
    by_name = RunConfig.from_flat({"env": "x:Y", "league": "rllib"})
    assert by_name.agents.league == {"builder": "rllib"}


def test_a_team_has_agents_of_the_environment() -> None:
    config = LeagueConfig(teams=[["red_0", "red_1"]])
    assert config.sides(("red_0", "blue", "red_1")) == (("red_0", "red_1"), ("blue",))
    with pytest.raises(ValueError, match="called 'red_1'"):
        config.sides(("red_0", "blue"))


def test_somebody_has_to_be_left_to_play_against() -> None:
    config = LeagueConfig(teams=[["a", "b"]])
    with pytest.raises(ValueError, match=r"^teams: "):
        config.sides(("a", "b"))
