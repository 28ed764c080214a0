from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.array_modules import ROWS, InTorch, WithoutTorch, built, only_numpy, seen, sure
from torch import nn

from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.modules.array_module import ArrayModule
from juggler.runtime.modules.deterministic_actor_critic import DeterministicActorCritic
from juggler.runtime.modules.exploring import exploration_of, with_own_exploration
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.q_network import QNetwork
from juggler.runtime.modules.soft_actor_critic import SoftActorCritic
from juggler.runtime.wire.structures import tree_map

NUMBERS = spaces.Box(-2, 2, (4,), np.float32)
TREE = spaces.Dict(
    {
        "which": spaces.Discrete(3, start=2),
        "parts": spaces.Tuple(
            [
                spaces.MultiBinary(3),
                spaces.MultiDiscrete([2, 3]),
                spaces.Box(0, 255, (5,), np.uint8),
                spaces.Box(-1, 1, (2, 3), np.float64),
            ]
        ),
    }
)
BOX = spaces.Box(np.float32([-1, -3]), np.float32([1, 5]))
ACTIONS = {
    "discrete": spaces.Discrete(5, start=-1),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4], start=[0, 5, -1]),
    "multi-binary": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
    "dict": spaces.Dict({"a": spaces.Tuple([BOX, spaces.Discrete(3)]), "b": spaces.MultiBinary(2)}),
}


def masked(shape: Any) -> spaces.Dict:
    return spaces.Dict({"seen": NUMBERS, "action_mask": shape})


#: By name: module, observation space, action space, model.
CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    **{name: (None, NUMBERS, space, {}) for name, space in ACTIONS.items()},
    "squashed": (None, NUMBERS, BOX, {"squash": True, "free_log_std": False}),
    "squashed dict": (None, NUMBERS, ACTIONS["dict"], {"squash": True}),
    "no hidden layers": (None, NUMBERS, ACTIONS["box"], {"hidden_sizes": []}),
    "relu": (None, NUMBERS, ACTIONS["box"], {"activation": "relu", "hidden_sizes": [8]}),
    "tree": (None, TREE, ACTIONS["discrete"], {}),
    "discrete observations": (None, spaces.Discrete(4, start=1), ACTIONS["discrete"], {}),
    "lstm": (None, NUMBERS, ACTIONS["discrete"], {"recurrent": "lstm"}),
    "gru of a tree": (None, TREE, ACTIONS["dict"], {"recurrent": "gru", "recurrent_size": 7}),
    "mask": (None, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {}),
    "mask, lstm": (
        None,
        masked(spaces.MultiBinary(9)),
        ACTIONS["multi-discrete"],
        {"recurrent": "lstm"},
    ),
    "mask of bits": (None, masked(spaces.MultiBinary([2, 3])), ACTIONS["multi-binary"], {}),
    "mask of a dict": (
        None,
        masked(spaces.Dict({"b": spaces.MultiBinary(2)})),
        ACTIONS["dict"],
        {},
    ),
    "dqn": (QNetwork, NUMBERS, ACTIONS["discrete"], {}),
    "dqn, mask": (QNetwork, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {}),
    "dqn, atoms": (QNetwork, masked(spaces.MultiBinary(5)), ACTIONS["discrete"], {"atoms": 11}),
    "dqn, dueling": (
        QNetwork,
        masked(spaces.MultiBinary(5)),
        ACTIONS["discrete"],
        {"dueling": True, "activation": "relu"},
    ),
    "dqn, dueling, atoms, lstm": (
        QNetwork,
        NUMBERS,
        ACTIONS["discrete"],
        {"dueling": True, "atoms": 11, "recurrent": "lstm"},
    ),
    "dqn, gru": (QNetwork, NUMBERS, ACTIONS["discrete"], {"recurrent": "gru"}),
    "sac": (SoftActorCritic, TREE, BOX, {}),
    "sac, discrete": (SoftActorCritic, NUMBERS, ACTIONS["discrete"], {}),
    "td3": (DeterministicActorCritic, TREE, BOX, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_in_numpy_does_what_it_does_in_torch(case: str) -> None:
    kind, space, actions, model = CASES[case]
    module, twin = built(kind, space, actions, **model)
    arrays, reference = ArrayModule(module, ROWS), InTorch(twin)
    spec = twin.action_distribution()
    generator = torch.Generator().manual_seed(1)
    sure(arrays, seen(space, 99), spec.draw_noise((ROWS,), generator).numpy())
    only_numpy(arrays)
    states = arrays.initial_states(ROWS)
    for step in range(6):
        use = "exploration" if step < 4 else "inference"
        observations = seen(space, step)
        first = np.arange(ROWS) % 3 == step % 3
        noise = spec.draw_noise((ROWS,), generator).numpy()
        states = arrays.restarted(states, first)
        if use == "exploration":
            got = arrays.explore(observations, states, noise)
        else:
            got = arrays.infer(observations, states)
        states = got.states
        expected = reference.step(use, observations, first, noise)
        tree_map(alike, by_name(got), by_name(expected))
        with torch.inference_mode():
            chosen = tree_map(torch.tensor, got.actions)
            logp, its = (
                spec(torch.tensor(inputs)).log_prob(chosen) for inputs in (got.inputs, expected[1])
            )
        np.testing.assert_allclose(logp, its, rtol=1e-4, atol=1e-4)


def by_name(step: Any) -> dict[str, Any]:
    return dict(zip(("actions", "inputs", "states"), step, strict=True))


def alike(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "mask" in case])
def test_what_is_illegal_is_never_done(case: str) -> None:
    kind, space, actions, model = CASES[case]
    module, twin = built(kind, space, actions, **model)
    arrays, spec = ArrayModule(module, 200), twin.action_distribution()
    observations = seen(space, 5, 200)
    generator = torch.Generator().manual_seed(2)
    states = arrays.initial_states(200)
    for _ in range(3):
        noise = spec.draw_noise((200,), generator).numpy()
        chosen = arrays.explore(observations, states, noise).actions
        assert not arrays.note
        probability = spec(torch.from_numpy(arrays.explore(observations, states, noise).inputs))
        assert torch.isfinite(probability.log_prob(tree_map(torch.from_numpy, chosen))).all()
        mask = observations["action_mask"]
        if isinstance(actions, spaces.Discrete):
            assert mask[np.arange(200), chosen - actions.start].all()
            assert (mask == 0).any()
        elif isinstance(actions, spaces.MultiBinary):
            assert (chosen <= mask).all()
        elif isinstance(actions, spaces.Dict):
            assert (chosen["b"] <= mask["b"]).all()
        else:
            starts = np.cumsum([0, *actions.nvec[:-1]]) - actions.start
            for k, start in enumerate(starts):
                legal = mask[:, sum(actions.nvec[:k]) : sum(actions.nvec[: k + 1])].any(1)
                assert mask[np.arange(200), chosen[:, k] + start][legal].all()


