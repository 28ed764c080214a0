"""Environments of any spaces, and checkpoints of runs in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from google.protobuf.json_format import MessageToDict
from gymnasium import spaces

from juggler.driver.config import RunConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.runtime.checkpoints.checkpoint import Checkpoint, write
from juggler.runtime.connectors.connector import ActionConnector, ObservationConnector
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.acting_part import weights_of
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.structures import to_tree

VECTOR = spaces.Box(-3, 3, (4,), np.float32)
PARTS = spaces.Dict(
    {
        "joints": spaces.Tuple([spaces.Box(-1, 1, (3,), np.float64), spaces.MultiBinary(2)]),
        "order": spaces.Dict(
            {"corner": spaces.Discrete(4, start=1), "dials": spaces.MultiDiscrete([3, 2])}
        ),
    }
)
IMAGE = spaces.Box(0, 255, (16, 16, 1), np.uint8)
CHOICE = spaces.Discrete(3, start=2)
MOTORS = spaces.Box(np.array([-2, 0], np.float64), np.array([2, 10], np.float64), dtype=np.float64)
COMPOUND = spaces.Dict(
    {
        "pair": spaces.Tuple([spaces.Discrete(3), spaces.MultiDiscrete([2, 3])]),
        "switches": spaces.MultiBinary(3),
        "motors": spaces.Box(-1, 1, (2,), np.float32),
    }
)


class World(gymnasium.Env[Any, Any]):
    """Shows random observations; rewards are weighted sums of actions."""

    def __init__(
        self, observations: spaces.Space[Any], actions: spaces.Space[Any], mask: str = ""
    ) -> None:
        self.shown, self.action_space = copy.deepcopy(observations), copy.deepcopy(actions)
        self.observation_space = observations
        self.mask = mask
        if mask == "observation":
            legal = spaces.MultiBinary(int(actions.n))
            self.observation_space = spaces.Dict({"seen": observations, "action_mask": legal})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.shown.seed(seed)
        self.left = int(self.np_random.integers(3, 9))
        return self.show()

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        if self.mask:
            assert self.legal[action - self.action_space.start]
        numbers = np.asarray(spaces.flatten(self.action_space, action), np.float64)
        reward = float(numbers @ self.np_random.normal(size=numbers.shape))
        self.left -= 1
        observation, info = self.show()
        return observation, reward, self.left == 0, False, info

    def show(self):
        observation, info = self.shown.sample(), {}
        if self.mask:
            self.legal = self.np_random.integers(0, 2, int(self.action_space.n)).astype(np.int8)
            self.legal[self.np_random.integers(len(self.legal))] = 1
        if self.mask == "observation":
            observation = {"seen": observation, "action_mask": self.legal}
        elif self.mask == "info":
            info = {"action_mask": self.legal}
        return observation, info


def plain() -> World:
    return World(VECTOR, CHOICE)


def motors() -> World:
    return World(VECTOR, MOTORS)


def parts() -> World:
    return World(PARTS, COMPOUND)


def images() -> World:
    return World(IMAGE, CHOICE)


def masked() -> World:
    return World(VECTOR, CHOICE, "observation")


def masked_in_info() -> World:
    return World(VECTOR, CHOICE, "info")


class Halve(ObservationConnector):
    """In operators that arrays and tensors have both."""

    takes_tensors = True

    def __call__(self, observations):
        return observations / 2


class Sorted(ObservationConnector):
    """In NumPy alone."""

    def __call__(self, observations):
        return np.sort(observations)


class Backwards(ActionConnector):
    takes_tensors = True

    def __call__(self, actions):
        return -actions


def written(
    path: Path,
    env: Callable[..., World] | str,
    factory: type[RLModule] | None = None,
    own: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A checkpoint with random module and filters; its directory."""
    name = env if isinstance(env, str) else f"support.worlds:{env.__name__}"
    config = RunConfig.from_flat({"env": name, "vectorize": "sync", "envs_per_runner": 1, **keys})
    environments = make_vector_env(config.env_runner)
    observed, acted = (environments.single_observation_space, environments.single_action_space)
    env_to_module, module_to_env = build_runner_pipelines(
        config.connectors.parsed(), observed, acted, own
    )
    torch.manual_seed(5)
    built = build_module(
        factory or config.module.module,
        env_to_module.module_observation_space,
        module_to_env.action_space,
        config.module.model,
    )
    weights = weights_of(built)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    for seed in range(20):
        observations, _ = environments.reset(seed=seed)
        env_to_module.watch(to_tree(observed, observations))
    learned = env_to_module.take_delta(np.ones((config.env_runner.envs_per_runner, 20), np.bool_))
    environments.close()
    names = dict(built.named_parameters())
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    tree: dict[str, Any] = {
        "default": {
            "parameters": {name: array for name, array in arrays.items() if name in names},
            "buffers": {name: array for name, array in arrays.items() if name not in names},
        }
    }
    if learned:
        tree["connectors"] = learned
    checkpoint = Checkpoint(
        version=(1, 1),
        tree=tree,
        modules={},
        counters={},
        config=config.flat(),
        spaces={
            "observation": MessageToDict(space_to_message(observed)),
            "action": MessageToDict(space_to_message(acted)),
        },
    )
    return write(path / "checkpoints", checkpoint)
