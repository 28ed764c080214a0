"""The process that tries a configuration out before its run starts; see `preflight.rehearse`."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import torch
from gymnasium import Space
from gymnasium.vector import VectorEnv

from juggler.driver.agents_config import listed
from juggler.driver.agents_found import FoundGroup, to_bytes, with_agents
from juggler.driver.config import RunConfig
from juggler.driver.preflight import DOES, FAILED, FOUND, Rehearsal, named_parts
from juggler.envrunner.behaviour_policy import BehaviourPolicy
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFinite
from juggler.envrunner.multi_agent.casting import cast
from juggler.envrunner.multi_agent.making import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.envrunner.paced.gathered_policy import GatheredPolicy
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.learner.process.devices import device_for, devices_here
from juggler.runtime.actors.attachment import describe
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.by_name import found, given_or_named
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2

_ROUNDS = 10  # until every module should have acted


class _ModuleFailed(Exception):
    """A module, or its learner, cannot be built."""

    def __init__(self, module_id: str) -> None:
        super().__init__(module_id)
        self.module_id = module_id


def main(rehearsal: Rehearsal) -> None:
    """Report each step and the outcome, then end the process, even if threads still run."""
    faulthandler.enable(rehearsal.stack.fileno())
    warnings.simplefilter("ignore")  # workers will show them
    torch.set_num_threads(1)
    try:
        said = FOUND + to_bytes(_rehearse(rehearsal))
    except BaseException as error:  # user code may call sys.exit
        said = FAILED + _failure(error).SerializeToString()
    rehearsal.told.send_bytes(said)
    os._exit(0)


def _failure(error: BaseException) -> attach_pb2.Failure:
    if not isinstance(error, _ModuleFailed) or error.__cause__ is None:
        return describe(error)
    failure = describe(error.__cause__)
    failure.message = f"module {error.module_id!r}: {failure.message}"
    return failure


def _rehearse(rehearsal: Rehearsal) -> list[FoundGroup]:
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
        return []  # its environments are on other hosts
    does(f"making the environment {runner.env}")
    try:
        groups, env = _made(config, env_factory)
    except EnvironmentFailed as error:
        if runner.env_kwargs and "kwargs" not in error.reason:  # Gymnasium's error may have them
            error.reason += f" (env_kwargs = {runner.env_kwargs})"
        raise
    said = [
        FoundGroup(group.agents, _message(group.observation_space), _message(group.action_space))
        for group in groups
    ]
    _build(with_agents(config, said), groups, env, module_factory, own_classes, does)
    does(f"closing the environment {runner.env}")
    env.close()
    return said


def _made(
    config: RunConfig, env_factory: Any
) -> tuple[list[AgentGroup], VectorEnvironment | MultiAgentEnvs]:
    """The agents of an environment, and itself."""
    runner = config.env_runner
    if has_several_agents(runner, env_factory):
        envs = make_multi_agent_envs(runner, env_factory, 0, just_one=True)
        return list(envs.groups), envs
    env = make_vector_env(runner, env_factory, just_one=True)
    return [AgentGroup((), env.single_observation_space, env.single_action_space)], env


def _build(
    config: RunConfig,
    groups: list[AgentGroup],
    env: VectorEnvironment | MultiAgentEnvs,
    module_factory: Any,
    own_classes: Mapping[str, type[Any]],
    does: Callable[[str], None],
) -> None:
    """Build every module and its learner once. A user's own algorithms also make an update."""
    group_of = {agent: group for group in groups for agent in group.agents}
    spaces_of = {module_id: group_of[agent] for agent, module_id in config.played_by.items()}
    several = bool(spaces_of)
    built: dict[str, _Built] = {}
    for module_id in config.module_ids:
        which = f"module {module_id!r}" if several else "the module"
        does(f"building {which} and its learner")
        of_module = config.of(module_id)
        factory = given_or_named(of_module.module.module, module_factory, own_classes)
        with _failures_of(module_id if several else ""):
            group = spaces_of.get(module_id, groups[0])
            built[module_id] = _build_one(of_module, group, factory, own_classes)
    own = {id: each for id, each in built.items() if ":" in each.config.learner.algorithm}
    if not own:
        return
    if isinstance(env, VectorEnv):
        ((module_id, only),) = own.items()
        does(f"trying an update with {only.config.learner.algorithm}")
        return only.try_update([_fragment(only, env)])
    does(f"sampling for an update of {listed(own)}")
    batches = _sampled(config, env, built)
    for module_id, each in own.items():
        if module_id in batches:
            does(f"trying an update of module {module_id!r} with {each.config.learner.algorithm}")
            with _failures_of(module_id):
                each.try_update([batches[module_id]])


