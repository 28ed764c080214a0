"""Specs: what they accept, and what they say about what they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from juggler.runtime.modules.specs import AnyOf, Maybe, Spec, SpecError, TensorSpec, check

SHAPED = TensorSpec("b, t, h", h=64)


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (torch.zeros(3, 5, 64), SHAPED),
        (torch.zeros(3, 64), TensorSpec("b, 64")),
        (torch.tensor(1.0), TensorSpec("")),
        (torch.zeros(2, dtype=torch.bfloat16), TensorSpec("b", dtype="floating")),
        (torch.zeros(2, dtype=torch.uint8), TensorSpec("b", dtype="integer")),
        (torch.zeros(2, dtype=torch.int64), TensorSpec("b", dtype=np.int64)),
        (torch.zeros(2, dtype=torch.int64), TensorSpec("b", dtype="int64")),
        (np.zeros((2, 3), np.float32), TensorSpec("b, f", framework="numpy", dtype=torch.float32)),
        ("text", str),
        ({"a": 1, "more": 2}, {"a": int}),
        ({}, {"a": Maybe(int)}),
        ({"a": {"b": object()}}, ["a", ("a", "b")]),
        ({"a": 1}, ["a", {"a": int}]),
        ({"b": 1}, AnyOf({"a": int, "b": int})),
        (object(), None),
    ],
)
def test_what_is_as_its_spec_says_passes(value: object, spec: Spec) -> None:
    check(value, spec, "it")


@pytest.mark.parametrize(
    ("value", "spec", "said"),
    [
        (
            torch.zeros(3, 5, 63),
            SHAPED,
            "it must be a tensor [b, t, h=64], but is a tensor [3, 5, 63] of dtype float32",
        ),
        (torch.zeros(3, 5), SHAPED, "but is a tensor [3, 5] of dtype float32"),
        (torch.zeros(3, 63), TensorSpec("b, 64"), "must be a tensor [b, 64], but is"),
        (np.zeros((3, 64)), TensorSpec("b, 64"), "but is a NumPy array [3, 64] of dtype float64"),
        (torch.zeros(3), TensorSpec("b", framework="numpy"), "must be a NumPy array [b], but is a"),
        (
            torch.zeros(3, dtype=torch.int64),
            TensorSpec("b", dtype="floating"),
            "must be a tensor [b] of dtype floating, but is a tensor [3] of dtype int64",
        ),
        (
            torch.zeros(3),
            TensorSpec("b", dtype=torch.float64),
            "of dtype float64, but is a tensor [3] of dtype float32",
        ),
        (3, TensorSpec("b"), "it must be a tensor [b], but is of type int"),
        (3, str, "it must be of type str, but is of type int"),
        (3, {"a": None}, "it must be a map with 'a', but is of type int"),
        ({"b": 1}, {"a": None}, "it must have 'a'; it has 'b'"),
        ({}, ["a"], "it must have 'a'; it has nothing"),
        (
            {"a": {"c": 1}},
            [("a", "b")],
            "'a' in it must have 'b'; it has 'c'",
        ),
        (
            {"a": {"b": torch.zeros(2, 3)}},
            {"a": {"b": TensorSpec("b, 4")}},
            "'a/b' in it must be a tensor [b, 4], but is a tensor [2, 3]",
        ),
        (
            {"x": 1},
            {"a": TensorSpec("b, d", d=4)},
            "it must have 'a', a tensor [b, d=4]; it has 'x'",
        ),
        ({"a": "one"}, {"a": Maybe(int)}, "'a' in it must be of type int, but is of type str"),
        (
            {"c": 1},
            AnyOf({"a": TensorSpec("b"), "b": int}),
            "it must have 'a', a tensor [b] or 'b'; it has 'c'",
        ),
        ({"a": "one", "b": 1}, AnyOf({"a": int, "b": int}), "'a' in it must be of type int"),
        ({"a": 1}, [{"a": int}, "b"], "it must have 'b'; it has 'a'"),
    ],
)
def test_a_violation_names_the_key_what_was_expected_and_what_came(
    value: object, spec: Spec, said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check(value, spec, "it")
    assert said in str(caught.value)


def test_dimensions_of_one_name_are_equal_within_one_check() -> None:
    spec = {"x": TensorSpec("b, f"), "y": {"z": TensorSpec("b")}}
    check({"x": torch.zeros(3, 2), "y": {"z": torch.zeros(3)}}, spec, "it")
    with pytest.raises(SpecError) as caught:
        check({"x": torch.zeros(3, 2), "y": {"z": torch.zeros(4)}}, spec, "it")
    said = str(caught.value)
    assert "'y/z' in it must be a tensor [b], but is a tensor [4]" in said
    assert said.endswith("b is 3 in 'x' in it")


def test_sizes_can_be_carried_from_one_value_to_the_next() -> None:
    sizes: Any = {}
    check(torch.zeros(3, 2), TensorSpec("b, f"), "the input", sizes)
    check(torch.zeros(3), TensorSpec("b"), "the output", sizes)
    with pytest.raises(SpecError, match=r"the output must be .* b is 3 in the input"):
        check(torch.zeros(4), TensorSpec("b"), "the output", sizes)


def test_fixed_sizes_bind_nothing() -> None:
    spec = {"x": TensorSpec("b, h", h=2), "y": TensorSpec("b, h", h=3)}
    check({"x": torch.zeros(1, 2), "y": torch.zeros(1, 3)}, spec, "it")


@pytest.mark.parametrize(
    ("shape", "sizes", "said"),
    [
        ("b, t h", {}, "'t h' is neither a name nor a size"),
        ("b,, h", {}, "'' is neither a name nor a size"),
        ("b, -1", {}, "'-1' is neither"),
        ("b, t", {"h": 3}, "has no dimension 'h'"),
    ],
)
def test_a_shape_that_is_not_one_is_refused(shape: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TensorSpec(shape, **sizes)


def test_what_is_no_spec_is_told_apart_from_a_violation() -> None:
    wrong: Any = {"a": 3}
    with pytest.raises(TypeError, match="a spec of 'a' in it is of type int"):
        check({"a": 3}, wrong, "it")
