"""From a configuration to connectors, with the spaces at their place."""

from __future__ import annotations

import inspect
import sys
import tomllib

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_modules import Halve

from juggler.runtime.connectors.config import BUILT_IN, ConnectorsConfig, Piece
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.connectors.pipelines import (
    build_env_to_module,
    build_learner_pipeline,
    build_module_to_env,
)
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.wire.errors import UnsupportedSpace

OWN = "support.scripted_modules"
OBSERVED = spaces.Box(-9, 9, (2,), np.float32)
ACTED = spaces.Discrete(2)
PUSHED = spaces.Box(-2, 2, (1,), np.float32)


def env_to_module(*pieces, observed=OBSERVED, own=None):
    return build_env_to_module(ConnectorsConfig(env_to_module=list(pieces)), observed, ACTED, own)


def test_every_piece_is_built_with_the_spaces_at_its_place() -> None:
    pipeline = env_to_module(
        f"{OWN}:FirstNumber", {"use": f"{OWN}:Halve", "times": 2}, {"use": "frame_stack", "k": 3}
    )
    assert pipeline.rewrites
    assert pipeline.observation_space.shape == (1,)
    assert pipeline.module_observation_space.shape == (3,)
    assert pipeline(np.array([[4.0, 6.0]], np.float32)).tolist() == [[1]]
    with pytest.raises(ValueError, match="'FirstNumber'"):
        env_to_module({"use": f"{OWN}:FirstNumber", "name": "one"}, f"{OWN}:FirstNumber")


def test_a_learner_builds_what_comes_after_the_batch() -> None:
    config = ConnectorsConfig(
        env_to_module=[f"{OWN}:FirstNumber", {"use": "frame_stack", "k": 3}],
        learner=[f"{OWN}:Negate"],
    )
    runner = build_env_to_module(config, OBSERVED, ACTED)
    learner = build_learner_pipeline(config, runner.observation_space, ACTED)
    assert learner.contexts.keys() == {"frame_stack"}
    assert learner.observation_space == runner.module_observation_space
    config = ConnectorsConfig(learner=[f"{OWN}:Negate"])
    learner = build_learner_pipeline(config, OBSERVED, ACTED)
    assert learner({"rewards": torch.ones(1, 1)})["rewards"].tolist() == [[-1]]


def test_actions_pass_the_pieces_from_first_to_last() -> None:
    config = ConnectorsConfig(module_to_env=[f"{OWN}:Twice", f"{OWN}:PlusOne"])
    pipeline = build_module_to_env(config, OBSERVED, PUSHED)
    # What the environment allows, less 1, and half of that.
    assert pipeline.action_space == spaces.Box(-1.5, 0.5, (1,), np.float32)
    # Clipped to what Twice takes, doubled, and one more.
    assert pipeline(np.array([[-5.0], [0.25]], np.float32)).tolist() == [[-2], [1.5]]


def test_context_comes_after_all_that_batches_hold() -> None:
    with pytest.raises(ValueError, match="'mean_std_filter'"):
        env_to_module("frame_stack", "mean_std_filter")


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (f"{OWN}:Negate", f"{OWN}:Negate is not a subclass of ObservationConnector"),
        (f"{OWN}:function", "is not a subclass of ObservationConnector or ContextConnector"),
        (f"{OWN}:Halv", "has no 'Halv': did you mean 'Halve'?"),
        ("no_such_module:Halve", "there is no Python module 'no_such_module' here"),
        ({"use": f"{OWN}:Halve", "time": 3}, "'Halve' has no option 'time': did you mean"),
        (f"{OWN}:ForgotItsSpaces", "has no observation_space: its __init__ must call"),
        ({"use": "frame_stack", "k": 1}, "connector 'frame_stack': k = 1 frames to stack"),
    ],
)
def test_a_piece_that_cannot_be_built_is_named(piece, said) -> None:
    with pytest.raises(ValueError, match=said.replace("?", "\\?")):
        env_to_module(piece)


def test_an_action_space_without_an_encoding_is_named_and_not_the_connector() -> None:
    with pytest.raises(UnsupportedSpace, match=r"^action space: .* Text") as wrong:
        build_module_to_env(ConnectorsConfig(), spaces.Discrete(2), spaces.Text(4))
    assert "connector" not in str(wrong.value)


def test_a_class_of_a_script_needs_no_name_to_import_it_by() -> None:
    assert not hasattr(sys.modules["__main__"], "Halve")
    pipeline = env_to_module("__main__:Halve", own={"__main__:Halve": Halve})
    assert pipeline(np.ones((1, 2), np.float32)).tolist() == [[0.5, 0.5]]