@contextmanager
def _failures_of(module_id: str) -> Iterator[None]:
    """Name the module in errors; "": there is only one."""
    try:
        yield
    except Exception as error:
        if module_id:
            raise _ModuleFailed(module_id) from error
        raise


@dataclass(frozen=True, slots=True)
class _Built:
    """What stands between the environment and the weights of a module.

    Attributes:
        config: of the module.
        module: its class or factory, or its name.
    """

    config: RunConfig
    module: Any
    env_to_module: EnvToModule
    module_to_env: ModuleToEnv
    learner: Learner

    def acting(self) -> RLModule:
        """A module as EnvRunners have it."""
        return build_module(
            self.module,
            self.env_to_module.module_observation_space,
            self.module_to_env.action_space,
            self.config.module.model,
            distribution=self.config.module.distribution,
        )

    def try_update(self, batches: list[EpisodeBatch]) -> None:
        """Have the algorithm learn once, to find errors in its loss."""
        fetch_metrics(self.learner.update_from_episodes(batches))


def _build_one(
    config: RunConfig, group: AgentGroup, module: Any, own_classes: Mapping[str, type[Any]]
) -> _Built:
    connectors = config.connectors.parsed()
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, group.observation_space, group.action_space, own_classes
    )
    for space in (env_to_module.observation_space, module_to_env.action_space):
        space_to_message(space)  # EnvRunners will send them to learners
    learner = build_learner(
        # Compiling takes a minute, and finds no error of the algorithm.
        replace(config.learner, compile=False),
        module,
        env_to_module.observation_space,
        module_to_env.action_space,
        config.module.model,
        distribution=config.module.distribution,
        connectors=connectors,
        own_connectors=own_classes,
    )
    if DEFAULT_MODULE not in (trained := learner.get_params()):
        raise ValueError(
            f"algorithm {config.learner.algorithm!r}: its core has the parameters of "
            f"{listed(list(trained))}, and a run acts with {DEFAULT_MODULE!r}: a Population is for "
            "scripts, as docs/cores.md shows"
        )
    return _Built(config, module, env_to_module, module_to_env, learner)


def _fragment(built: _Built, env: VectorEnvironment) -> EpisodeBatch:
    """What an EnvRunner with this environment, which has one agent, would send to a learner."""
    steps = built.config.env_runner.fragment_steps
    policy = BehaviourPolicy(built.acting(), env.num_envs, steps, 0, built.module_to_env)
    return Sampler(env, policy, steps, 0, built.env_to_module).sample((0, 0)).batch


def _sampled(
    config: RunConfig, envs: MultiAgentEnvs, built: Mapping[str, _Built]
) -> dict[str, EpisodeBatch]:
    """The first batch of each module, if one of its agents acts in a few rounds."""
    steps = config.env_runner.fragment_steps
    modules = {}
    for module_id, role in cast(envs, config.played_by, config.module_ids).items():
        each = built[module_id]
        policy = GatheredPolicy(each.acting(), each.env_to_module, each.module_to_env, 0)
        slots = role, envs.num_envs, envs.agents, policy, each.env_to_module, steps
        modules[module_id] = ModuleSlots(*slots, row_age=0)
    sampler = MultiAgentSampler(envs, modules, steps, 0)
    versions = dict.fromkeys(modules, Version(0, 0))
    batches: dict[str, EpisodeBatch] = {}
    for _ in range(_ROUNDS):
        for module_id, result in sampler.sample(modules.keys(), versions).modules.items():
            if isinstance(result, NonFinite):
                raise result
            if result.batch is not None:
                batches.setdefault(module_id, result.batch)
        if len(batches) == len(modules):
            break
    return batches


def _message(space: Space[Any]) -> spaces_pb2.Space | None:
    try:
        return space_to_message(space)
    except WireError:  # a connector replaces this space
        return None
