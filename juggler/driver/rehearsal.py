"""Tries a configuration in a separate process before its run begins.

It sets up the same parts as the first EnvRunner and the learners, with the same functions.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import cloudpickle
import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.first_weights import (
    FirstCheckpoints,
    FirstWeights,
    FrozenModule,
    must_fit,
)
from juggler.driver.checkpoint.snapshots import learner_state, restores
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.league.builders import register_builder
from juggler.driver.module_placement import must_fit_together
from juggler.driver.preflight import (
    DOES,
    FAILED,
    FOUND,
    WARNS,
    Rehearsal,
    Trial,
    named_parts,
    parts_of,
)
from juggler.driver.run_datasets import is_of_another
from juggler.driver.workers.module_setups import acting_setup, add_module, env_runner_setup
from juggler.envrunner.datasets.recorded_envs import RecordedEnvs
from juggler.envrunner.dm_env_rpc.options import SCHEME
from juggler.envrunner.environments.accepted_vector import on_host
from juggler.envrunner.environments.find_environment import VectorEnvironment
from juggler.envrunner.environments.misfits import misfit
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.environments.video import record_videos
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.finiteness import NonFiniteBatch, rule_for
from juggler.envrunner.frozen_weights import FrozenWeights
from juggler.envrunner.multi_agent.make_envs import has_several_agents, make_multi_agent_envs
from juggler.envrunner.multi_agent.multi_agent_stage import MultiAgentStage
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs, Turn
from juggler.envrunner.stage import SingleAgentStage, Stage, UserCode
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.core.state_trees import REMEDY, StateMismatch
from juggler.learner.data.replay.column_storage import memory_of
from juggler.learner.learner import Learner
from juggler.learner.process.hosted_module import begin_with, learner_for
from juggler.learner.process.learner_program import device_for, devices_here
from juggler.learner.shared_parts import SharedParts
from juggler.policies.policy import spaces_of
from juggler.runtime.actors.attachment import describe
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.checkpoints.weights import weights_in
from juggler.runtime.connectors.leaves import holds_masks
from juggler.runtime.connectors.pipelines import (
    EnvToModule,
    ModuleToEnv,
    build_runner_pipelines,
    is_shipped,
)
from juggler.runtime.datasets.dataset import Dataset
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.modules.import_by_name import found
from juggler.runtime.near_matches import all_of, listed
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.structures import (
    choices_of,
    find_outside,
    from_tree,
    space_leaves,
    to_tree,
    tree_leaves,
    tree_map,
)
from juggler.runtime.wire.trees import Tree, flatten, path_name
from juggler.runtime.wire.v1 import spaces_pb2, training_pb2

Envs = VectorEnvironment | MultiAgentEnvs
Report = Callable[[str], None]

_ROUNDING: Final = 1e-5  # relative to the bound, at least to 1: rounding of float32
_SHIPPED: Final = ("juggler.", "juggler:")
_STEPS: Final = 4
_SAMPLED_ACTIONS: Final = 32
_STEP_SECONDS: Final = 3.0  # for all steps: errors of a slower environment show in the run
_UPDATE_SECONDS = 10.0  # with algorithms that ship: errors of slower modules show in the run
_ROUNDS: Final = 10  # after which every module should have acted
_MORE_SECONDS = 5.0  # to sample the steps of a whole update


def main(rehearsal: Rehearsal) -> None:
    """Report steps and outcome, then end the process with its threads."""
    faulthandler.enable(rehearsal.stack.fileno())
    warnings.simplefilter("ignore")  # workers will show them
    torch.set_num_threads(1)
    outcome: tuple[str, Any]

    def report(kind: str, what: str) -> None:
        rehearsal.reports.send((kind, what))

    try:
        # In the try, because a script's classes may fail to unpickle.
        own_code = cloudpickle.loads(rehearsal.own_code) if rehearsal.own_code else (None, None, {})
        trial: Trial = cloudpickle.loads(rehearsal.trial)
        does, warn = partial(report, DOES), partial(report, WARNS)
        outcome = FOUND, _rehearse(trial, *own_code, does=does, warn=warn)
    except BaseException as error:  # user code may call sys.exit
        # As text: exceptions of user code may not unpickle elsewhere.
        failure = describe(error)
        if module_id := getattr(error, "module_id", ""):
            failure.message = f"module {module_id!r}: {failure.message}"
        outcome = FAILED, (failure.message, failure.traceback)
    rehearsal.reports.send(outcome)
    os._exit(0)


def _rehearse(
    trial: Trial, env_factory: Any, module: Any, own_classes: Any, *, does: Report, warn: Report
) -> list[FoundGroup]:
    """Set up an EnvRunner and the learners; return the agents."""
    config, before, own = trial.config, trial.before, UserCode(module, own_classes)
    if (builder := config.agents.league.get("builder")) in own_classes:
        register_builder(own_classes[builder])
    here, driver = devices_here(), config.driver
    indices = range(driver.learners)
    devices = [device_for(driver.device_name(index), index, here) for index in indices]
    if not (env_factory or module or own_classes):
        for what, name in named_parts(config):
            does(f"importing {name}")
            found(name, what)
    runner = config.env_runner
    # The environments of simulators are on other hosts: spaces are known only of a resumed run.
    if runner.gateway or runner.env.startswith(SCHEME):
        if before is not None:
            learners = learners_of(config, groups_before(config, before), {}, own, does)
            must_continue(config, learners, (), before)
        return []
    groups, critic_spaces, env = _made(config, env_factory, does)
    agents_here = [
        FoundGroup(group.agents, _message(group.observation_space), _message(group.action_space))
        for group in groups
    ]
    # Tables and spaces first: their errors are the clearest.
    config = with_agents(config, agents_here)
    must_fit(config, trial.frozen, agents_here)
    group_of = {agent: group for group in groups for agent in group.agents}
    played = {id: group_of[agent] for agent, ids in config.played_by.items() for id in ids}
    group_by_id = {module_id: played.get(module_id, groups[0]) for module_id in config.module_ids}
    learners = learners_of(config, group_by_id, critic_spaces, own, does)
    kept = {module_id: learner.kept_bytes for module_id, learner in learners.items()}
    must_fit_together(config, kept, devices, lambda gpu: memory_of(torch.device(gpu)))
    if before is not None:
        must_continue(config, learners, agents_here, before)
    else:
        does("loading the first weights of modules")
        begin(config, learners, (trial.origins or FirstCheckpoints.of(config)).beginning(config)[0])
    # Only now, with all parts, the environment is played and learned from.
    _play(config, env, learners, partial(stage_of, config, trial.frozen, own), does, warn)
    return agents_here


def _play(
    config: RunConfig,
    env: Envs,
    learners: Mapping[str, Learner],
    stage: Callable[[Envs, int], Stage],
    does: Report,
    warn: Report,
) -> None:
    """Try some steps and updates, and close the environment.

    Raises:
        EnvironmentFailed: the environment failed, or gave a number that is not finite or an
            observation outside its Discrete, MultiDiscrete or MultiBinary space.
        NonFiniteBatch: a module's first weights give log-probabilities that are not finite, or the
            environment gave a number that is not finite as an update was tried.
    """
    name, is_whole = config.env_runner.env, True
    if not config.env_runner.dataset:
        does(f"making a few steps of the environment {name}")
        _watch(env, name, warn)
        is_whole = in_time(lambda: _first_steps(config, stage(env, 1)), _STEP_SECONDS)
        if not is_whole and any(_is_own(config.of(module_id)) for module_id in learners):
            warn(f"no update was tried: the first steps took longer than {_STEP_SECONDS:g} s")
    # An interrupted environment may be in any state, and is not touched again.
    if is_whole and try_updates(config, stage, env, learners, does, warn):
        does(f"closing the environment {name}")
        env.close()


def _made(
    config: RunConfig, env_factory: Any, does: Report
) -> tuple[list[AgentGroup], Mapping[str, Space[Any]], Envs]:
    """Make an environment; return agents, critics' spaces and the environment."""
    runner = config.env_runner
    does(
        f"reading the data set {runner.dataset}"
        if runner.dataset
        else f"making the environment {runner.env}"
    )
    try:
        made = _environment(config, env_factory)
    except EnvironmentFailed as error:
        if runner.env_kwargs and "kwargs" not in error.reason:  # Gymnasium's error may show them
            error.reason += f" (env_kwargs = {runner.env_kwargs})"
        raise
    # Now, because the first video may be due only hours later.
    if config.driver.evaluation_video:
        does(f"rendering the environment {runner.env}")
        filmed = replace(runner, envs_per_runner=1, dataset="")
        several = has_several_agents(filmed, env_factory)
        record_videos(filmed, env_factory, [], several_agents=several)
    return made


