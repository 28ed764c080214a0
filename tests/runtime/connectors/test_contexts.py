"""Connectors with a context: step by step, and by rows."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_episodes import Fragment, Past, as_tensors, fragments, stacked

from juggler.runtime.acting.actor import Contexts
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.contexts import FrameStack, PreviousActionsAndRewards
from juggler.runtime.connectors.pipelines import build_env_to_module, build_learner_pipeline
from juggler.runtime.modules.encoders import ImageLayout
from juggler.runtime.wire.structures import space_leaves, tree_map, zeros
from juggler.runtime.wire.trees import flatten

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
IMAGE = spaces.Box(0, 255, (3, 2), np.uint8)
OBSERVED = {
    "vector": spaces.Box(-1, 1, (2,), np.float32),
    "number": spaces.Box(-1, 1, (), np.float32),
    "grey image": IMAGE,
    "colours": spaces.Box(0, 255, (3, 3, 2), np.uint8),
    "colours first": spaces.Box(0, 255, (2, 3, 3), np.uint8),
    "dict": spaces.Dict(
        {
            "image": IMAGE,
            "kind": spaces.Discrete(5),
            "action_mask": spaces.Box(0, 1, (3,), np.int8),
            "deep": spaces.Tuple([spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)]),
        }
    ),
}
ACTED = {
    "discrete": spaces.Discrete(3, start=1),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "multi": spaces.MultiDiscrete([2, 3]),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Dict({"a": spaces.MultiBinary(2)})]),
}
PIPELINES = {
    "stack": [{"use": "frame_stack", "k": 3}],
    "previous": ["previous_actions_and_rewards"],
    "stack, previous": [{"use": "frame_stack", "k": 2}, "previous_actions_and_rewards"],
    "previous, stack": ["previous_actions_and_rewards", {"use": "frame_stack", "k": 4}],
}


def in_runner(contexts: Contexts, fragment: Fragment) -> tuple[Any, dict[str, Any]]:
    """The module's inputs [N, T, ...], and contexts before each row."""
    columns, seen, states = fragment.columns, [], {}
    for t in range(columns["rewards"].shape[1]):
        observations, actions = (
            tree_map(lambda array, t=t: array[:, t], columns[name])
            for name in ("observations", "actions")
        )
        seen.append(tree_map(np.copy, contexts.see(observations, fragment.first[:, t])))
        if t == 0:
            states = contexts.states()
        contexts.advance(actions, columns["rewards"][:, t])
    return stacked(seen, 1), states


def assert_same(one: Any, other: Any) -> None:
    found, expected = (dict(flatten(tree_map(np.asarray, tree))) for tree in (one, other))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype, path
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


def arrays(tree: Any) -> Any:
    return tree_map(lambda tensor: tensor.numpy(), tree)


@settings(max_examples=150)
@given(
    pipeline=st.sampled_from(sorted(PIPELINES)),
    observed=st.sampled_from(sorted(OBSERVED)),
    acted=st.sampled_from(sorted(ACTED)),
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 4),
    steps=st.integers(1, 7),
    ends=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1 << 20),
)
def test_a_learner_shows_a_module_over_rows_what_a_runner_showed_it_step_by_step(
    pipeline, observed, acted, mode, rows, steps, ends, seed
) -> None:
    config = ConnectorsConfig(env_to_module=PIPELINES[pipeline])
    spaces_ = OBSERVED[observed], ACTED[acted]
    env_to_module = build_env_to_module(config, *spaces_)
    learner = build_learner_pipeline(config, *spaces_)
    contexts = Contexts(env_to_module.contexts)
    played = fragments(*spaces_, rows=rows, steps=steps, mode=mode, ends=ends, seed=seed)
    for fragment in islice(played, 3):
        seen, states = in_runner(contexts, fragment)
        first_row = tree_map(lambda array: array[0, ...], states)
        examples, found = dict(flatten(learner.example_contexts())), dict(flatten(first_row))
        assert {path: (array.shape, array.dtype) for path, array in examples.items()} == {
            path: (array.shape, array.dtype) for path, array in found.items()
        }
        columns = as_tensors({**fragment.columns, "states": {"connectors": states}})
        kept = tree_map(torch.clone, columns)
        result = learner(columns)
        assert_same(arrays(result["observations"]), seen)
        assert_same(arrays(columns), arrays(kept))  # nothing was written over
        # After a row, and after an end, only the learner looks.
        for row, past in enumerate(fragment.last_pasts):
            if past is not None:
                last = tree_map(lambda a, row=row: a[row].numpy(), result["last_observations"])
                assert_same(last, expected(pipeline, spaces_, past))
        for k, past in enumerate(fragment.final_pasts):
            final = tree_map(lambda a, k=k: a[k].numpy(), result["final_observations"])
            assert_same(final, expected(pipeline, spaces_, past))
        for name in ("observations", "last_observations", "final_observations"):
            leading = 2 if name == "observations" else 1
            fits(result[name], learner.observation_space, leading)
    assert learner.observation_space == env_to_module.module_observation_space


def fits(tree: Any, space: Any, leading: int) -> None:
    like = dict(flatten(zeros(space)))
    for path, tensor in flatten(arrays(tree)):
        assert tensor.shape[leading:] == like[path].shape
        assert tensor.dtype == like[path].dtype