def test_a_convolutional_network_acts_in_torch_and_nothing_is_said() -> None:
    space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    module, twin = built(None, space, ACTIONS["discrete"])
    arrays = ArrayModule(module, ROWS)
    noise = np.zeros((ROWS, 5), np.float32)
    got = arrays.explore(seen(space, 0), {}, noise)
    expected = InTorch(twin).step("exploration", seen(space, 0), None, noise)
    np.testing.assert_array_equal(got.inputs, expected[1])
    assert not arrays.note
    only_numpy(arrays)
    with pytest.raises(AssertionError, match="torch acted"):
        arrays.explore(seen(space, 0), {}, noise)


def test_observations_that_are_not_in_the_space_are_refused() -> None:
    module, _ = built(None, spaces.Discrete(4, start=1), ACTIONS["discrete"])
    arrays, noise = ArrayModule(module, 2), np.zeros((2, 5), np.float32)
    arrays.explore(np.array([1, 4]), {}, noise)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="not in Discrete"):
            arrays.explore(np.array([1, wrong]), {}, noise)
    only_numpy(arrays)
    arrays.explore(np.array([1, 4]), {}, noise)


class Own(ActorCritic):
    def _forward(self, batch: Any) -> Any:
        return super()._forward(batch)


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def _with_a_part_of_ones_own(module: Any) -> None:
    module.encoder = nn.Sequential(module.encoder, Halved())


def _with_a_hook(module: Any) -> None:
    module.encoder[0].register_forward_hook(lambda layer, given, output: output.sin())


def _with_a_forward_of_its_own(module: Any) -> None:
    module.encoder.forward = module.encoder.forward


CHANGES = [_with_a_part_of_ones_own, _with_a_hook, _with_a_forward_of_its_own]


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_code_of_ones_own_acts_in_torch_without_a_word(change: Any) -> None:
    module, _ = built(Own if change is None else None, NUMBERS, ACTIONS["discrete"])
    if change is not None:
        change(module)
    arrays, observations = ArrayModule(module, ROWS), seen(NUMBERS, 0)
    for _ in range(2):
        arrays.explore(observations, {}, np.zeros((ROWS, 5), np.float32))
    assert not arrays.note
    only_numpy(arrays)
    with pytest.raises(AssertionError, match="torch acted"):
        arrays.infer(observations, {})


