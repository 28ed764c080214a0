"""Types in somebody's code that are imported for a type checker alone. Until Python 3.13 they are
words, or their file has the future import of annotations; from 3.14 on they need neither."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest

from juggler.driver.callbacks import checked
from juggler.driver.league.builders import give_builder
from juggler.envrunner.environments.vector import _makes_several
from juggler.learner.algorithms.checking import _without_type
from juggler.runtime.annotations import signature, typed_by
from juggler.runtime.connectors.building import build_env_to_module
from juggler.runtime.connectors.config import ConnectorsConfig

MINE = """
from dataclasses import dataclass
from typing import TYPE_CHECKING

import juggler
from juggler import Run
from juggler.runtime.connectors.connector import ObservationConnector

if TYPE_CHECKING:
    from not_there import Elsewhere


class Hears(juggler.Callback):
    def on_end(self, run: Run, summary: "Elsewhere" if EARLY else Elsewhere) -> None:
        pass


class Adds(ObservationConnector):
    def __init__(
        self, observation_space, action_space, more: "Elsewhere" if EARLY else Elsewhere = 1
    ):
        super().__init__(observation_space, action_space)
        self.more = more

    def __call__(self, observations):
        return observations


class Builder(juggler.LeagueBuilder):
    every: int = 100


@dataclass(kw_only=True)
class Config(juggler.LearnerConfig):
    depth: int = 3
    other: "Elsewhere" if EARLY else Elsewhere = 1


def several(num_envs: "Elsewhere" if EARLY else Elsewhere):
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "mine.py").write_text(MINE.replace("EARLY", str(sys.version_info < (3, 14))))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return importlib.import_module("mine")


def test_parameters_and_typed_names_are_told(mine: ModuleType) -> None:
    assert [*signature(mine.several).parameters] == ["num_envs"]
    assert [*typed_by(mine.Config)] == ["depth", "other"]
    assert [*typed_by(mine.Adds)] == []


def test_a_callback_a_connector_a_builder_and_an_algorithm_may_have_such_types(
    mine: ModuleType,
) -> None:
    assert checked([hears := mine.Hears()]) == (hears,)
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    config = ConnectorsConfig(env_to_module=[{"use": "mine:Adds", "more": 2}])
    pipeline = build_env_to_module(config, space, space, {"mine:Adds": mine.Adds})
    assert pipeline.observation_space == space
    with pytest.raises(ValueError, match="keys of its own, such as 'every': write @dataclass"):
        give_builder(mine.Builder)
    assert [*_without_type(mine.Config)] == []
    assert _makes_several(mine.several)
