from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from support import worlds

import juggler
from juggler.driver.config import RunConfig
from juggler.policies.policy import Observed
from juggler.runtime.checkpoints.checkpoint import CheckpointError, read, write

WHAT_CAME_BEFORE = {"env_to_module": ["previous_actions_and_rewards"]}


# -- what goes in and comes out -----------------------------------------------------------------


@pytest.mark.parametrize("env", [worlds.plain, worlds.motors, worlds.parts, worlds.images])
def test_one_observation_is_a_batch_of_one_without_its_first_dimension(env, tmp_path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, env))
    assert policy.observation_space == env().observation_space
    observation = policy.observation_space.sample()
    one, state = policy.act(observation)
    assert policy.action_space.contains(one)
    assert state is None
    assert not policy.remembers
    seen = create_empty_array(policy.observation_space, 1)
    batch, _ = policy.act(concatenate(policy.observation_space, [observation], seen))
    (only,) = iterate(batch_space(policy.action_space, 1), batch)
    assert data_equivalence(one, only, exact=True)


def test_lists_and_other_dtypes_of_the_same_kind_are_taken(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.motors))
    expected, _ = policy.act(np.array([1, -2, 0.5, 2], np.float32))
    for given in ([1, -2, 0.5, 2], np.array([1, -2, 0.5, 2]), torch.tensor([1, -2, 0.5, 2])):
        np.testing.assert_array_equal(policy.act(given)[0], expected)


def test_memory_of_the_caller_may_change_afterwards(tmp_path: Path) -> None:
    keys = {"connectors": {"env_to_module": ["frame_stack", "previous_actions_and_rewards"]}}
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.motors, **keys))

    def second(spoil: bool) -> Any:
        observation = np.ones(4, np.float32)
        action, state = policy.act(observation)
        if spoil:
            observation[:] = 3
            action[:] = 0
        return policy.act(np.zeros(4, np.float32), state, reward=1.0)[0]

    np.testing.assert_array_equal(second(spoil=True), second(spoil=False))


def test_exploration_is_seeded_and_draws_from_the_policy(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain)
    seen = np.tile(np.array([0.3, -1, 2, 0.1], np.float32), (4000, 1))  # [N, 4]

    def drawn(policy: juggler.Policy) -> Any:
        return np.concatenate([policy.act(seen, explore=True)[0] for _ in range(2)])

    policy = juggler.load_policy(path, seed=3)
    once = drawn(policy)
    assert (once[:4000] != once[4000:]).any()
    policy.seed(3)
    np.testing.assert_array_equal(drawn(policy), once)
    np.testing.assert_array_equal(drawn(juggler.load_policy(path, seed=3)), once)
    assert (drawn(juggler.load_policy(path, seed=4)) != once).any()
    with torch.inference_mode():
        outputs = policy.module.forward_exploration({"observations": torch.from_numpy(seen[:1])})
    expected = outputs["action_dist_inputs"].softmax(-1)[0].numpy()
    shares = np.bincount(once - 2, minlength=3) / len(once)
    np.testing.assert_allclose(shares, expected, atol=0.03)


@pytest.mark.parametrize("explore", [False, True])
def test_masks_of_a_batch_come_as_vectors_give_them(explore: bool, tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.masked_in_info))
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(300, 4)).astype(np.float32)  # [N, 4]
    legal = np.eye(3, dtype=np.int8)[rng.integers(3, size=300)]  # [N, 3] one each
    actions, _ = policy.act(seen, explore=explore, mask=legal)
    np.testing.assert_array_equal(actions - 2, legal.argmax(-1))
    within, _ = policy.act({"observation": seen, "action_mask": legal}, explore=explore)
    np.testing.assert_array_equal(within, actions)
    alone, _ = policy.act(seen[0], explore=explore, mask=legal[0])
    assert alone == actions[0]


