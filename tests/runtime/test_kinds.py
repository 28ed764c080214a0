"""Values of keys in words, as errors about them say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pytest

from juggler.learner.optim.config import Scheduled
from juggler.runtime.kinds import expected, shown


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
        (Annotated[list[int], "whatever"], "a list of whole numbers"),
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
