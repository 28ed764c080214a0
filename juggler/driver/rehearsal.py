"""The process that tries a configuration out before its run starts; see `preflight.rehearse`."""

from __future__ import annotations

import faulthandler
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import torch
from google.protobuf.json_format import ParseDict
from gymnasium import Space

from juggler.driver.agents_found import FoundGroup, to_bytes, with_agents
from juggler.driver.checkpoint.frozen_modules import frozen_modules, must_fit
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.builders import give_builder
from juggler.driver.learners_here import must_fit_together
from juggler.driver.preflight import (
    DOES,
    FAILED,
    FOUND,
    WARNS,
    GoesOn,
    Layout,
    Rehearsal,
    named_parts,
)
from juggler.driver.trial_modules import ModuleFailed, begin, build_each, build_frozen, try_updates
from juggler.driver.trial_steps import try_steps
from juggler.driver.trial_updates import Built
from juggler.driver.with_dataset import is_of_another
from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.environments.seeding import line_up_generator
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.environments.video import must_be_filmable
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.game_videos import record_games
from juggler.envrunner.multi_agent.line_up import line_ups_of
from juggler.envrunner.multi_agent.making import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.learner.core.state import StateMismatch
from juggler.learner.data.replay.memory import memory_of
from juggler.learner.learner import Learner
from juggler.learner.process.devices import device_for, devices_here
from juggler.learner.process.hosted_module import REMEDY
from juggler.runtime.actors.attachment import describe
from juggler.runtime.modules.by_name import found
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_from_message, space_to_message
from juggler.runtime.wire.trees import Path, unflatten
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2

#: Agents of simulators, whose spaces are those of the checkpoint.
_UNKNOWN = FoundGroup((), None, None)


def must_go_on(
    config: RunConfig, built: Mapping[str, Built], groups: Sequence[FoundGroup], before: GoesOn
) -> None:
    """
    Args:
        config: of the run.
        built: its modules with their learners, which stay as they are.
        groups: the agents of the environment; (): nobody here knows them.
        before: what the run goes on from.

    Raises:
        ConfigError: the weights of a module are of another network, of other spaces, or of another
            algorithm, such as one without an intrinsic reward; or its optimizer or its learner
            connectors were others.
    """
    for module_id, each in built.items():
        agents = {agent for agent, ids in config.played_by.items() if module_id in ids}
        groups_of_it = (each for each in groups if not agents or agents & {*each.agents})
        group = next(groups_of_it, _UNKNOWN)
        which = f"module {module_id!r}: " if agents else ""
        if why := _misfit(each, module_id, group, before):
            raise ConfigError(
                f"{which}the run cannot go on from {before.checkpoint}: {why}. {REMEDY}"
            )


def groups_before(config: RunConfig, before: GoesOn) -> dict[str, AgentGroup]:
    """By id of a module, the spaces that its agents had when the run was saved. Modules of which
    the checkpoint has none are missing."""
    found = {}
    for module_id in config.module_ids:
        spaces = before.spaces.get(module_id, {})
        if {*spaces} >= {"observation", "action"}:
            both = (
                space_from_message(ParseDict(spaces[side], spaces_pb2.Space()))
                for side in ("observation", "action")
            )
            found[module_id] = AgentGroup((), *both)
    return found


def _misfit(built: Built, module_id: str, group: FoundGroup, before: GoesOn) -> str:
    """Why a module cannot go on with its weights; "": it can, or nobody knows before."""
    layouts, learner = before.layouts.get(module_id), built.learner
    was, now = before.algorithms.get(module_id), learner.core.name
    if was and was != now:
        return f"its state is of {was!r}, and with what is given it would be of {now!r}"
    if layouts is None:
        return ""  # the module came later, or its core has no parameters by name
    weights = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layouts.items()}
    try:
        learner.core.with_weights(learner.state, weights, 0, whole=True)
    except StateMismatch as error:
        if other := group.other_space(before.spaces[module_id]):
            side, was, here = other
            return f"the {side} space of its environment was {was}, and now it is {here}"
        return str(error)
    except ValueError:
        return ""  # a core of somebody's own that takes over no weights, and restores its state
    return _unfit_state(learner, before.states[module_id])


def _unfit_state(learner: Learner, layouts: Mapping[Path, Layout]) -> str:
    """Why a learner cannot go on with its state, whose weights fit; "": it can."""
    state = unflatten((path, np.zeros(*layout)) for path, layout in layouts.items())
    try:
        learner.must_fit(state)
    except StateMismatch as error:
        what = "its optimizer was another" if "moments/" in error.what else "its state differs"
        return f"{what}: {error.what}" if error.what else str(error)
    except Exception:  # a core of somebody's own may read the numbers, which are not there yet
        return ""
    return ""


_TRIED_LINE_UPS = 10


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
    if not isinstance(error, ModuleFailed) or error.__cause__ is None:
        return describe(error)
    failure = describe(error.__cause__)
    failure.message = f"module {error.module_id!r}: {failure.message}"
    return failure