def test_probabilities_are_those_that_exploration_draws_from(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.masked_in_info))
    seen = np.array([0.3, -1, 2, 0.1], np.float32)  # [4]
    legal = np.array([1, 0, 1], np.int8)  # [3]
    told = policy.probabilities(seen, mask=legal)
    assert (told.shape, told[1]) == ((3,), 0)
    np.testing.assert_allclose(told.sum(), 1, rtol=1e-6)
    many, masks = np.tile(seen, (8000, 1)), np.tile(legal, (8000, 1))  # [N, 4], [N, 3]
    drawn, _ = policy.act(many, explore=True, mask=masks)
    np.testing.assert_allclose(np.bincount(drawn - 2, minlength=3) / 8000, told, atol=0.03)
    np.testing.assert_allclose(
        policy.probabilities(many, mask=masks), np.tile(told, (8000, 1)), rtol=1e-5
    )


def test_policies_without_probabilities_of_single_actions_say_so(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path / "a", worlds.motors))
    with pytest.raises(ValueError, match="probabilities"):
        policy.probabilities(policy.observation_space.sample())
    keys: dict[str, Any] = {"model": {"recurrent": "gru"}}
    policy = juggler.load_policy(worlds.written(tmp_path / "b", worlds.plain, **keys))
    with pytest.raises(ValueError, match="remembers"):
        policy.probabilities(np.zeros(4, np.float32))


# -- what is wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros(3, np.float32), r"shape \[3\]: expected \[4\], or"),
        (np.zeros((2, 2, 4), np.float32), r"shape \[2, 2, 4\]: expected \[4\]"),
        (np.zeros((0, 4), np.float32), r"shape \[0, 4\]"),
        (np.zeros(4, np.complex64), "is complex64: expected float32"),
        (["a", "b", "c", "d"], "is <U1: expected float32"),
        ([[1], [1, 2]], "is not an array"),
        ((np.zeros(4, np.float32), {}), r"the \(observation, info\) of"),
        ({"b": 1, "a": 2}, r"a map with the keys \['a', 'b'\]"),
        ([0, 0, 0, np.nan], "not finite"),
    ],
)
def test_a_misfit_says_what_was_expected(given, said, tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain))
    with pytest.raises(ValueError, match=said):
        policy.act(given)


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([3, 3]), spaces.MultiBinary(2)])
@pytest.mark.parametrize("numbers", [[3, 0], [0, -1]])
def test_an_observation_outside_its_space_is_refused(space, numbers) -> None:
    observed = Observed(space, worlds.CHOICE)
    for batch in (np.array(numbers), np.array([space.sample(), numbers])):
        with pytest.raises(ValueError, match=r"observation holds -?\d, which is"):
            observed(batch, None)


def test_integers_are_taken_for_another_integer_dtype_that_has_them() -> None:
    observed = Observed(spaces.Box(0, 255, (2,), np.uint8), worlds.CHOICE)
    seen, _ = observed([0, 255], None)
    np.testing.assert_array_equal(seen, np.array([[0, 255]], np.uint8), strict=True)
    for numbers in ([0, 256], [-1, 0]):
        with pytest.raises(ValueError, match="the observation has numbers beyond uint8"):
            observed(numbers, None)


def test_a_state_that_is_none_is_said(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain))
    with pytest.raises(ValueError, match="come from the last `act`, or be None: not 3"):
        policy.act(np.zeros(4), 3)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain)
    newer = path.with_name(f"{int(path.name) + 1:09}")
    shutil.copytree(path, newer)
    (newer / "checkpoint.json").write_text("{")
    with pytest.warns(UserWarning, match=f"skipped.*{newer.name}"):
        juggler.load_policy(tmp_path)


def test_a_misfit_in_a_part_names_it(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.parts))
    whole = worlds.PARTS.sample()
    order = {**whole["order"], "corner": 0.5}
    with pytest.raises(ValueError, match="at 'order/corner'"):
        policy.act({**whole, "order": order})
    with pytest.raises(ValueError, match="'joints'"):
        policy.act({"joints": whole["joints"]})
    with pytest.raises(ValueError, match="at 'joints'"):
        policy.act({**whole, "joints": whole["joints"][:1]})
    joints = (np.zeros((3, 3)), np.zeros((3, 2), np.int8))
    with pytest.raises(ValueError, match="'joints/0'"):
        policy.act({**whole, "joints": joints})


