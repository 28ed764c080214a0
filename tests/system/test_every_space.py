"""Every kind of space, from an environment to an update.

No processes here: what a runner samples goes through a frame into a store, and from there to a
learner, which must find the log-probabilities that the runner acted with.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.evaluation import evaluate
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.batch_store import BatchStore, HeldBatch
from juggler.learner.data.validation import BatchValidator
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.mergeable_state import from_bytes, merge, to_bytes
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.structures import space_leaves
from juggler.runtime.wire.v1 import episodes_pb2
from juggler.testing import AnythingEnv

Space = gymnasium.Space[Any]

ROWS, STEPS = 3, 5
# Weights are not small ones: another observation or state makes another policy.
SMALL = {"hidden_sizes": [8], "recurrent_size": 6, "initializer": "default"}
NUMBERS = spaces.Box(-3, 3, (3,), np.float32)
OBSERVED: dict[str, Space] = {
    "discrete": spaces.Discrete(4, start=-2),
    "small discrete": spaces.Discrete(3, dtype=np.int32),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-3, 5]]),
    "bytes of choices": spaces.MultiDiscrete([3, 2], dtype=np.uint8),
    "multi-binary": spaces.MultiBinary((2, 3)),
    "number": spaces.Box(-1, 1, (), np.float32),
    "vector": NUMBERS,
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "half": spaces.Box(-1, 1, (2,), np.float16),
    "integers": spaces.Box(-9, 9, (2,), np.int64),
    "unsigned integers": spaces.Dict(
        {str(bits): spaces.Box(0, 9, (2,), f"uint{bits}") for bits in (16, 32, 64)}
    ),
    "truths": spaces.Box(0, 1, (3,), np.bool_),
    "matrix": spaces.Box(-1, 1, (4, 3), np.float32),
    "cube": spaces.Box(-1, 1, (2, 3, 4), np.float32),
    "four dimensions": spaces.Box(-1, 1, (2, 3, 2, 2), np.float32),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "grey image": spaces.Box(0, 255, (17, 9), np.uint8),
    "image": spaces.Box(0, 255, (36, 41, 3), np.uint8),
    "image of one line": spaces.Box(0, 255, (1, 7, 3), np.uint8),
    "channels first": spaces.Box(0, 255, (3, 11, 13), np.uint8),
    "stacked images": spaces.Box(0, 255, (2, 10, 10, 1), np.uint8),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (9, 9, 1), np.uint8), "at": NUMBERS}),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)]),
    "nested": spaces.Dict(
        {
            "b": spaces.Tuple([NUMBERS, spaces.Dict({"deep/er": spaces.Discrete(2)})]),
            "a": spaces.MultiDiscrete([2, 2]),
        }
    ),
}
CHOSEN: dict[str, Space] = {
    "discrete": spaces.Discrete(3, start=5),
    "multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [-3, 5]]),
    "bytes of choices": spaces.MultiDiscrete([3, 2], dtype=np.uint8),
    "multi-binary": spaces.MultiBinary((2, 2)),
    "bounded": spaces.Box(-0.1, 0.2, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (), np.float32),
    "half bounded": spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 1]), dtype=np.float64),
    "doubles": spaces.Box(-0.1, 1 / 3, (2, 1), np.float64),
    "dict": spaces.Dict({"move": spaces.Discrete(3), "arm": spaces.Box(-1, 1, (2,), np.float64)}),
    "tuple": spaces.Tuple(
        [spaces.MultiBinary(2), spaces.Dict({"x": spaces.Discrete(2, start=1)}), NUMBERS]
    ),
}
PIPELINES: dict[str, dict[str, Any]] = {
    "none": {},
    "flat": {"env_to_module": ["flatten"]},
    "filtered": {"env_to_module": ["mean_std_filter"]},
    "stacked": {
        "env_to_module": [{"use": "frame_stack", "k": 3}],
        "learner": ["normalize_rewards", "next_observations"],
    },
    "previous": {
        "env_to_module": ["previous_actions_and_rewards"],
        "learner": ["next_observations", "returns_to_go", "clip_rewards"],
    },
    "all": {
        "env_to_module": [
            "mean_std_filter",
            {"use": "frame_stack", "k": 2},
            "previous_actions_and_rewards",
        ],
        "learner": ["normalize_rewards"],
    },
}
AUTORESETS = [*AutoresetMode]


class Anything(AnythingEnv):
    """Accepts only actions of its space; some episodes have one step."""

    def reset(self, **how: Any) -> Any:
        found = super().reset(**how)
        self._left = int(self.np_random.integers(1, 9))
        return found

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return super().step(action)


def _pipelines(name: str, observed: Space) -> dict[str, Any]:
    """Pipelines for a space's observations, flattened first if necessary."""
    leaves = [leaf for _, leaf in space_leaves(observed)]
    boxes = [leaf.dtype for leaf in leaves if isinstance(leaf, spaces.Box)]
    serves = {"filtered": boxes and boxes != [np.uint8] and boxes != [np.bool_], "stacked": boxes}
    pipelines = PIPELINES[name]
    if serves.get("filtered" if name == "all" else name, True):
        return pipelines
    return {**pipelines, "env_to_module": ["flatten", *pipelines["env_to_module"]]}