def _environment(
    config: RunConfig, env_factory: Any
) -> tuple[list[AgentGroup], Mapping[str, Space[Any]], Envs]:
    runner = config.env_runner
    if runner.dataset:
        recorded = RecordedEnvs(Dataset(runner.dataset), 1)
        # Policies play the environment later, with what they learn from the data set.
        if config.plays or is_of_another(runner):
            played = make_vector_env(replace(runner, dataset=""), env_factory, just_one=True)
            recorded.dataset.must_have_the_spaces_of(runner.env, played)
            played.close()
        env: VectorEnvironment = recorded
    elif has_several_agents(runner, env_factory):
        seen = config.critics_see
        envs = make_multi_agent_envs(runner, env_factory, just_one=True, critics_see=seen)
        return list(envs.groups), envs.critic_spaces, envs
    else:
        env = make_vector_env(runner, env_factory, just_one=True)
    alone = AgentGroup((), env.single_observation_space, env.single_action_space)
    return [alone], {}, env


def _message(space: Space[Any]) -> spaces_pb2.Space | None:
    try:
        return space_to_message(space)
    except WireError:  # a connector replaces this space
        return None


def _watch(env: Envs, name: str, warn: Report) -> None:
    """Check the observations that environments give from now on.

    A number outside a discrete space is an error. Outside a Box it is a warning, given once.
    """
    warned: set[str] = set()

    def warn_once(about: str, text: str) -> None:
        if about not in warned:
            warned.add(about)
            warn(text)

    # What does not fit its space at all is an error of the environments themselves.
    def check(
        space: Space[Any], observations: Tree, call: str, whose: Callable[[int], str]
    ) -> None:
        if outside := find_outside(choices_of(space_leaves(space)), observations):
            (row, *_), what = outside
            raise EnvironmentFailed(f"{whose(row)} ({name})", call, f"its observation{what}")
        for row, what in () if "boxes" in warned else _beyond_boxes(space, observations):
            warn_once(
                "boxes",
                f"{whose(row)} ({name}) gives observations outside its observation_space: "
                f"after {call}, one{what}. The run uses them unchanged; correct the bounds of "
                "the space if they are wrong",
            )

    # Rows of a turn are the agents that act in it.
    def check_turn(envs: MultiAgentEnvs, turn: Turn, call: str) -> None:
        for group, part in zip(envs.groups, turn.groups, strict=True):

            def whose(row: int, acting: NDArray[Any] = part.acting) -> str:
                environment, agent = divmod(int(acting[row]), len(envs.agents))
                return f"agent {envs.agents[agent]!r} in environment {environment}"

            check(group.observation_space, part.observations, call, whose)
        if turn.unread:
            warn_once("infos", f"infos after {call} have {turn.unread}")

    # On the object itself: samplers ask what kind of vector it is.
    def watched(call: str) -> Callable[..., Any]:
        method = getattr(env, call)

        def checked(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if isinstance(env, VectorEnv):
                space = env.single_observation_space
                check(space, to_tree(space, on_host(result[0])), call, "environment {}".format)
            else:
                check_turn(env, result, call)
            return result

        return checked

    vars(env).update({call: watched(call) for call in ("reset", "step")})


def _beyond_boxes(space: Space[Any], observations: Tree) -> Iterator[tuple[int, str]]:
    """Yield rows of observations [B, ...] outside a Box, with a description."""
    arrays = dict(flatten(observations))
    for path, leaf in space_leaves(space):
        if not isinstance(leaf, spaces.Box):
            continue
        array = arrays[path].astype(np.float64)  # [B, ...]
        low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)  # [...] both
        # The difference to an infinite bound may be NaN, which is not greater.
        with np.errstate(invalid="ignore"):
            short = low - array > _ROUNDING * np.maximum(np.abs(low), 1.0)  # [B, ...]
            over = array - high > _ROUNDING * np.maximum(np.abs(high), 1.0)  # [B, ...]
        for row, *place in np.argwhere(short | over).tolist():
            at = tuple(place)
            where = f" at {path_name(path)}" if path else ""
            where += f" has {array[(row, *at)]:g}" + (f" at {place}" if place else "")
            yield row, f"{where}, and the bounds are {low[at]:g} and {high[at]:g}"


