"""Errors as people read them."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.callbacks import checked
from juggler.driver.league.builders import register_builder
from juggler.envrunner.environments.vector import _makes_several
from juggler.learner.algorithms.registry import _without_type
from juggler.learner.optim.config import Scheduled
from juggler.runtime.annotations import signature, typed_by
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_env_to_module
from juggler.runtime.near_matches import closest, difference
from juggler.runtime.user_tracebacks import traceback_of
from juggler.runtime.wire.structures import space_leaves, tree_map
from juggler.runtime.wrong_value import expected, shown


@pytest.mark.parametrize(
    ("given", "known", "meant"),
    [
        ("none", ["auto", "json", "live"], None),
        ("modle", ["module", "mapping", "model"], "model"),  # two letters in another order
        ("asnyc", ["sync", "async"], "async"),
        ("Hidden-Sizes", ["hidden_sizes"], "hidden_sizes"),
        ("cartpole_ppo", ["cartpole-ppo"], "cartpole-ppo"),
        ("environment", ["env", "env_kwargs"], "env"),
        ("clip", ["clip_actions", "rescale_actions"], "clip_actions"),
        ("la", ["lambda_"], None),
        (3, ["three"], None),
        ("x", [], None),
    ],
)
def test_the_closest_name_is_one_that_was_probably_meant(
    given: object, known: list[str], meant: str | None
) -> None:
    assert closest(given, known) == meant


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ab", ""),
        ("a", "without 'b'"),
        ("abcd", "with 'c' and 'd'"),
        ("ac", "without 'b' and with 'c'"),
    ],
)
def test_names_that_differ_are_told_by_the_side_that_has_them(given: str, words: str) -> None:
    assert difference(given, "ab") == words


# Values of keys in words, as errors about them say.


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (bool, "true or false"),
        (int, "a whole number"),
        (float | None, 'a number, or "none"'),
        (str, "a string"),
        (Literal["a", "b"], '"a" or "b"'),
        (list[str], "a list of strings"),
        (list[Any], "a list"),
        (tuple[float, float], "a list of 2 numbers"),
        (Annotated[list[int], "sizes"], "a list of whole numbers"),
        (dict[str, Any], "a table"),
        (dict[str, dict[str, Any]], "a table of tables"),
        (list[str | dict[str, Any]], "a list of strings or tables"),
        (dict[str, str | list[str]], "a table of strings or lists"),
        (float | dict[str, float] | None, 'a number, or a table of numbers, or "none"'),
        (Scheduled, "a number, or a schedule: a list of [step, value] pairs"),
    ],
)
def test_a_type_is_told_in_words_that_a_person_knows(hint: Any, words: str) -> None:
    assert expected(hint) == words


def test_a_value_is_shown_as_in_a_file_and_by_its_kind_where_it_is_long() -> None:
    assert [shown(each) for each in ("x", True, 1.5, [1, "a"], None)] == [
        '"x"', "true", "1.5", '[1, "a"]', "none",
    ]  # fmt: skip
    assert shown([0] * 100) == "a list"
    assert shown(["x", int, int]) == 'a list with "x" and the class int'
    assert shown("x" * 100) == "a string"
    assert shown(np.zeros(2)) == "an object of type ndarray"


# Errors for readers that may have written some of the frames.


def _raises(_: object) -> None:
    raise KeyError("no contact")


def test_calls_in_juggler_between_those_of_the_reader_are_left_out() -> None:
    with pytest.raises(KeyError) as got:
        tree_map(_raises, {"a": {"b": np.zeros(3)}})
    whole, shown = "".join(traceback.format_exception(got.value)), traceback_of(got.value)
    assert len(re.findall(r"structures\.py", whole)) > 1
    assert "structures.py" not in shown
    assert "tree_map(_raises" in shown
    assert shown.endswith(whole[whole.rindex("  File") :]), "what follows is as Python shows it"


def test_the_frame_that_raised_is_shown_also_if_it_is_jugglers() -> None:
    with pytest.raises(Exception, match="Text") as got:
        space_leaves(spaces.Dict(a=spaces.Dict(b=spaces.Text(3))))
    whole, shown = "".join(traceback.format_exception(got.value)), traceback_of(got.value)
    assert shown.count("structures.py") == 1 < whole.count("structures.py")
    assert shown.endswith(whole[whole.rindex("  File") :])


def test_an_error_that_came_from_another_is_shown_with_it() -> None:
    def wraps() -> None:
        try:
            tree_map(_raises, {"a": np.zeros(3)})
        except KeyError as error:
            raise RuntimeError("it fell over") from error

    with pytest.raises(RuntimeError) as got:
        wraps()
    shown = traceback_of(got.value)
    assert "structures.py" not in shown
    assert shown.index("no contact") < shown.index("direct cause") < shown.index("it fell over")


def test_an_error_of_juggler_alone_is_shown_whole() -> None:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(space_leaves, spaces.Text(3)).exception()
    assert error is not None
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # of the pool
    assert traceback_of(error) == "".join(traceback.format_exception(error))
    assert "structures.py" in traceback_of(error)


# Types in users' code that are imported for a type checker only. Until Python 3.13 they are
# words, or their file has the future import of annotations; from 3.14 on they need neither.


MINE = """
from dataclasses import dataclass
from typing import TYPE_CHECKING

import juggler
from juggler import Run
from juggler.runtime.connectors.connector import ObservationConnector

if TYPE_CHECKING:
    from not_there import Elsewhere


class Events(juggler.Callback):
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
    assert checked([events := mine.Events()]) == (events,)
    space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    config = ConnectorsConfig(env_to_module=[{"use": "mine:Adds", "more": 2}])
    pipeline = build_env_to_module(config, space, space, {"mine:Adds": mine.Adds})
    assert pipeline.observation_space == space
    with pytest.raises(ValueError, match="its own keys, such as 'every'"):
        register_builder(mine.Builder)
    assert [*_without_type(mine.Config)] == []
    assert _makes_several(mine.several)