class World:
    """A runner's and a learner's parts around environments."""

    def __init__(
        self,
        make: Any,
        recurrent: str = "none",
        pipelines: dict[str, Any] | None = None,
        autoreset: AutoresetMode = AutoresetMode.SAME_STEP,
        burn_in: int = 0,
        **model: Any,
    ) -> None:
        config = EnvRunnerConfig(envs_per_runner=ROWS, fragment_steps=STEPS)
        if autoreset is not AutoresetMode.SAME_STEP:  # which only vectors of a user's own have
            make = functools.partial(SyncVectorEnv, [make] * ROWS, autoreset_mode=autoreset)
        self.env = make_vector_env(config, make)
        connectors = ConnectorsConfig(**(pipelines or {}))
        connectors.validate()
        self.connectors, module_to_env = build_runner_pipelines(
            connectors, self.env.single_observation_space, self.env.single_action_space
        )
        model = {**SMALL, "recurrent": recurrent, **model}
        module = build_module(
            None,
            self.connectors.module_observation_space,
            module_to_env.action_space,
            model,
            check_specs=True,
        )
        strip_to_acting(module)
        self.policy = Actor(module, ROWS, STEPS, 0, module_to_env, self.connectors)
        self.sampler = Sampler(self.env, self.policy, STEPS, 0)
        stored = self.connectors.observation_space, module_to_env.action_space
        self._new_learner = functools.partial(
            build_learner,
            {"algorithm": "impala", "burn_in": burn_in, "lr": 1e-2},
            None,
            *stored,
            model,
            connectors=connectors,
            check_specs=True,
        )
        self.learner = self._new_learner(seed=1)
        validator = BatchValidator(DEFAULT_MODULE, *stored, self.learner.example_states())
        self._arrived: list[HeldBatch] = []
        self.store = BatchStore(validator, self._arrived.append)
        self._learned: Any = None
        self.publish()

    def publish(self) -> None:
        self.policy.load(self.learner.get_weights())

    def sampled(self, batch_id: int) -> HeldBatch:
        """A fragment, as the learner has it behind the network."""
        fragment = self.sampler.sample((0, 0))
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id, envrunner="envrunner-0", live_steps=fragment.batch.live_steps
        )
        reader = FrameReader(episodes_pb2.BatchHeader)
        tree = {DEFAULT_MODULE: fragment.batch.to_tree()}
        (frame,) = filter(None, map(reader.feed, encode_frame(header, tree)))
        assert self.store.insert(frame) == ""
        if fragment.connector_delta:
            delta = from_bytes(to_bytes(fragment.connector_delta))
            self._learned = merge(self._learned, delta) if self._learned else delta
            self.connectors.set_state(self._learned)
        ((held,), missing) = self.store.pop([batch_id])
        assert not missing
        return held

    def again(self) -> Learner:
        """Another learner, from what this one saves."""
        learner = self._new_learner(seed=2)
        learner.restore(*self.learner.save())
        return learner

    def train(self, updates: int = 2) -> None:
        """Updates, each on one batch that the newest weights acted in."""
        for batch_id in range(updates):
            self.publish()
            batch = self.sampled(batch_id).episodes
            metrics = fetch_metrics(self.learner.update_from_episodes([batch]))
            assert all(np.isfinite(value) for value in metrics.values()), metrics
            assert metrics["skipped"] == 0
            assert metrics["grad_norm"] > 0
            # Each of its terms is at least 0, and 0 for equal log-probabilities alone.
            assert metrics["kl"] == pytest.approx(0, abs=1e-5)

    def check(self) -> None:
        """Train, play, save and go on."""
        self.train()
        returns, lengths, _ = evaluate(self.env, self.policy, 4, 3)
        assert len(returns) == 4
        assert 1 <= min(lengths) <= max(lengths) <= 8
        other = self.again()
        self.sampler.reset(9)
        batch = self.sampled(100).episodes
        ours, theirs = (
            fetch_metrics(each.update_from_episodes([batch])) for each in (self.learner, other)
        )
        assert ours == theirs
        self.env.close()


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)


def _cases() -> list[Any]:
    """Every observation space; memories, action spaces, autoreset modes and pipelines alternate."""
    cases = []
    chosen, pipelines = list(CHOSEN), list(PIPELINES)
    for i, observed in enumerate(OBSERVED):
        recurrent = ("none", "lstm", "none", "gru")[i % 4]
        action, pipeline = chosen[i % len(chosen)], pipelines[i % len(pipelines)]
        case = (observed, action, recurrent, pipeline, AUTORESETS[i % 3])
        cases.append(pytest.param(*case, id=", ".join(map(str, case))))
    return cases


@pytest.mark.parametrize(("observed", "chosen", "recurrent", "pipeline", "autoreset"), _cases())
def test_a_learner_learns_from_every_space_what_a_runner_sampled(
    observed: str, chosen: str, recurrent: str, pipeline: str, autoreset: AutoresetMode
) -> None:
    make = functools.partial(Anything, OBSERVED[observed], CHOSEN[chosen])
    World(make, recurrent, _pipelines(pipeline, OBSERVED[observed]), autoreset).check()


@pytest.mark.parametrize(
    ("chosen", "model"),
    [
        ("bounded", {"squash": True}),
        ("doubles", {"free_log_std": False}),
        ("dict", {"squash": True}),
    ],
)
def test_rescaled_actions_stay_within_their_bounds(chosen: str, model: dict[str, Any]) -> None:
    make = functools.partial(Anything, OBSERVED["vector"], CHOSEN[chosen])
    World(make, pipelines={"module_to_env": ["rescale_actions"]}, **model).check()


@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_burn_in_goes_with_connectors_that_remember(autoreset: AutoresetMode) -> None:
    make = functools.partial(Anything, OBSERVED["dict"], CHOSEN["tuple"])
    World(make, "lstm", PIPELINES["all"], autoreset, burn_in=2).check()