def test_what_belongs_to_a_batch_must_be_as_long(tmp_path: Path) -> None:
    keys = {"connectors": WHAT_CAME_BEFORE}
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain, **keys))
    seen = np.zeros((2, 4), np.float32)
    _, state = policy.act(seen)
    with pytest.raises(ValueError, match="of a batch of 2, and the"):
        policy.act(seen[0], state)
    with pytest.raises(ValueError, match="reward has 1 numbers: expected 2"):
        policy.act(seen, state, reward=1.0)
    with pytest.raises(ValueError, match=r"first has shape \[1\]: expected \[2\]"):
        policy.act(seen, state, reward=[1, 2], first=[True])
    with pytest.raises(ValueError, match="it only for a batch; pass state=None"):
        policy.act(seen[0], first=True)


def test_a_missing_reward_is_asked_for_where_it_matters(tmp_path: Path) -> None:
    keys = {"connectors": WHAT_CAME_BEFORE}
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain, **keys))
    assert policy.uses_rewards
    _, state = policy.act(np.zeros(4))
    with pytest.raises(ValueError, match="previous_actions_and_rewards"):
        policy.act(np.zeros(4), state)


def test_masks_that_are_missing_wrong_or_leave_nothing_are_said(tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path / "masked", worlds.masked_in_info))
    with pytest.raises(ValueError, match=r"must be a Dict|pass mask="):
        policy.act(np.zeros(4))
    with pytest.raises(ValueError, match="pass mask="):
        policy.act({"observation": np.zeros(4)})
    with pytest.raises(ValueError, match="no legal action"):
        policy.act(np.zeros(4), mask=np.zeros(3, np.int8))
    with pytest.raises(ValueError, match="no legal action in row 1"):
        policy.act(np.zeros((2, 4)), mask=np.array([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match="'action_mask'"):
        policy.act(np.zeros(4), mask=np.ones(2, np.int8))
    shown = juggler.load_policy(worlds.written(tmp_path / "shown", worlds.masked))
    seen = {key: np.zeros(4) for key in shown.observation_space.spaces}
    with pytest.raises(ValueError, match="other numbers than 0 and 1"):
        shown.act({**seen, "action_mask": np.array([1, 0, -3])})
    with pytest.raises(ValueError, match=r"other numbers than 0 and 1: 2, in row 0"):
        shown.act({"seen": np.zeros((1, 4)), "action_mask": np.array([[1, 0, 2]])})
    plain = juggler.load_policy(worlds.written(tmp_path / "plain", worlds.plain))
    with pytest.raises(ValueError, match="gave no action masks"):
        plain.act(np.zeros(4), mask=np.ones(3))


@pytest.mark.parametrize(
    ("mask", "number"),
    [
        ([1, 0, -3], "-3"),
        ([0.5, 1, 0], "0.5"),
        (np.array([1, 257, 0]), "257"),
        (torch.tensor([1, 0, 2]), "2"),
        ([1, np.nan, 0], "nan"),
    ],
)
def test_a_mask_with_other_numbers_than_0_and_1_is_refused(mask, number, tmp_path: Path) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.masked_in_info))
    with pytest.raises(ValueError, match=f"other numbers than 0 and 1: {number}$"):
        policy.act(np.zeros(4), mask=mask)
    rows = np.array([[1, 1, 1], np.asarray(mask)], None)
    with pytest.raises(ValueError, match=f"0 and 1: {number}, in row 1"):
        policy.act(np.zeros((2, 4)), mask=rows)


def test_parts_of_a_script_have_to_be_given(tmp_path: Path) -> None:
    class Mine(juggler.ActorCritic):
        pass

    path = worlds.written(tmp_path / "module", worlds.plain, Mine, module="__main__:Mine")
    with pytest.raises(ValueError, match="script"):
        juggler.load_policy(path)
    assert type(juggler.load_policy(path, module=Mine).module) is Mine

    connectors = {"env_to_module": ["__main__:Halve"]}
    path = worlds.written(
        tmp_path / "connector",
        worlds.plain,
        connectors=connectors,
        own={"__main__:Halve": worlds.Halve},
    )
    with pytest.raises(ValueError, match="'Halve'"):
        juggler.load_policy(path)
    juggler.load_policy(path, connectors={"env_to_module": [worlds.Halve]})