def learners_of(
    config: RunConfig,
    group_of: Mapping[str, AgentGroup],
    critic_spaces: Mapping[str, Space[Any]],
    own: UserCode,
    does: Report,
) -> dict[str, Learner]:
    """Build the learners of modules, given agents that they play."""
    shared = SharedParts(config.agents.shared)
    learners: dict[str, Learner] = {}
    for module_id, group in group_of.items():
        which = f"module {module_id!r}" if config.played_by else "the module"
        does(f"building {which} and its learner")
        of_module = config.of(module_id)
        critic_space = critic_spaces.get(of_module.module.critic_sees)
        with _failures_of(module_id if config.played_by else ""):
            learners[module_id] = learner_of(of_module, group, critic_space, own)
        shared.add(module_id, learners[module_id])
    return learners


def learner_of(
    config: RunConfig, group: AgentGroup, critic_space: Space[Any] | None, own: UserCode
) -> Learner:
    """Build a learner like its process."""
    env_to_module, module_to_env = build_runner_pipelines(
        config.connectors.parsed(), group.observation_space, group.action_space, own.classes
    )
    _try_connectors(env_to_module, group.observation_space)
    _try_actions(module_to_env, group.action_space)
    in_batches = training_pb2.Ready.Module(
        observation_space=space_to_message(env_to_module.observation_space),
        action_space=space_to_message(module_to_env.action_space),
        critic_space=None if critic_space is None else space_to_message(critic_space),
    )
    # Compiling takes a minute, and finds no error of the algorithm.
    config = replace(config, learner=replace(config.learner, compile=False))
    command = add_module(config, DEFAULT_MODULE, in_batches, seed=0)
    learner = learner_for(command, own.module_factory, own.classes, "cpu")
    if isinstance(learner.core, Population):
        raise ValueError(
            f"algorithm {config.learner.algorithm!r}: its core is a Population, and a run "
            "cannot act with one member: it is for scripts, see docs/cores.md"
        )
    return learner


