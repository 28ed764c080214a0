"""Builders of one's own, by name or given in Python."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from juggler.driver.league.builders import AlphaStar, find_builder, register_builder
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league_builder import LeagueBuilder, Pairing
from juggler.driver.league.pfsp import pfsp

MINE = """
from dataclasses import dataclass
from juggler import FreezePlayer, LeagueBuilder, LeagueResults, Pairing

@dataclass(kw_only=True)
class Mine(LeagueBuilder):
    every: int = 100

    def build(self, results: LeagueResults):
        for player in results.players("main"):
            if results.player(player).phase_steps >= self.every:
                yield FreezePlayer(player)

class NoKeys(LeagueBuilder):
    def match(self, results):
        return Pairing("main-0", {"main-0": 1.0})

class NoDataclass(LeagueBuilder):
    every: int = 100

class Other: pass

def hard(rate): return 1.0 if rate < 0.3 else 0.0
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_league.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_league", raising=False)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"builder": "my_league:Mien"}, "has no 'Mien': did you mean 'Mine'?"),
        ({"builder": "my_leage:Mine"}, "there is no Python module 'my_leage' here"),
        ({"builder": "my_league.py:Mine"}, "names a file instead of a Python module"),
        ({"builder": "my_league:Other"}, "must be a class derived from"),
        ({"builder": "my_league:hard"}, "must be a class derived from"),
        ({"builder": "my_league:NoDataclass"}, r"write @dataclass\(kw_only=True\)"),
        ({"builder": "my_league:Mine", "options": {"evry": 7}}, "did you mean 'every'?"),
        ({"builder": "__main__:Gone"}, r"pass league=\{'builder': Gone"),
    ],
)
def test_what_is_wrong_with_it_is_told(table, told) -> None:
    with pytest.raises(ValueError, match=told):
        LeagueConfig.from_table(table)


def test_a_class_of_a_script_is_found_by_the_name_that_stands_for_it() -> None:
    @dataclass(kw_only=True)
    class OfScript(LeagueBuilder):
        def match(self, results):
            return Pairing("main-0", {"main-0": 1.0})

    assert find_builder(register_builder(OfScript)) is OfScript
    with pytest.raises(ValueError, match="LeagueBuilder"):
        register_builder(OfScript())


def test_a_weighting_may_be_a_function_by_name() -> None:
    assert pfsp({"a": 0.2, "b": 0.9}, "my_league:hard") == {"a": 1.0, "b": 0.0}


@pytest.mark.parametrize("key", ["main_weighting", "league_weighting"])
@pytest.mark.parametrize("weighting", ["squard", "my_league:hrd"])
def test_an_unknown_weighting_is_told_with_the_key_that_names_it(key: str, weighting: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} .*did you mean"):
        AlphaStar(**{key: weighting})
