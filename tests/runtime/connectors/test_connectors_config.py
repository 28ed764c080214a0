"""The table `connectors` of a configuration."""

from __future__ import annotations

import inspect
import tomllib

import pytest

from juggler.runtime.connectors.built_in import BUILT_IN
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.modules.by_name import found


def parsed(text: str) -> ConnectorsConfig:
    return ConnectorsConfig.parse(tomllib.loads(text))


def names(config: ConnectorsConfig, place) -> list[str]:
    return [piece.name for piece in config.pipeline(place)]


def test_actions_are_clipped_by_default_and_nothing_else_happens() -> None:
    config = ConnectorsConfig()
    config.validate()
    assert names(config, "env_to_module") == names(config, "learner") == []
    assert names(config, "module_to_env") == ["clip_actions"]


def test_a_table_says_what_stands_where() -> None:
    config = parsed(
        """
        env_to_module = [
            "mean_std_filter",
            {use = "frame_stack", k = 2},
            {use = "support.own_connectors:Halve", before = "mean_std_filter"},
            {use = "support.own_connectors:FirstNumber", name = "first", first = true},
            {use = "support.own_connectors:TakesAll", after = "first"},
        ]
        module_to_env = ["rescale_actions", {remove = "clip_actions"}]
        learner = [{use = "clip_rewards", limit = 5}, "support.own_connectors:Negate"]
        """
    )
    assert names(config, "env_to_module") == [
        "first",
        "TakesAll",
        "Halve",
        "mean_std_filter",
        "frame_stack",
    ]
    assert names(config, "module_to_env") == ["rescale_actions"]
    clip, negate = config.pipeline("learner")
    assert (clip.options, negate.use) == ({"limit": 5}, "support.own_connectors:Negate")


def test_what_a_learner_needs_in_runners_comes_by_itself() -> None:
    config = parsed('learner = [{use = "normalize_rewards", gamma = 0.9, limit = 5}]')
    (half,) = config.pipeline("env_to_module")
    assert (half.name, half.options) == ("discounted_returns", {"gamma": 0.9})
    asked = parsed('learner = ["normalize_rewards"]\nenv_to_module = ["discounted_returns"]')
    assert names(asked, "env_to_module") == ["discounted_returns"]
    with pytest.raises(ValueError, match="'discounted_returns'"):
        parsed(
            'learner = ["normalize_rewards"]\n'
            'env_to_module = [{use = "discounted_returns", gamma = 0.5}]'
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('env_to_modul = ["flatten"]', "no key 'env_to_modul': did you mean 'env_to_module'?"),
        ('learner = "clip_rewards"', "connectors.learner must be a list of pieces"),
        ('env_to_module = ["frame_stak"]', "connectors.env_to_module: there is no connector"),
        ('env_to_module = ["clip_rewards"]', "'clip_rewards' belongs in connectors.learner"),
        ('learner = [{use = "clip_rewards", limt = 1}]', "did you mean 'limit'?"),
        ("learner = [{limit = 1}]", "a table that has one under 'use'"),
        ("learner = [1]", "a connector is a name, or a table that has one under 'use', not 1"),
        ('module_to_env = [{remove = "clip"}]', "no connector 'clip': did you mean 'clip_actions"),
        (
            'module_to_env = [{remove = "clip_actions", use = "rescale_actions"}]',
            "'remove' stands alone in its table, not with ['use']",
        ),
        (
            'module_to_env = [{use = "rescale_actions", first = true, after = "clip_actions"}]',
            "one of 'first', 'after' can be, not all",
        ),
        (
            'module_to_env = [{use = "rescale_actions", before = 1}]',
            "by its name or its class, not by 1",
        ),
        ('env_to_module = ["flatten", "flatten"]', "two connectors are called 'flatten'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, said) -> None:
    with pytest.raises(ValueError) as wrong:  # noqa: PT011 - compared below
        parsed(text)
    assert said in str(wrong.value)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_options_of_built_ins_are_those_of_their_classes(name) -> None:
    cls = found(BUILT_IN[name].path, "connector")
    _, _, *options = inspect.signature(cls).parameters
    assert tuple(options) == BUILT_IN[name].options
