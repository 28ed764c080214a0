"""Each module of a run with its learner, before the run begins, to find errors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gymnasium import Space

from juggler.driver.checkpoint.beginning import beginning_of
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.config import RunConfig
from juggler.driver.frozen_policies import frozen_parts
from juggler.driver.preflight import parts_of
from juggler.driver.trial_steps import in_time
from juggler.driver.trial_updates import Built, can_be_tried, rounds_of_batches
from juggler.envrunner.environments.naming import VectorEnvironment
from juggler.envrunner.multi_agent.turns import AgentGroup, MultiAgentEnvs
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.population import Population
from juggler.learner.process.hosted_module import begin_with
from juggler.learner.shared_parts import SharedParts
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.modules.by_name import given_or_named
from juggler.runtime.nearest import listed
from juggler.runtime.wire.spaces import space_to_message

_SHIPPED = "juggler."
_SECONDS = 10.0  # for updates with algorithms that ship: errors of slower modules show in the run


class ModuleFailed(Exception):
    """A module, or its learner, cannot be built."""

    def __init__(self, module_id: str) -> None:
        super().__init__(module_id)
        self.module_id = module_id


def build_each(
    config: RunConfig,
    group_of: Mapping[str, AgentGroup],
    critic_spaces: Mapping[str, Space[Any]],
    module_factory: Any,
    own_classes: Mapping[str, type[Any]],
    does: Callable[[str], None],
) -> dict[str, Built]:
    """Build each of these modules and its learner once.

    Args:
        group_of: by id of a module, agents that it plays.
    """
    shared = SharedParts(config.agents.shared)
    several = bool(config.played_by)
    built: dict[str, Built] = {}
    for module_id, group in group_of.items():
        which = f"module {module_id!r}" if several else "the module"
        does(f"building {which} and its learner")
        of_module = config.of(module_id)
        factory = given_or_named(of_module.module.module, module_factory, own_classes)
        with _failures_of(module_id if several else ""):
            critic_space = critic_spaces.get(of_module.module.critic_sees)
            built[module_id] = build_one(of_module, group, critic_space, factory, own_classes)
        shared.add(module_id, built[module_id].learner)
    return built


def build_one(
    config: RunConfig,
    group: AgentGroup,
    critic_space: Space[Any] | None,
    module: Any,
    own_classes: Mapping[str, type[Any]],
    device: str = "cpu",
) -> Built:
    """What stands between an environment of these spaces and the weights of a module.

    Raises:
        ValueError: a part cannot be built.
    """
    connectors = config.connectors.parsed()
    env_to_module, module_to_env = build_runner_pipelines(
        connectors, group.observation_space, group.action_space, own_classes
    )
    for space in (env_to_module.observation_space, module_to_env.action_space):
        space_to_message(space)  # EnvRunners will send them to learners
    if critic_space is not None:
        space_to_message(critic_space)
    learner = build_learner(
        # Compiling takes a minute, and finds no error of the algorithm.
        replace(config.learner, compile=False),
        module,
        env_to_module.observation_space,
        module_to_env.action_space,
        config.module.model,
        distribution=config.module.distribution,
        critic_space=critic_space,
        connectors=connectors,
        own_connectors=own_classes,
        device=device,
    )
    if isinstance(learner.core, Population):
        raise ValueError(
            f"algorithm {config.learner.algorithm!r}: its core is a Population, of which a run "
            "cannot act with one member: it is for scripts, as docs/cores.md shows"
        )
    return Built(config, module, env_to_module, module_to_env, learner, critic_space)


def begin(config: RunConfig, built: Mapping[str, Built], does: Callable[[str], None]) -> None:
    """Give each module the weights from elsewhere that it begins with."""
    does("looking for weights that modules begin with")
    beginning = beginning_of(config)
    if beginning is None:
        return
    for module_id, each in built.items():
        if module_id in beginning.weights:
            source = beginning.sources[module_id]
            with _failures_of(module_id if config.played_by else ""):
                begin_with(
                    each.learner,
                    beginning.weights[module_id],
                    source.words,
                    whole=module_id in beginning.whole,
                    selectable=source.selectable,
                )


def try_updates(
    config: RunConfig,
    env: VectorEnvironment | MultiAgentEnvs,
    built: Mapping[str, Built],
    does: Callable[[str], None],
    warn: Callable[[str], None],
) -> bool:
    """Make an update of each module that is trained with code of a user's own: an algorithm, the
    module itself, or a part of it. The main thread calls this.

    Returns:
        Whether there was time for it, which is limited where all algorithms ship. If not, the
        environment may have been left in the middle of a call.
    """
    own = {id: each for id, each in built.items() if _is_own(each.config)}
    if not own or not can_be_tried(config):
        return True

    def work() -> None:
        _make_updates(config, env, built, own, does, warn)

    if any(":" in each.config.learner.algorithm for each in own.values()):
        work()
        return True
    return in_time(work, _SECONDS)


def _is_own(config: RunConfig) -> bool:
    """Whether updates of a module call code of a user's own."""
    named = [config.learner.algorithm, *(name for _, name in parts_of(config))]
    return any(
        callable(name) or (isinstance(name, str) and ":" in name and not name.startswith(_SHIPPED))
        for name in named
    )


def _make_updates(
    config: RunConfig,
    env: VectorEnvironment | MultiAgentEnvs,
    built: Mapping[str, Built],
    own: Mapping[str, Built],
    does: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    several = bool(config.played_by)
    if several:
        does(f"sampling for an update of {listed(own)}")
    rounds = rounds_of_batches(config, env, built)
    batches = next(rounds)
    for module_id, each in own.items():
        if module_id in batches:
            which = f" of module {module_id!r}" if several else ""
            does(f"trying an update{which} with {each.config.learner.algorithm}")
            more = (again.get(module_id) for again in rounds)
            with _failures_of(module_id if several else ""):
                if doubt := each.try_update(batches[module_id], more):
                    warn(f"module {module_id!r}: {doubt}" if several else doubt)


def build_frozen(
    config: RunConfig,
    groups: list[AgentGroup],
    frozen: Mapping[str, FrozenModule],
    module_factory: Any,
    own_classes: Mapping[str, type[Any]],
    does: Callable[[str], None],
) -> None:
    """Build every module that is not trained once, with its weights."""
    for module_id in config.agents.frozen_ids:
        does(f"building module {module_id!r}, which is not trained")
        agents = [agent for agent, ids in config.played_by.items() if module_id in ids]
        (group,) = (group for group in groups if agents[0] in group.agents)
        try:
            spaces = group.observation_space, group.action_space
            frozen_parts(frozen[module_id], *spaces, module_factory, own_classes)
        except Exception as error:
            raise ModuleFailed(module_id) from error


@contextmanager
def _failures_of(module_id: str) -> Iterator[None]:
    """Name the module in errors; "": there is only one."""
    try:
        yield
    except Exception as error:
        if module_id:
            raise ModuleFailed(module_id) from error
        raise