# -- state --------------------------------------------------------------------------------------


def test_what_a_filter_learns_comes_under_its_name() -> None:
    pipeline = env_to_module(
        f"{OWN}:Halve", {"use": "mean_std_filter", "name": "filter"}, f"{OWN}:TakesAll"
    )
    for number in (2, 6):
        pipeline.watch(np.full((1, 2), number, np.float32))
    pipeline(np.full((1, 2), 1000, np.float32))  # this one is not learned from
    delta = pipeline.take_delta(np.ones((1, 2), np.bool_))
    moments = Moments.from_tree(delta["filter"])
    assert (moments.count, moments.mean.tolist(), moments.m2.tolist()) == (2, [2, 2], [2, 2])
    pipeline.set_state(delta)
    np.testing.assert_allclose(pipeline(np.full((1, 2), 6, np.float32)), 1, rtol=1e-6)


def test_a_lost_fragment_is_forgotten() -> None:
    pipeline = env_to_module("mean_std_filter")
    pipeline.watch(np.ones((1, 2), np.float32))
    pipeline.forget()
    pipeline.watch(np.zeros((1, 2), np.float32))
    delta = pipeline.take_delta(np.ones((1, 1), np.bool_))
    assert Moments.from_tree(delta["mean_std_filter"]).count == 1


def test_what_other_connectors_have_learned_is_refused() -> None:
    state = {"filter": Moments.none((2,)).to_tree()}
    with pytest.raises(ValueError, match="'filter'"):
        env_to_module("mean_std_filter").set_state(state)
    config = ConnectorsConfig(learner=["normalize_rewards"])
    learner = build_learner_pipeline(config, OBSERVED, ACTED)
    assert learner.get_state().keys() == {"normalize_rewards"}
    learner.set_state(learner.get_state())
    with pytest.raises(ValueError, match="'normalize_rewards'"):
        learner.set_state({})


# The table `connectors` of a configuration.


def parsed(text: str) -> ConnectorsConfig:
    return ConnectorsConfig.parse(tomllib.loads(text))


def names(config: ConnectorsConfig, place) -> list[str]:
    return [piece.name for piece in config.pipeline(place)]


def test_a_table_says_what_stands_where() -> None:
    config = parsed(
        """
        env_to_module = [
            "mean_std_filter",
            {use = "frame_stack", k = 2},
            {use = "support.scripted_modules:Halve", before = "mean_std_filter"},
            {use = "support.scripted_modules:FirstNumber", name = "first", first = true},
            {use = "support.scripted_modules:TakesAll", after = "first"},
        ]
        module_to_env = ["rescale_actions", {remove = "clip_actions"}]
        learner = [{use = "clip_rewards", limit = 5}, "support.scripted_modules:Negate"]
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
    assert (clip.options, negate.use) == ({"limit": 5}, "support.scripted_modules:Negate")


def test_a_piece_is_named_by_its_class_and_found_by_any_of_its_names() -> None:
    by_class = Piece("support.scripted_modules:Halve", "Halve")
    assert Piece.of(Halve) == Piece.of("support.scripted_modules:Halve") == by_class
    assert Piece.of({"use": Halve, "times": 2}).options == {"times": 2}
    frames = {"use": "frame_stack", "name": "frames", "k": 2}
    path = Piece.of(frames).path
    for where in ("frame_stack", path, "frames"):
        config = ConnectorsConfig(env_to_module=[frames, {"use": "flatten", "before": where}])
        assert names(config, "env_to_module") == ["flatten", "frames"]
    twice = ConnectorsConfig(env_to_module=[Halve, {"use": Halve, "name": "again"}])
    assert names(twice, "env_to_module") == ["Halve", "again"]
    twice.env_to_module.append({"remove": "again"})
    assert names(twice, "env_to_module") == ["Halve"]


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


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_options_of_built_ins_are_those_of_their_classes(name) -> None:
    cls = found(BUILT_IN[name].path, "connector")
    _, _, *options = inspect.signature(cls).parameters
    assert tuple(options) == BUILT_IN[name].options


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"discounted_returns"}))
def test_the_texts_of_the_pipelines_list_each_connector_with_its_options(name: str) -> None:
    options = ", ".join(BUILT_IN[name].options)
    listed = f"{name} ({options})" if options else name
    assert listed in " ".join(inspect.getsource(ConnectorsConfig).split())
