"""WorkerRegistry: when each worker is set up, and when it is ready."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.workers_world import ready_message

from juggler.driver.config import RunConfig
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.learner.process.learner_program import LearnerSetup, ModuleSetup
from juggler.runtime.actors.hub import Worker
from juggler.runtime.actors.worker import from_json
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.v1 import training_pb2

VECTOR = spaces.Box(-math.inf, math.inf, (4,), np.float32)
TWO = spaces.Discrete(2)


def _worker(role: str, index: int = 0, incarnation: str = "a", host: str = "here") -> Worker:
    return Worker(
        worker_id=f"{role}-{index}",
        incarnation=incarnation,
        role=role,
        index=index,
        host=host,
        pid=1,
        devices=("cpu",),
        data_addresses=(f"unix:/{role}-{index}", f"{host}:5005"),
        local=True,
    )


def _ready(observation: Any = VECTOR, action: Any = TWO, rows: int = 16) -> training_pb2.Ready:
    return ready_message(
        observation_space=space_to_message(observation),
        action_space=space_to_message(action),
        rows=rows,
        steps=32,
    )


def _registry(first_update: int = 0, **keys: Any) -> WorkerRegistry:
    evaluated = {"evaluation_seconds": 1.0, "evaluation_episodes": 16}
    return WorkerRegistry(RunConfig.from_flat({**evaluated, **keys}), first_update)


def _set_up(registry: WorkerRegistry, worker: Worker) -> training_pb2.Setup:
    """Commands to a worker that is set up on arrival."""
    ((told, setup),) = registry.joined(worker)
    assert told is worker
    return setup


def _with_runner(registry: WorkerRegistry, index: int = 0) -> Worker:
    runner = _worker("envrunner", index)
    _set_up(registry, runner)
    registry.runner_ready(runner, _ready())
    return runner


# -- spaces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["envrunner", "evaluator"])
def test_a_learner_waits_for_the_spaces_of_the_first_runner(first: str) -> None:
    registry = _registry()
    learner, runner = _worker("learner"), _worker(first)
    assert registry.joined(learner) == []
    _set_up(registry, runner)
    ((told, _),) = registry.runner_ready(runner, _ready())
    assert told is learner
    module = registry.module_setup("default", seed=7)
    assert (module.module_id, module.seed) == ("default", 7)
    assert space_from_message(module.observation_space) == VECTOR
    assert space_from_message(module.action_space) == TWO


@pytest.mark.parametrize(
    "other",
    [
        _ready(observation=spaces.Box(-math.inf, math.inf, (5,), np.float32)),
        _ready(observation=spaces.Box(-1, math.inf, (4,), np.float32)),
        _ready(observation=spaces.Box(-math.inf, math.inf, (4,), np.float64)),
        _ready(action=spaces.Discrete(3)),
        _ready(action=spaces.Discrete(2, start=1)),
    ],
    ids=["shape", "bound", "dtype", "number of actions", "first action"],
)
@pytest.mark.parametrize("role", ["envrunner", "evaluator"])
def test_a_runner_with_other_spaces_is_refused(role: str, other: training_pb2.Ready) -> None:
    registry = _registry()
    _with_runner(registry)
    stranger = _worker(role, index=7, host="elsewhere")
    _set_up(registry, stranger)
    with pytest.raises(ValueError, match="other spaces") as refused:
        registry.runner_ready(stranger, other)
    said = str(refused.value)
    assert said.startswith(f"{role}-7 on elsewhere has other spaces")
    assert "same version of the environment?" in said
    assert "\n" not in said
    assert stranger not in registry.ready.values()
    assert space_from_message(registry.spaces["default"].observation_space) == VECTOR


# -- seeds ----------------------------------------------------------------------------------------


def test_every_worker_and_every_life_of_it_has_a_seed_of_its_own() -> None:
    seeds = set()
    count = 0
    for run_seed in (0, 1):
        for first_update in (0, 100):
            registry = _registry(first_update, seed=run_seed)
            _with_runner(registry, index=9)
            for role in ("envrunner", "evaluator", "learner"):
                for index in (0, 1):
                    for incarnation in ("a", "b", "c"):
                        setup = _set_up(registry, _worker(role, index, incarnation))
                        seeds.add(setup.seed)
                        count += 1
    assert len(seeds) == count == 2 * 2 * 3 * 2 * 3


# -- what each role is told -----------------------------------------------------------------------


def test_a_learner_is_told_how_to_learn_and_a_runner_how_to_sample() -> None:
    registry = _registry(lr=0.25, envs_per_runner=3, model={"hidden_sizes": [8]}, devices="cpu")
    worker = _worker("envrunner")
    runner = from_json(_set_up(registry, worker).config, EnvRunnerSetup)
    registry.runner_ready(worker, _ready(rows=3))
    learner = from_json(_set_up(registry, _worker("learner")).config, LearnerSetup)
    module = from_json(registry.module_setup("default", seed=0).config, ModuleSetup)
    ((module_id, acting),) = runner.modules.items()
    assert (acting.algorithm, acting.off_policy, acting.row_age) == ("impala", True, 3)
    assert (module_id, runner.env_runner.envs_per_runner) == ("default", 3)
    assert learner == LearnerSetup(device="cpu", updates_in_flight=2, may_meet=False)
    assert module.learner["lr"] == 0.25
    assert acting.module == module.module
    assert module.module.model == {"hidden_sizes": [8]}
    assert acting.connectors == module.connectors


# -- present --------------------------------------------------------------------------------------


def test_training_needs_a_ready_runner_and_a_ready_learner() -> None:
    registry = _registry()
    learner = _worker("learner")
    assert registry.joined(learner) == []
    assert not registry.complete()
    runner = _with_runner(registry)
    assert not registry.complete()
    assert registry.describe() == ("envrunners: 1 attached, 1 ready; learners: 1 attached, 0 ready")
    registry.learner_ready(learner, training_pb2.ModuleReady(module_id="default"))
    assert registry.complete()
    registry.left(runner)
    assert not registry.complete()
    assert registry.describe() == ("envrunners: 0 attached, 0 ready; learners: 1 attached, 1 ready")


def test_a_worker_that_leaves_late_does_not_take_its_successor_along() -> None:
    registry = _registry()
    before = _with_runner(registry)
    successor = _worker("envrunner", incarnation="b")
    _set_up(registry, successor)
    registry.runner_ready(successor, _ready())
    registry.left(before)
    assert registry.attached == {"envrunner-0": successor}
    assert registry.of_role("envrunner") == [successor]
    registry.left(successor)
    registry.left(successor)
    assert registry.attached == registry.ready == {}
    assert registry.had_runner
