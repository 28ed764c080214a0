"""Pipelines before they are built: order, names, and what is wrong said in one line."""

from __future__ import annotations

import pytest
from support.own_connectors import FirstNumber, Halve

from juggler.runtime.connectors.frame_stack import FrameStack
from juggler.runtime.connectors.mean_std_filter import MeanStdFilter
from juggler.runtime.connectors.pipeline import Piece, Pipeline


def names(pipeline: Pipeline) -> list[str]:
    return [piece.name for piece in pipeline]


def test_pieces_are_put_where_they_are_wanted() -> None:
    pipeline = Pipeline(["mean_std_filter"]).append("frame_stack").prepend("one_hot")
    assert names(pipeline) == ["one_hot", "mean_std_filter", "frame_stack"]
    pipeline.insert_before("mean_std_filter", Halve)
    pipeline.insert_after(FrameStack, "previous_actions_and_rewards")
    assert names(pipeline) == [
        "one_hot",
        "Halve",
        "mean_std_filter",
        "frame_stack",
        "previous_actions_and_rewards",
    ]
    pipeline.remove(MeanStdFilter).remove("one_hot").remove("support.own_connectors:Halve")
    assert names(pipeline) == ["frame_stack", "previous_actions_and_rewards"]
    assert len(pipeline) == 2
    assert repr(pipeline) == "Pipeline(['frame_stack', 'previous_actions_and_rewards'])"


def test_a_piece_can_be_given_in_several_ways() -> None:
    by_class = Piece("support.own_connectors:Halve", "Halve")
    assert Piece.of(Halve) == Piece.of("support.own_connectors:Halve") == by_class
    assert Piece.of({"use": Halve, "times": 2}).options == {"times": 2}
    named = Piece.of({"use": "frame_stack", "name": "frames", "k": 2})
    assert named == Piece("frame_stack", "frames", {"k": 2})
    assert named.path == "juggler.runtime.connectors.frame_stack:FrameStack"
    assert Piece.of(named) is named


def test_a_built_in_is_found_by_its_name_its_class_and_the_name_given_to_it() -> None:
    for where in ("frame_stack", FrameStack, "frames"):
        pipeline = Pipeline([{"use": "frame_stack", "name": "frames"}])
        assert names(pipeline.remove(where)) == []


def test_a_name_is_used_once() -> None:
    with pytest.raises(ValueError, match="called 'Halve'"):
        Pipeline([Halve, Halve])
    twice = Pipeline([Halve, {"use": Halve, "name": "again"}])
    assert names(twice) == ["Halve", "again"]
    with pytest.raises(ValueError, match="of 'Halve'"):
        twice.remove(Halve)
    assert names(twice.remove("again")) == ["Halve"]


def test_a_piece_that_is_not_there_names_the_nearest() -> None:
    pipeline = Pipeline(["frame_stack", "mean_std_filter"])
    for change in (pipeline.remove, lambda where: pipeline.insert_after(where, Halve)):
        with pytest.raises(ValueError, match="connector 'framestack'"):
            change("framestack")
    with pytest.raises(ValueError, match="connector 'FirstNumber'"):
        pipeline.insert_before(FirstNumber, Halve)
    with pytest.raises(ValueError, match="'x': there are none"):
        Pipeline().remove("x")
    with pytest.raises(ValueError, match="by its name or its class, not by 3"):
        pipeline.remove(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        ("frame_stak", "no connector 'frame_stak': did you mean 'frame_stack'?"),
        ("zzz", "no connector 'zzz': known are clip_actions, clip_rewards"),
        ({"use": "frame_stack", "n": 4}, "'frame_stack' has no option 'n': known are k"),
        ({"use": "mean_std_filter", "clp": 4}, "no option 'clp': did you mean 'clip'?"),
        ({"use": "flatten", "k": 4}, "'flatten' has no option 'k': there are none"),
        ({"k": 4}, "a table that has one under 'use', not {'k': 4}"),
        (7, "a connector is a name, or a table"),
        ({"use": "flatten", "name": "a/b"}, "must be a word, not 'a/b'"),
        ({"use": "flatten", "name": ""}, "must be a word, not ''"),
    ],
)
def test_what_is_no_piece_is_told_so(piece, said) -> None:
    with pytest.raises(ValueError) as wrong:  # noqa: PT011 - compared below
        Piece.of(piece)
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)