def _try_connectors(pipeline: EnvToModule, space: Space[Any]) -> None:
    """Call observation connectors with two samples, and check the results."""
    if all(map(is_shipped, pipeline.stored)):
        return
    space_leaves(space)
    samples = [to_tree(space, space.sample()) for _ in range(2)]
    observations = tree_map(lambda *each: np.stack(each), *samples)  # [2, ...]
    if holds_masks(space):
        observations[ACTION_MASK] = tree_map(np.ones_like, observations[ACTION_MASK])
    # EnvRunners give views of their columns, which must not change.
    for connector in pipeline.stored:
        given = tree_map(np.copy, observations)
        result = connector(observations)
        name, own = f"connector {type(connector).__name__}", connector.observation_space
        rows = result if result is None else tree_map(lambda each: each[0], result)
        if why := misfit(own, rows if rows is None else from_tree(own, rows)):
            raise ValueError(f"{name}: {why}")
        same = tree_map(partial(np.array_equal, equal_nan=True), given, observations)
        if not all(each for _, each in tree_leaves(same)):
            raise ValueError(f"{name} changes the observations that it gets: return new arrays")
        observations = result


def _try_actions(pipeline: ModuleToEnv, space: Space[Any]) -> None:
    """Call action connectors with samples, and check the results.

    The environment would raise an error for them, and seem to be at fault.
    """
    own = [type(each).__name__ for each in pipeline.connectors if not is_shipped(each)]
    if not own:
        return
    acted = pipeline.action_space
    samples = [to_tree(acted, acted.sample()) for _ in range(_SAMPLED_ACTIONS)]
    actions = to_tree(space, pipeline(tree_map(lambda *each: np.stack(each), *samples)))
    why = misfit(space, from_tree(space, tree_map(lambda each: each[0], actions)), "action")
    if not why and (outside := find_outside(choices_of(space_leaves(space)), actions)):
        why = f"its action{outside[1]}"
    if why:
        raise ValueError(f"connector {own[-1]}: {why}")