def test_another_module_or_none_at_all_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain)
    wider = juggler.RLModuleSpec(model_config={"hidden_sizes": [5]})
    with pytest.raises(juggler.CheckpointError, match="does not fit this environment and c"):
        juggler.load_policy(path, module=wider)
    cartpole = worlds.written(tmp_path / "cartpole", env="CartPole-v1")
    spaces = (
        r"its observation space is Box\(.*, \(4,\).* and its action space Discrete\(2\), but here"
    )
    here = r"they are Box\(.*, \(6,\).* and Discrete\(3\)"
    with pytest.raises(juggler.CheckpointError, match=f"another environment: {spaces} {here}"):
        juggler.evaluate(cartpole, 1, env="Acrobot-v1")
    with pytest.raises(juggler.CheckpointError, match="no such file"):
        juggler.load_policy(tmp_path / "nothing")


# Policies in checkpoints of several modules.


FILTER = {"env_to_module": ["mean_std_filter"]}
KEYS: dict[str, dict[str, Any]] = {
    "red": {"model": {"hidden_sizes": [8]}},
    "blue": {"model": {"hidden_sizes": [16]}, "connectors": FILTER, "distribution": "none"},
}


@pytest.fixture
def several(tmp_path: Path) -> tuple[Path, dict[str, Path]]:
    """A checkpoint of two modules, and two of one module each."""
    env = {"red": worlds.plain, "blue": worlds.motors}
    alone = {
        name: worlds.written(tmp_path / name, env[name], **KEYS[name] | {"distribution": None})
        for name in KEYS
    }
    saved = {name: read(path) for name, path in alone.items()}
    tree: dict[str, Any] = {name: each.tree["default"] for name, each in saved.items()}
    tree["connectors"] = {"blue": saved["blue"].tree["connectors"]}
    modules = {
        name: {"version": (1, 1), "extra": {}, "spaces": each.spaces}
        for name, each in saved.items()
    }
    tables = {"agents": {"r": "red", "b": "blue"}, "modules": KEYS}
    config = RunConfig.from_flat({"env": "nowhere:Game", **tables}).flat()
    merged = replace(saved["red"], tree=tree, modules=modules, config=config, spaces={})
    return write(tmp_path / "both" / "checkpoints", merged), alone


@pytest.mark.parametrize("name", KEYS)
def test_a_module_of_several_acts_as_if_it_were_the_only_one(
    several: tuple[Path, dict[str, Path]], name: str
) -> None:
    together, alone = several
    policy = juggler.load_policy(together, module_id=name)
    expected = juggler.load_policy(alone[name])
    assert policy.observation_space == expected.observation_space
    assert policy.action_space == expected.action_space
    seen = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_array_equal(policy.act(seen)[0], expected.act(seen)[0])


def test_which_module_is_asked_where_there_are_several(
    several: tuple[Path, dict[str, Path]],
) -> None:
    together, alone = several
    with pytest.raises(CheckpointError, match="'red'"):
        juggler.load_policy(together)
    with pytest.raises(CheckpointError, match="module 'green'"):
        juggler.load_policy(together, module_id="green")
    with pytest.raises(ValueError, match="'red'"):
        juggler.load_policy(together, module="red")
    juggler.load_policy(alone["red"], module_id="default")


@pytest.mark.parametrize("name", KEYS)
def test_each_module_is_an_onnx_model(
    several: tuple[Path, dict[str, Path]], name: str, tmp_path: Path
) -> None:
    policy = juggler.load_policy(several[0], module_id=name)
    model = onnxruntime.InferenceSession(policy.export_onnx(tmp_path / f"{name}.onnx"))
    seen = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    (action,) = model.run(["action"], {"observation": seen})
    np.testing.assert_allclose(action, policy.act(seen)[0], rtol=1e-5, atol=1e-5)
