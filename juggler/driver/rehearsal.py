"""The process that tries a configuration out before its run starts; see `preflight.rehearse`."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import torch

from juggler.driver.config import RunConfig
from juggler.driver.preflight import DOES, FAILED, READY, Rehearsal, named_parts
from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.learner.process.devices import device_for, devices_here
from juggler.runtime.actors.attachment import describe
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.by_name import found
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import training_pb2


def main(rehearsal: Rehearsal) -> None:
    """Report each step and the outcome, then end the process, even if threads still run."""
    faulthandler.enable(rehearsal.stack.fileno())
    warnings.simplefilter("ignore")  # workers will show them
    torch.set_num_threads(1)
    try:
        said = READY + _rehearse(rehearsal).SerializeToString()
    except BaseException as error:  # user code may call sys.exit
        said = FAILED + describe(error).SerializeToString()
    rehearsal.told.send_bytes(said)
    os._exit(0)


def _rehearse(rehearsal: Rehearsal) -> training_pb2.Ready:
    own_code = cloudpickle.loads(rehearsal.own_code) if rehearsal.own_code else (None, None, {})
    env_factory, module_factory, own_classes = own_code
    config: RunConfig = cloudpickle.loads(rehearsal.config)

    def does(what: str) -> None:
        rehearsal.told.send_bytes(DOES + what.encode())

    here = devices_here()
    for index, name in enumerate(config.driver.device_names()):
        device_for(name, index, here)
    if not rehearsal.own_code:
        for what, name in named_parts(config):
            does(f"importing {name}")
            found(name, what)
    runner = config.env_runner
    if runner.gateway or runner.env.startswith(SCHEME):
        return training_pb2.Ready()  # its environments are on other hosts
    does(f"making the environment {runner.env}")
    try:
        env = make_vector_env(runner, env_factory, just_one=True)
    except EnvironmentFailed as error:
        if runner.env_kwargs and "kwargs" not in error.reason:  # Gymnasium's error may have them
            error.reason += f" (env_kwargs = {runner.env_kwargs})"
        raise
    does("building the module and its learner")
    built = _build(config, env, module_factory, own_classes)
    if ":" in config.learner.algorithm:
        does(f"trying an update with {config.learner.algorithm}")
        _try_update(config, env, module_factory, *built)
    ready = _ready(env)
    does(f"closing the environment {runner.env}")
    env.close()
    return ready


def _build(
    config: RunConfig,
    env: VectorEnvironment,
    module_factory: Any,
    own_classes: Mapping[str, type[Any]],
) -> tuple[EnvToModule, ModuleToEnv, Learner]:
    """What stands between the environment and the weights of a run."""
    connectors = config.connectors.parsed()
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, env.single_observation_space, env.single_action_space, own_classes
    )
    for space in (env_to_module.observation_space, module_to_env.action_space):
        space_to_message(space)  # EnvRunners will send them to learners
    learner = build_learner(
        # Compiling takes a minute, and finds no error of the algorithm.
        replace(config.learner, compile=False),
        module_factory or config.module.module,
        env_to_module.observation_space,
        module_to_env.action_space,
        config.module.model,
        distribution=config.module.distribution,
        connectors=connectors,
        own_connectors=own_classes,
    )
    return env_to_module, module_to_env, learner


def _try_update(
    config: RunConfig,
    env: VectorEnvironment,
    module_factory: Any,
    env_to_module: EnvToModule,
    module_to_env: ModuleToEnv,
    learner: Learner,
) -> None:
    """Have a user's own algorithm learn from one fragment, to find errors in its loss."""
    module = build_module(
        module_factory or config.module.module,
        env_to_module.module_observation_space,
        module_to_env.action_space,
        config.module.model,
        distribution=config.module.distribution,
    )
    steps = config.env_runner.fragment_steps
    policy = BehaviourPolicy(module, env.num_envs, steps, 0, module_to_env)
    batch = Sampler(env, policy, steps, 0, env_to_module).sample((0, 0)).batch
    fetch_metrics(learner.update_from_episodes([batch]))


def _ready(env: VectorEnvironment) -> training_pb2.Ready:
    try:
        module = training_pb2.Ready.Module(
            observation_space=space_to_message(env.single_observation_space),
            action_space=space_to_message(env.single_action_space),
        )
        return training_pb2.Ready(modules=[module])
    except WireError:  # a connector replaces this space
        return training_pb2.Ready()