def begin(
    config: RunConfig, learners: Mapping[str, Learner], beginning: Mapping[str, FirstWeights]
) -> None:
    """Load the first weights of each module from another run."""
    for module_id, first in beginning.items():
        with _failures_of(module_id if config.played_by else ""):
            begin_with(
                learners[module_id],
                first.weights,
                first.source,
                whole=first.whole,
                selectable=first.selectable,
            )


@contextmanager
def _failures_of(module_id: str) -> Iterator[None]:
    """Name the module in errors; "": the only module."""
    try:
        yield
    except Exception as error:
        error.module_id = module_id  # type: ignore[attr-defined]
        raise


def groups_before(config: RunConfig, before: Checkpoint) -> dict[str, AgentGroup]:
    """Return modules' spaces from a checkpoint."""
    known = {}
    for module_id in config.module_ids:
        if module_id in before.module_ids and (both := spaces_of(before, module_id)):
            known[module_id] = AgentGroup((), *both)
    return known


def must_continue(
    config: RunConfig,
    learners: Mapping[str, Learner],
    groups: Sequence[FoundGroup],
    before: Checkpoint,
) -> None:
    """Check that learners can continue from a checkpoint.

    Raises:
        ConfigError: the weights of a module are of another network, other spaces or another
            algorithm, or its optimizer or its learner connectors have changed.
    """
    unknown = FoundGroup((), None, None)
    for module_id, learner in learners.items():
        agents = {agent for agent, ids in config.played_by.items() if module_id in ids}
        groups_of_it = (each for each in groups if not agents or agents & {*each.agents})
        which = f"module {module_id!r}: " if agents else ""
        if why := _misfit(learner, module_id, next(groups_of_it, unknown), before):
            raise ConfigError(f"{which}the run cannot continue from {before.path}: {why}. {REMEDY}")


def _misfit(learner: Learner, module_id: str, group: FoundGroup, before: Checkpoint) -> str:
    """Return why a module cannot continue with its state, or ""."""
    weights = weights_in(before.tree).get(module_id)
    was = before.modules.get(module_id, {}).get("extra", {}).get("algorithm", "")
    if was and was != (now := learner.core.name):
        return f"its state is of {was!r}, and this configuration needs {now!r}"
    if weights is None:
        return ""  # the module came later, or its core has no parameters by name
    # Weights come first, because their errors say most.
    try:
        learner.core.with_weights(learner.state, weights, 0, whole=True)
    except StateMismatch as error:
        if other := group.other_space(before.spaces_of(module_id)):
            side, had, here = other
            return f"the {side} space of its environment was {had}, and is now {here}"
        return str(error)
    except ValueError:
        return ""  # a user's core that loads no weights, but restores its state
    # The optimizer and the algorithm have further state.
    try:
        learner.must_fit(learner_state(module_id, before))
    except StateMismatch as error:
        what = "its optimizer was another" if "moments/" in error.what else "its state differs"
        return f"{what}: {error.what}" if error.what else str(error)
    except Exception:  # a user's core may read the numbers, which are missing here
        return ""
    return ""