def _rehearse(rehearsal: Rehearsal) -> list[FoundGroup]:
    own_code = cloudpickle.loads(rehearsal.own_code) if rehearsal.own_code else (None, None, {})
    env_factory, module_factory, own_classes = own_code
    config: RunConfig = cloudpickle.loads(rehearsal.config)
    if (builder := config.agents.league.get("builder")) in own_classes:
        give_builder(own_classes[builder])

    def does(what: str) -> None:
        rehearsal.told.send_bytes(DOES + what.encode())

    def warn(text: str) -> None:
        rehearsal.told.send_bytes(WARNS + text.encode())

    here = devices_here()
    devices = [
        device_for(config.driver.device_name(index), index, here)
        for index in range(config.driver.learners)
    ]
    if not rehearsal.own_code:
        for what, name in named_parts(config):
            does(f"importing {name}")
            found(name, what)
    runner, before = config.env_runner, rehearsal.before
    if runner.gateway or runner.env.startswith(SCHEME):  # its environments are on other hosts
        if before is not None:
            known = groups_before(config, before)
            built = build_each(config, known, {}, module_factory, own_classes, does)
            must_go_on(config, built, (), before)
        return []
    if runner.dataset:
        does(f"reading the data set {runner.dataset}")
    else:
        does(f"making the environment {runner.env}")
    try:
        groups, critic_spaces, env = _made(config, env_factory)
    except EnvironmentFailed as error:
        if runner.env_kwargs and "kwargs" not in error.reason:  # Gymnasium's error may have them
            error.reason += f" (env_kwargs = {runner.env_kwargs})"
        raise
    said = [
        FoundGroup(group.agents, _message(group.observation_space), _message(group.action_space))
        for group in groups
    ]
    if config.driver.evaluation_video:
        does(f"rendering the environment {runner.env}")
        _must_render(config, env_factory)
    config = with_agents(config, said)
    frozen = frozen_modules(config, before.run_dir if before else None)
    must_fit(config, frozen, said)
    group_of = _groups_by_module(config, groups)
    built = build_each(config, group_of, critic_spaces, module_factory, own_classes, does)
    kept = {module_id: each.learner.kept_bytes for module_id, each in built.items()}
    must_fit_together(config, kept, devices, lambda gpu: memory_of(torch.device(gpu)))
    if before is None:
        begin(config, built, does)
    else:
        must_go_on(config, built, said, before)
    is_whole = True
    if not runner.dataset:
        does(f"making a few steps of the environment {runner.env}")
        is_whole = try_steps(config, env, built, warn)
    if is_whole:
        is_whole = try_updates(config, env, built, does, warn)
    build_frozen(config, groups, frozen, module_factory, own_classes, does)
    _try_line_ups(config, groups, own_classes, does)
    if is_whole:
        does(f"closing the environment {runner.env}")
        env.close()
    return said


def _made(
    config: RunConfig, env_factory: Any
) -> tuple[list[AgentGroup], Mapping[str, Space[Any]], VectorEnvironment | MultiAgentEnvs]:
    """The agents of an environment, the spaces of what critics see by values of `critic_sees`, and
    the environment itself."""
    runner = config.env_runner
    if runner.dataset:
        recorded = RecordedEnvs.of(replace(runner, envs_per_runner=1))
        if config.plays or is_of_another(runner):
            played = make_vector_env(replace(runner, dataset=""), env_factory, just_one=True)
            recorded.dataset.must_have_the_spaces_of(runner.env, played)
            played.close()
        return [_group_of(recorded)], {}, recorded
    if has_several_agents(runner, env_factory):
        seen = config.critics_see
        envs = make_multi_agent_envs(runner, env_factory, just_one=True, critics_see=seen)
        return list(envs.groups), envs.critic_spaces, envs
    env = make_vector_env(runner, env_factory, just_one=True)
    return [_group_of(env)], {}, env


def _must_render(config: RunConfig, env_factory: Any) -> None:
    """
    Raises:
        ValueError: no video can be recorded of the environment, or a package is missing.
    """
    runner = replace(config.env_runner, envs_per_runner=1, dataset="")
    if has_several_agents(runner, env_factory):
        record_games(runner, env_factory, [[]])
    else:
        must_be_filmable(runner, env_factory)


def _group_of(env: VectorEnvironment) -> AgentGroup:
    """The only agent of each environment."""
    return AgentGroup((), env.single_observation_space, env.single_action_space)


def _groups_by_module(config: RunConfig, groups: Sequence[AgentGroup]) -> dict[str, AgentGroup]:
    """The agents that each module plays, by the module's id."""
    group_of = {agent: group for group in groups for agent in group.agents}
    played = {id: group_of[agent] for agent, ids in config.played_by.items() for id in ids}
    return {module_id: played.get(module_id, groups[0]) for module_id in config.module_ids}


def _try_line_ups(
    config: RunConfig,
    groups: list[AgentGroup],
    own_classes: Mapping[str, type[Any]],
    does: Callable[[str], None],
) -> None:
    """Draw some line-ups, to find errors in a user's own function."""
    if not config.agents.mapping:
        return
    does(f"trying mapping {config.agents.mapping}")
    agents = [agent for group in groups for agent in group.agents]
    line_ups = line_ups_of(agents, config.played_by, config.agents.mapping, own_classes)
    assert line_ups is not None
    for episode in range(_TRIED_LINE_UPS):
        line_ups.draw(line_up_generator(config.driver.seed, 0, episode))


def _message(space: Space[Any]) -> spaces_pb2.Space | None:
    try:
        return space_to_message(space)
    except WireError:  # a connector replaces this space
        return None
