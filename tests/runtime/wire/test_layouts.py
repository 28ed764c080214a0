"""Trees that came before, and limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from juggler.runtime.wire import forms, layouts
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.v1.episodes_pb2 import BatchHeader

HEADER = BatchHeader(batch_id=1)


def read(array: Any, limits: Limits = Limits()) -> Any:  # noqa: B008
    (message,) = encode_frame(HEADER, {"a": array})
    frame = FrameReader(BatchHeader, limits).feed(message)
    assert frame is not None
    return frame.tree


def test_a_tree_that_came_before_is_compared_with_the_limits_of_whoever_reads_it_now() -> None:
    assert len(read(np.zeros(100))["a"]) == 100
    with pytest.raises(WireError, match="payload"):
        read(np.zeros(100), Limits(payload_bytes=799))
    assert len(read(np.zeros(100))["a"]) == 100


def test_however_many_different_trees_come_few_are_remembered_and_all_are_read() -> None:
    for size in range(layouts._MOST_KNOWN + 2):
        np.testing.assert_array_equal(read(np.arange(size))["a"], np.arange(size))
        assert len(layouts.known_trees) == len(layouts._layouts) <= layouts._MOST_KNOWN


def test_a_large_tree_is_not_remembered() -> None:
    before = len(layouts.known_trees)
    many = {f"array {number}": np.zeros(1) for number in range(400)}
    assert read(many)["a"].keys() == many.keys()
    assert len(layouts.known_trees) == before


def test_the_form_of_a_tree_larger_than_any_models_is_not_kept() -> None:
    before = len(forms._forms)
    many = {f"array {number} {'x' * 10_000}": np.zeros(1) for number in range(110)}
    list(encode_frame(HEADER, many))
    assert len(forms._forms) == before


def test_the_form_of_a_model_with_many_arrays_is_kept() -> None:
    many = {
        f"encoder.layers.{number}.self_attn.in_proj_weight": np.zeros(1) for number in range(1600)
    }
    assert forms.lay_out(many)[0] is forms.lay_out(many)[0]


def test_however_many_large_trees_are_sent_the_forms_that_are_kept_have_a_limit() -> None:
    for number in range(20):
        forms.lay_out({f"{number} {'x' * 900_000}": np.zeros(1)})
        kept = sum(len(form.known.tree) for form in forms._forms.values())
        assert kept == forms._kept <= forms._MOST_KEPT