def stage_of(
    config: RunConfig, frozen: Mapping[str, FrozenModule], own: UserCode, env: Envs, steps: int
) -> Stage:
    """Set up environment and modules like an EnvRunner."""
    # Rows end after each round, including the rows of agents that rarely act.
    trained = {
        module_id: replace(acting_setup(config.of(module_id), own.classes), row_age=0)
        for module_id in config.module_ids
    }
    others = {module_id: module.acting_setup() for module_id, module in frozen.items()}
    setup = env_runner_setup(config, ENVRUNNER, trained, others)
    runner = replace(setup.env_runner, envs_per_runner=env.num_envs, fragment_steps=steps)
    if not setup.agents:
        return SingleAgentStage(replace(setup, env_runner=runner), cast(Any, env), 0, own)
    weights = FrozenWeights()
    for module_id, module in frozen.items():
        for part in restores(module_id, module.tree, {}):
            weights.add(part)
    # Line-ups of a league come with requests; here any player may play any agent.
    setup = replace(setup, env_runner=runner, league=False)
    return MultiAgentStage(setup, cast(Any, env), 0, own, weights)


class _TimeIsUp(BaseException):
    """Not an Exception, because an environment's code may catch Exceptions."""


def in_time(work: Callable[[], object], seconds: float) -> bool:
    """Do something within a time limit; called by the main thread."""

    def is_up(*_: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, is_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _TimeIsUp:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return True


def _first_steps(config: RunConfig, stage: Stage) -> None:
    """Make the first steps; errors of non-finite numbers name the step."""
    rounds = _played(config, stage)
    for number in range(1, _STEPS + 1):
        try:
            next(rounds)
        except NonFiniteBatch as error:
            if error.column == "action_logp":
                raise
            raise _failure(error, config.env_runner.env, number) from error


def _failure(error: NonFiniteBatch, env: str, number: int) -> EnvironmentFailed:
    """Describe the step at which an environment's number was not finite."""
    whose = f"agent {error.agent!r} in " if error.agent else ""
    value = "not finite" if error.value is None else f"{error.value}"
    # A fragment of one step begins with the observation of the step before, which was checked, or
    # of a reset.
    call, when = "step", f"in step {number} after its first reset"
    if error.column.startswith(("observations", "critic_observations")) and not error.agent:
        call, when = "reset", f"before step {number}"
    column = error.column.removeprefix("last_").removeprefix("final_")
    return EnvironmentFailed(
        f"{whose}environment {error.environment} ({env})",
        call,
        f"{column} are {value} {when}: {rule_for(error.value)}",
    )


def _played(config: RunConfig, stage: Stage) -> Iterator[dict[str, EpisodeBatch]]:
    """Yield the batches of each round, by module id."""
    versions = dict.fromkeys(config.module_ids, Version(0, 0))
    while True:
        results = stage.play(versions.keys(), versions).modules
        for result in results.values():
            if isinstance(result, NonFiniteBatch):
                raise result
        yield {
            module_id: result.batch
            for module_id, result in results.items()
            if not isinstance(result, NonFiniteBatch) and result.batch is not None
        }


def try_updates(
    config: RunConfig,
    stage: Callable[[Envs, int], Stage],
    env: Envs,
    learners: Mapping[str, Learner],
    does: Report,
    warn: Report,
) -> bool:
    """Update modules with own code; return whether time was enough.

    The time is limited if all algorithms ship.
    """
    own = [module_id for module_id in learners if _is_own(config.of(module_id))]
    if not own:
        return True

    def work() -> None:
        if config.played_by:
            does(f"sampling for an update of {listed(own)}")
        rounds = _rounds(config, stage(env, config.env_runner.fragment_steps))
        batches = next(rounds)
        # The environment continues from module to module, without a reset.
        for module_id in own:
            of_module, which = config.of(module_id), module_id if config.played_by else ""
            if module_id not in batches:  # none of its agents has acted
                continue
            named = f" of module {module_id!r}" if which else ""
            does(f"trying an update{named} with {of_module.learner.algorithm}")
            more = (again.get(module_id) for again in rounds)
            with _failures_of(which):
                doubt = try_update(of_module, learners[module_id], batches[module_id], more)
            if doubt:
                warn(f"module {module_id!r}: {doubt}" if which else doubt)

    if any(":" in config.of(module_id).learner.algorithm for module_id in own):
        work()
        return True
    return in_time(work, _UPDATE_SECONDS)


def _is_own(config: RunConfig) -> bool:
    """Return whether updates of a module call a user's code."""
    named = [config.learner.algorithm, *(name for _, name in parts_of(config))]
    return any(
        callable(name) or (isinstance(name, str) and ":" in name and not name.startswith(_SHIPPED))
        for name in named
    )


def _rounds(config: RunConfig, stage: Stage) -> Iterator[dict[str, EpisodeBatch]]:
    """Yield batches of each module that acts in a few rounds."""
    played = _played(config, stage)
    while True:
        batches: dict[str, EpisodeBatch] = {}
        for _ in range(_ROUNDS):
            batches = {**next(played), **batches}
            if len(batches) == len(config.module_ids):
                break
        yield batches


def try_update(
    config: RunConfig, learner: Learner, batch: EpisodeBatch, more: Iterator[EpisodeBatch | None]
) -> str:
    """Make an update, and return a warning for people, or "".

    Raises:
        ValueError: the gradient of the loss is not finite, even with several batches.
    """

    def updated(batches: Sequence[EpisodeBatch]) -> Mapping[str, float] | None:
        return fetch_metrics(learner.update_from_episodes(batches)) or None

    algorithm = config.learner.algorithm
    learner.data.try_out()
    made = updated([batch])
    # A deviation over one row is 0: more rows decide.
    if _not_finite(made):
        batches = [batch, *_further(batch.live_steps, config.learner.batch_size, more)]
        if len(batches) == 1:
            return ""  # the run's updates may have more rows, and so be finite
        made = updated(batches)
        if odd := _not_finite(made):
            live = sum(each.live_steps for each in batches)
            raise ValueError(
                f"algorithm {algorithm!r}: in an update from {live} steps, all of whose numbers "
                f"are finite, {odd}. Updates with this loss change nothing: look for a "
                "logarithm or a root of 0, or a division by 0"
            )
    # A replay that is still filling makes no update.
    if made is not None or learner.data.books().get("replay_rows") != 0:
        return ""
    return (
        f"algorithm = {algorithm!r}: `rows` of its replay kept none of the "
        f"{int(batch.live.sum())} steps of a fragment. If it never keeps any, nothing is ever "
        "learned"
    )


def _further(
    live: int, batch_size: int, more: Iterator[EpisodeBatch | None]
) -> Iterator[EpisodeBatch]:
    """Yield further batches until an update is full, or time is up."""
    end = time.monotonic() + _MORE_SECONDS
    for batch in more:
        if batch is not None:
            live += batch.live_steps
            yield batch
        if live >= batch_size or time.monotonic() >= end:
            return


def _not_finite(made: Mapping[str, float] | None) -> str:
    """Name metrics that are not finite, if the optimizer made no step."""
    if made is None or made.get("skipped") != 1.0:
        return ""
    return all_of(f"{name} is {made[name]}" for name in made if not math.isfinite(made[name]))
