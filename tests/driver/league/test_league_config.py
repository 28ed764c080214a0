"""The keys of a league, and those of its builders."""

from __future__ import annotations

import pytest

from juggler.driver.config import RunConfig
from juggler.driver.league.builders import BUILDERS
from juggler.driver.league.config import LeagueConfig


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_every_builder_that_ships_begins_with_its_defaults(builder) -> None:
    config = LeagueConfig.from_table({"builder": builder})
    assert type(config.make_builder()) is BUILDERS[builder]


def test_keys_reach_the_league_and_its_builder() -> None:
    table = {"builder": "alphastar", "decay": 0.9, "options": {"main_exploiters": 7}}
    config = LeagueConfig.from_table(table)
    assert config.decay == 0.9
    assert config.make_builder().main_exploiters == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["none", None])
def test_none_is_the_word_for_none_in_a_key_of_a_builder_too(given) -> None:
    options = {"last_copy_steps": given, "mains": 2}
    builder = LeagueConfig.from_table({"builder": "alphastar", "options": options}).make_builder()
    assert builder.last_copy_steps is None  # type: ignore[attr-defined]


def test_the_name_of_a_builder_stands_for_a_table_with_it() -> None:
    by_name = RunConfig.from_flat({"env": "x:Y", "league": "rllib"})
    assert by_name.agents.league == {"builder": "rllib"}


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"bilder": "none"}, "league has no key 'bilder': did you mean 'builder'?"),
        ({"builder": "alpha_star"}, "builder = 'alpha_star' is not known: did you mean"),
        ({"options": {"main": 2}}, "options has no key 'main': did you mean 'mains'?"),
        ({"options": {"mains": 0}}, "options: mains = 0: must be a whole number of at least 1"),
        ({"options": {"mains": "2"}}, 'options: mains: expected a whole number, not "2"'),
        ({"builder": "alphastar", "options": {"main_above": 2}}, "main_above = 2: must be a num"),
        (
            {"builder": "alphastar", "options": {"max_phase_steps": 10}},
            "max_phase_steps = 10: must be a whole number of at least 500000",
        ),
        (
            {"builder": "alphastar", "options": {"pfsp_probability": 0.9}},
            "pfsp_probability = 0.9: must be at most 1 with verification_probability = 0.15",
        ),
        (
            {"builder": "alphastar", "options": {"main_weighting": "sqared"}},
            "weighting = 'sqared' is not known: did you mean 'squared'",
        ),
        ({"builder": "rllib", "options": {"league_exploiter_probability": 0.7}}, "must be at most"),
        ({"decay": 0}, "decay = 0: must be above 0"),
        ({"decay": float("nan")}, "decay = nan"),
        ({"evaluation_probability": 0.6}, "evaluation_probability = 0.6: must be from 0 to 0.5"),
        ({"draw_margin": -1}, "draw_margin = -1: must be at least 0"),
        ({"min_games": True}, "min_games = True: must be a whole number"),
        ({"max_historical": 0}, "max_historical = 0"),
        ({"max_historical": 501}, "max_historical = 501: must be at most 500"),
        ({"max_learning": 65}, "max_learning = 65: must be at most 64"),
        ({"recycled": "odlest"}, "did you mean 'oldest'"),
        ({"teams": [["a"], ["b", "a"]]}, "no agent may be in two"),
        ({"fixed": "random"}, 'fixed: expected a list of strings, not "random"'),
        ({"teams": ["a"]}, "expected a list of lists, not"),
        ({"mains": 2}, "league has no key 'mains': it is a key of its table options"),
        (
            {"builder": "alphastar", "options": {"last_copy_steps": "nnoe"}},
            'options: last_copy_steps: expected a whole number, or "none", not "nnoe"',
        ),
        ({"options": {"mains": "none"}}, 'options: mains: expected a whole number, not "none"'),
        ({"options": {"mains": 1.5}}, "options: mains: expected a whole number, not 1.5"),
        ({"fixed": ["random", "random"]}, "names a player twice"),
    ],
)
def test_a_key_that_is_wrong_is_named(table, told) -> None:
    with pytest.raises(ValueError, match=told.replace("[", r"\[")):
        LeagueConfig.from_table(table)


def test_a_team_has_agents_of_the_environment() -> None:
    config = LeagueConfig(teams=[["red_0", "red_1"]])
    assert config.sides(("red_0", "blue", "red_1")) == (("red_0", "red_1"), ("blue",))
    with pytest.raises(ValueError, match="called 'red_1'"):
        config.sides(("red_0", "blue"))


def test_somebody_has_to_be_left_to_play_against() -> None:
    config = LeagueConfig(teams=[["a", "b"]])
    with pytest.raises(ValueError, match=r"^teams: "):
        config.sides(("a", "b"))