# -- the slow loop ------------------------------------------------------------------------------


def expected(pipeline: str, spaces_: tuple[Any, Any], past: Past) -> Any:
    """What the module sees at the end of a past."""
    observed, acted = spaces_
    leaves = {path for path, leaf in space_leaves(observed) if isinstance(leaf, spaces.Box)}
    leaves -= {("action_mask",)}
    length = len(past.observations)
    if pipeline == "stack":
        return stack_of(past.observations, leaves, 3)
    if pipeline == "previous":
        return previous_of(past, length - 1, acted, past.observations[-1])
    if pipeline == "stack, previous":
        return previous_of(past, length - 1, acted, stack_of(past.observations, leaves, 2))
    history = [previous_of(past, i, acted, past.observations[i]) for i in range(length)]
    if not isinstance(observed, spaces.Dict):
        leaves = {("observation", *path) for path in leaves}
    leaves |= {
        ("previous_action", *path)
        for path, leaf in space_leaves(acted)
        if isinstance(leaf, spaces.Box)
    }
    return stack_of(history, leaves | {("previous_reward",)}, 4)


def stack_of(observations: list[Any], paths: set[tuple[str, ...]], k: int) -> Any:
    frames = [observations[max(len(observations) - k + i, 0)] for i in range(k)]
    if paths == {()}:
        return stack(frames)
    result = dict(flatten(observations[-1]))
    for path in paths:
        result[path] = stack([dict(flatten(frame))[path] for frame in frames])
    return nested(result)


def stack(frames: list[Any]) -> Any:
    if frames[0].ndim in (0, 2):
        return np.stack(frames, -1)
    colours_first = frames[0].shape == (2, 3, 3)
    return np.concatenate(frames, 0 if colours_first else -1)


def previous_of(past: Past, i: int, acted: Any, observation: Any) -> Any:
    if i:
        action, reward = past.actions[i - 1], past.rewards[i - 1]
    else:
        action, reward = zeros(acted), 0.0  # the first action there is
    branch = observation if isinstance(observation, dict) else {"observation": observation}
    return {**branch, "previous_action": action, "previous_reward": np.array(reward, np.float32)}


def nested(arrays_: dict[tuple[str, ...], Any]) -> Any:
    root: dict[str, Any] = {}
    for path, array in arrays_.items():
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = array
    return root


# -- single ones --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (2,)),
        ((3,), (6,)),
        ((4, 5), (4, 5, 2)),
        ((5, 4, 3), (5, 4, 6)),
        ((1, 5, 5), (2, 5, 5)),  # as Atari's own vector of environments shows it
        ((3, 84, 84), (6, 84, 84)),
        ((7, 5, 5, 3), (7, 5, 5, 6)),
        ((7, 3, 5, 5), (7, 6, 5, 5)),
        ((6, 1, 7, 5, 5), (6, 1, 7, 5, 10)),
    ],
)
def test_shapes_of_stacks(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    stack = FrameStack(spaces.Box(-1, 1, before), spaces.Discrete(2), k=2)
    assert stack.observation_space.shape == after


@pytest.mark.parametrize("frame", [(84, 84), (84, 84, 1), (1, 84, 84), (60, 80)])
def test_an_encoder_sees_a_stack_of_images_as_channels(frame: tuple[int, ...]) -> None:
    stack = FrameStack(spaces.Box(0, 255, frame, np.uint8), spaces.Discrete(2), k=4)
    layout = ImageLayout.of(stack.observation_space.shape or ())
    height, width = (side for side in frame if side > 1)
    assert (layout.channels, layout.height, layout.width) == (4, height, width)


def test_there_must_be_something_to_stack() -> None:
    with pytest.raises(ValueError, match="hold no Box"):
        FrameStack(spaces.Discrete(3), spaces.Discrete(2))


def test_previous_actions_have_the_dtypes_that_policies_act_in() -> None:
    acted = spaces.Dict(
        {
            "turn": spaces.Discrete(3, start=np.int32(1)),
            "push": spaces.Box(-1, 1, (2,), np.float64),
            "keys": spaces.MultiDiscrete([2, 2], np.int32),
        }
    )
    space = PreviousActionsAndRewards(IMAGE, acted).observation_space
    leaves = {path: leaf.dtype for path, leaf in space_leaves(space)}
    assert leaves["previous_action", "turn"] == np.int64
    assert leaves["previous_action", "push"] == np.float32
    assert leaves["previous_action", "keys"] == np.int64


def test_previous_actions_do_not_go_over_keys_of_the_environment() -> None:
    observed = spaces.Dict({"previous_reward": IMAGE})
    with pytest.raises(ValueError, match="'previous_reward'"):
        PreviousActionsAndRewards(observed, spaces.Discrete(2))


def test_a_restart_begins_with_the_next_observation() -> None:
    box = spaces.Box(-1, 1, (1,), np.float32)
    contexts = Contexts({"stack": FrameStack(box, spaces.Discrete(2), k=2)})
    contexts.see(np.array([[1.0]], np.float32), np.array([True]))
    contexts.advance(np.zeros(1, np.int64), np.zeros(1, np.float32))
    contexts.memory.trees.clear()
    assert contexts.see(np.array([[5.0]], np.float32), np.array([False])).tolist() == [[5, 5]]
