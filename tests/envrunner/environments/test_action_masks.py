"""Action masks in observations or infos: no action violates them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from support.scripted_environments import MaskedParts, Scripted, mask_of, masked
from support.scripted_modules import LinearPolicy
from support.vectors import MODES, vector_of_functions

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.action_masks import LegalActions, observe_masks
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.runtime.acting.actor import Actor
from juggler.runtime.wire.trees import flatten

STEPS = 4
SCRIPTS = [
    ((4, "truncated"), (4, "terminated"), (4, "both")),
    ((5, "truncated"), (3, "terminated"), (1, "both"), (1, "truncated"), (1, "terminated")),
    ((30, "truncated"),),
]


def masked_vector(kind: str, mode: AutoresetMode, **options: Any) -> VectorEnv[Any, Any, Any]:
    functions = [functools.partial(masked, script, **options) for script in SCRIPTS]
    return vector_of_functions(kind, mode, functions)


def sampler_of(env: VectorEnv[Any, Any, Any]) -> Sampler:
    return Sampler(env, policy_of(env), STEPS, 5)


def policy_of(env: VectorEnv[Any, Any, Any]) -> Actor:
    module = LinearPolicy(env.single_observation_space, env.single_action_space)
    return Actor(module, env.num_envs, STEPS, 0)


@pytest.mark.parametrize("at_ends", [True, False])
@pytest.mark.parametrize("where", ["info", "observation"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in turn", "async", "sync"])
def test_only_legal_actions_are_tried_and_masks_are_kept(kind, mode, where, at_ends) -> None:
    env = observe_masks(masked_vector(kind, mode, where=where, at_ends=at_ends))
    sampler = sampler_of(env)  # its environments refuse what is illegal
    finals, terminated = 0, np.zeros(len(SCRIPTS), bool)
    for _ in range(10):
        batch = sampler.sample((0, 0)).batch
        plain = "numbers" if where == "observation" else "observation"
        over = np.zeros_like(batch.live)  # [N, T] observations after an end
        over[:, 0] = ~batch.live[:, 0]
        over[:, 1:] = ~batch.live[:, 1:]
        ends = [batch.final_observations, batch.observations, batch.last_observations]
        expected = [mask_of(tree[plain]) for tree in ends]
        if where == "info" and not at_ends:
            expected[0][:] = 1
            expected[1][over] = 1
            if mode is AutoresetMode.NEXT_STEP:
                expected[2][batch.truncated[:, -1]] = 1
        if where == "info" and mode is AutoresetMode.NEXT_STEP:
            expected[1][:, 1:][batch.terminated[:, :-1]] = 1
            expected[1][terminated, 0] = 1
            expected[2][batch.terminated[:, -1]] = 1
            terminated = batch.terminated[:, -1]
        for tree, masks in zip(ends, expected, strict=True):
            np.testing.assert_array_equal(tree["action_mask"], masks)
            assert tree["action_mask"].dtype == np.int8
        finals += len(batch.final_rows)
        chosen = np.take_along_axis(
            batch.observations["action_mask"], batch.actions[..., None], -1
        )[..., 0]
        assert (chosen | over).all()
    assert finals > 5
    assert sum(evaluate(env, policy_of(env), 6, seed=2)[1]) > 6
    env.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in turn", "async"])
def test_each_part_of_an_action_has_a_mask_of_its_own_or_none(kind, mode) -> None:
    functions = [functools.partial(MaskedParts, script) for script in SCRIPTS]
    env = observe_masks(vector_of_functions(kind, mode, functions))
    assert env.single_observation_space["action_mask"] == spaces.Dict(
        {"pair": spaces.Dict({"0": spaces.MultiBinary(3), "1": spaces.MultiBinary(5)})}
    )
    sampler = sampler_of(env)
    for _ in range(6):
        batch = sampler.sample((0, 0)).batch
        masks = dict(flatten(batch.observations["action_mask"]))
        steps = batch.observations["observation"][..., 1].astype(int)
        first = masks["pair", "0"].argmax(-1)
        np.testing.assert_array_equal(first[batch.live], steps[batch.live] % 3)
        assert (masks["pair", "1"].sum(-1) == 2)[batch.live].all()
        assert len(set(batch.actions["free"].ravel())) == 2
    env.close()


# -- what is wrong with a mask --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["info", "observation"])
@pytest.mark.parametrize("mode", MODES)
def test_a_mask_without_a_legal_action_is_one_error(mode, where) -> None:
    def stuck(observation) -> np.ndarray:
        return np.array([1, 0, 1], np.int8) * (observation[1] != 2)

    functions = [functools.partial(masked, SCRIPTS[2]) for _ in range(2)]
    functions[1] = functools.partial(masked, SCRIPTS[2], mask=stuck, where=where)
    functions[0] = functools.partial(masked, SCRIPTS[2], where=where)
    env = observe_masks(vector_of_functions("in turn", mode, functions))
    said = r"environment 1 .* before step 2 of a fragment its action mask has no legal action: "
    with pytest.raises(EnvironmentFailed, match=said):
        sampler_of(env).sample((0, 0))
    with pytest.raises(EnvironmentFailed, match=r"environment 1 .*step 2 of an evaluation"):
        evaluate(env, policy_of(env), 2, seed=0)


@pytest.mark.parametrize("mode", MODES)
def test_where_an_episode_has_ended_no_action_needs_to_be_legal(mode) -> None:
    def none_at_the_end(observation) -> np.ndarray:
        return np.ones(3, np.int8) * (observation[1] != 3)

    made = functools.partial(masked, ((3, "truncated"),), mask=none_at_the_end)
    env = observe_masks(vector_of_functions("in turn", mode, [made] * 2))
    sampler = sampler_of(env)
    finals = np.concatenate(
        [sampler.sample((0, 0)).batch.final_observations["action_mask"] for _ in range(4)]
    )
    assert len(finals) > 4
    assert not finals.any()
    assert evaluate(env, policy_of(env), 4, seed=0)[1] == [3, 3, 3, 3]


@pytest.mark.parametrize("last", [None, [], -np.ones(3, np.int8)], ids=["None", "empty", "-1"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["in turn", "async"])
def test_nobody_reads_the_mask_with_which_an_episode_terminates(kind, mode, last) -> None:
    made = functools.partial(LastMask, ((3, "terminated"), (3, "both"), (30, "truncated")), last)
    with closing(observe_masks(vector_of_functions(kind, mode, [made] * 2))) as env:
        sampler = sampler_of(env)
        for _ in range(3):
            batch = sampler.sample((0, 0)).batch
            assert (batch.observations["action_mask"] == 1).all()
            assert (batch.last_observations["action_mask"] == 1).all()
        assert evaluate(env, policy_of(env), 2, seed=0)[1] == [3, 3]


class LastMask(Scripted):
    """Gives another mask with the end of an episode than before."""

    def __init__(self, script: Any, last: Any) -> None:
        super().__init__(script)
        self.last = last

    def reset(self, **options):
        return super().reset(**options)[0], {"action_mask": np.ones(3, np.int8)}

    def step(self, action):
        *results, _ = super().step(action)
        return *results, {"action_mask": self.last if self.over else np.ones(3, np.int8)}


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("mask", [np.ones(2, np.int8), np.ones(4, np.int8), 1, (np.ones(2),)])
def test_a_late_mask_of_another_length_names_the_environment(mask, others) -> None:
    functions = [functools.partial(masked, ((9, "truncated"),))] * others
    functions += [lambda: LaterMask(mask)]
    env = observe_masks(vector_of_functions("in turn", AutoresetMode.SAME_STEP, functions))
    env.reset()
    env.step(np.zeros(others + 1, int))
    with pytest.raises(EnvironmentFailed, match=f"environment {others} .*action mask in its info"):
        env.step(np.zeros(others + 1, int))


class LaterMask(Scripted):
    """Gives another mask in the second step."""

    def __init__(self, mask: Any) -> None:
        super().__init__(((9, "truncated"),))
        self.mask = mask

    def reset(self, **options: Any) -> Any:
        return super().reset(**options)[0], {"action_mask": np.ones(3, np.int8)}

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        return *result, {"action_mask": self.mask if self.steps == 2 else np.ones(3, np.int8)}


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_is_there_at_first_and_then_is_not_is_an_error(mode) -> None:
    functions = [functools.partial(masked, SCRIPTS[2], silent_at=at) for at in (-1, 2)]
    env = observe_masks(vector_of_functions("in turn", mode, functions))
    with pytest.raises(EnvironmentFailed, match="environment 1 failed in step"):
        sampler_of(env).sample((0, 0))


def test_a_mask_that_some_environments_give_and_others_do_not_is_an_error() -> None:
    env = vector_of_functions("in turn", MODES[1], [lambda: masked(SCRIPTS[2]), Scripted])
    with pytest.raises(EnvironmentFailed, match="environment 1 failed in reset"):
        observe_masks(env)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones(4), r"Discrete\(3\) has shape \[4\], not \[3\]"),
        ({"left": np.ones(3)}, r"no action 'left' in Discrete\(3\)"),
    ],
)
def test_a_mask_that_does_not_fit_its_actions_is_an_error(mask, message) -> None:
    env = vector_of_functions(
        "in turn", MODES[1], [lambda: masked(SCRIPTS[2], mask=lambda _: mask)]
    )
    with pytest.raises(EnvironmentFailed, match=message):
        observe_masks(env)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "number"), [("in turn", -3), ("in turn", 0.5), ("async", 2)])
def test_a_mask_in_infos_with_another_number_than_0_and_1_is_an_error(kind, mode, number) -> None:
    # Vectors keep the masks of all environments in the dtype of the first.
    made = [_strange_in_step_2(each) for each in (type(number)(1), number)]
    functions = [functools.partial(masked, SCRIPTS[2], mask=each) for each in made]
    env = observe_masks(vector_of_functions(kind, mode, functions))
    said = f"environment 1 failed in step: the action mask has other .* 0 and 1: {number}$"
    with pytest.raises(EnvironmentFailed, match=said):
        sampler_of(env).sample((0, 0))
    with pytest.raises(EnvironmentFailed, match=said):
        evaluate(env, policy_of(env), 2, seed=0)
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_in_observations_with_another_number_is_an_error(mode) -> None:
    functions = [
        functools.partial(masked, SCRIPTS[2], mask=each, where="observation")
        for each in (None, _strange_in_step_2(-3))
    ]
    env = observe_masks(vector_of_functions("in turn", mode, functions))
    said = r"environment 1 .* before step 2 of a fragment the action mask has .* 0 and 1: -3$"
    with pytest.raises(EnvironmentFailed, match=said):
        sampler_of(env).sample((0, 0))


def _strange_in_step_2(number: float) -> Callable[[np.ndarray], np.ndarray]:
    numbers = np.array([[1, 1, 0], [1, 1, number]])
    return lambda observation: numbers[int(observation[1] == 2)]


def test_masks_in_observations_must_fit_actions() -> None:
    actions = spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": spaces.Discrete(2)})
    with pytest.raises(ValueError, match=r"has shape \[4\], not \[5\]"):
        LegalActions(spaces.Dict({"a": spaces.MultiBinary(4)}), actions)
    with pytest.raises(ValueError, match="action mask for 'c', and no such action"):
        LegalActions(spaces.Dict({"c": spaces.MultiBinary(2)}), actions)


def test_a_failing_first_reset_leaves_no_environment_open() -> None:
    closed = []

    class Closing(Scripted):
        def reset(self, **options):
            raise RuntimeError("no reset")

        def close(self):
            closed.append(self)

    with pytest.raises(EnvironmentFailed, match="no reset"):
        make_vector_env(EnvRunnerConfig(envs_per_runner=2), Closing)
    assert len(closed) == 2