SEEN = {
    "numbers": NUMBERS,
    "no bounds": spaces.Box(-np.inf, np.inf, (17,), np.float64),
    "integers": spaces.Box(-5, 5, (2, 3), np.int64),
    "bytes": spaces.Box(0, 255, (7,), np.uint8),
    "an image without convolutions": spaces.Box(0, 255, (12, 12, 1), np.uint8),
    "multi-discrete": spaces.MultiDiscrete([[3, 2], [2, 2]]),
    "tree": TREE,
}
DONE = {
    **ACTIONS,
    "no dimension": spaces.Box(-2, 2, (), np.float32),
    "bounds": spaces.Box(-2, 2, (2, 2), np.float64),
    "some bounds": spaces.Box(np.float32([-1, -np.inf, 0]), np.float32([1, 5, np.inf])),
    "tuple": spaces.Tuple([spaces.MultiDiscrete([2, 3]), BOX]),
}
MODELS: list[dict[str, Any]] = [
    {},
    {"hidden_sizes": [32, 32], "activation": "relu", "initializer": "default"},
    {"hidden_sizes": []},
]
POLICIES: list[dict[str, Any]] = [{"squash": True}, {"free_log_std": False}]
MEMORIES: list[dict[str, Any]] = [{"recurrent": "lstm"}, {"recurrent": "gru"}]


def shipped() -> dict[str, tuple[Any, Any, Any, dict[str, Any], int]]:
    """Module, observation space, action space and model of everything small that ships, and how
    many rows act: one or many, in turn, so that each model and each space has both."""
    cases = {}
    for module in dict.fromkeys(each.module for each in ALGORITHMS.values()):
        kind = next(each for each in ALGORITHMS.values() if each.module == module)
        name = "default" if module is None else module.rpartition(":")[2]
        critics = name in ("SoftActorCritic", "DeterministicActorCritic")
        models = MODELS if critics else [*MODELS, *MEMORIES]
        if name == "QNetwork":
            models = [*models, {"atoms": 5}, {"atoms": 5, "recurrent": "lstm"}]
            models = [*models, {"dueling": True}, {"dueling": True, "recurrent": "gru"}]
        elif not critics:
            models = [*models, *POLICIES, {"shared_value_layers": True}]
        done = {k: v for k, v in DONE.items() if isinstance(v, kind.action_spaces or spaces.Space)}
        if name == "DeterministicActorCritic":  # which needs bounds
            done = {k: done[k] for k in ("no dimension", "bounds")}
        for i, model in enumerate(models):
            for j, (key, actions) in enumerate(done.items()):
                rows = (1, 64)[(i + j) % 2]
                cases[f"{name}, {key}, {model}"] = (module, NUMBERS, actions, model, rows)
            for j, (key, space) in enumerate(SEEN.items()):
                model, rows = {**model, "encoder": "mlp"}, (1, 64)[(i + j) % 2]
                actions = done.get("discrete", DONE["bounds"])
                cases[f"{name}, sees {key}, {model}"] = (module, space, actions, model, rows)
    return cases


SHIPPED = shipped()


@pytest.mark.parametrize("case", SHIPPED)
def test_nothing_small_that_ships_needs_torch_to_act(case: str) -> None:
    module, space, actions, model, rows = SHIPPED[case]
    made, _ = built(module, space, actions, **model)
    never_needs_torch(made, rows)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("case", ["dqn", "dqn, mask", "dqn, gru", "td3"])
def test_rows_that_explore_each_in_their_own_way_need_no_torch(case: str, rows: int) -> None:
    kind, space, actions, model = CASES[case]
    module, _ = built(kind, space, actions, **model)
    with_own_exploration(module, rows)
    module.get_buffer(exploration_of(module)).uniform_(0.1, 0.9)
    never_needs_torch(module, rows)


def never_needs_torch(module: Any, rows: int) -> None:
    """Once both passes have been compared, no operation of torch is made."""
    arrays, space = ArrayModule(module, rows), module.observation_space
    noise = module.action_distribution().draw_noise((rows,)).numpy()
    sure(arrays, seen(space, 1, rows), noise, rows)
    states = arrays.initial_states(rows)
    with WithoutTorch():
        arrays.explore(seen(space, 2, rows), states, noise)
        arrays.infer(seen(space, 2, rows), states)
    assert not arrays.note
