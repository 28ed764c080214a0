"""Errors about unknown names: which known ones they say, and in which words."""

from __future__ import annotations

import pytest

from juggler.runtime.nearest import all_of, closest, listed, nearest, one_of


@pytest.mark.parametrize(
    ("words", "either", "together"),
    [
        ([], "", ""),
        (["appo"], "appo", "appo"),
        (["appo", "ppo"], "appo or ppo", "appo and ppo"),
        (["appo", "impala", "ppo"], "appo, impala or ppo", "appo, impala and ppo"),
    ],
)
def test_several_words_are_listed_as_in_a_sentence(
    words: list[str], either: str, together: str
) -> None:
    assert one_of(words) == either
    assert all_of(iter(words)) == together


def test_of_many_names_the_first_ones_are_listed() -> None:
    assert listed({"left": 1, "right": 2}) == "'left' and 'right'"
    names = [f"agent_{k}" for k in range(23)]
    assert listed(names[:21]).endswith("'agent_18', 'agent_19' and 1 more")
    assert listed(names) == ", ".join(map(repr, names[:20])) + " and 3 more"


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


def test_few_names_are_all_told_and_many_where_none_is_near() -> None:
    assert (
        nearest("rms", ["rmsprop", "adam"]) == ": did you mean 'rmsprop'? Known are adam, rmsprop"
    )
    assert nearest("rms", ["rmsprop"]) == ": did you mean 'rmsprop'?"
    many = [f"{letter}0" for letter in "abcdefghijk"]
    assert nearest("rms", [*many, "rmsprop"]) == ": did you mean 'rmsprop'?"
    assert nearest("zzz", many) == f": known are {', '.join(many)}"
    assert nearest("zzz", many, listed_by="--help") == ": --help lists those that are known"
    assert nearest("zzz", []) == ": there are none"


def test_what_can_be_said_instead_of_a_known_name_is_a_sentence_of_its_own_after_a_question() -> (
    None
):
    known, own = ["clip_rewards"], "your own is named as 'package.module:Class'"
    assert nearest("clip_reward", known, own=own) == (
        ": did you mean 'clip_rewards'? Your own is named as 'package.module:Class'"
    )
    assert nearest("zzz", known, own=own) == f": known are clip_rewards; {own}"
    # A list behind the question goes on with a semicolon, too.
    assert nearest("rms", ["rmsprop", "adam"], own=own).endswith(
        f"? Known are adam, rmsprop; {own}"
    )
