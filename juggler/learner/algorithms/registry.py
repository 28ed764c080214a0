"""Algorithms by name: those that ship, and those of users. Imports torch only to build one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.appo import AppoAlgorithm
from juggler.learner.algorithms.bc import BcAlgorithm
from juggler.learner.algorithms.checking import checked_algorithm
from juggler.learner.algorithms.dqn import DqnAlgorithm
from juggler.learner.algorithms.impala import ImpalaAlgorithm
from juggler.learner.algorithms.iql import IqlAlgorithm
from juggler.learner.algorithms.ppo import PpoAlgorithm
from juggler.learner.algorithms.pqn import PqnAlgorithm
from juggler.learner.algorithms.r2d2 import R2d2Algorithm
from juggler.learner.algorithms.sac import SacAlgorithm
from juggler.learner.algorithms.td3 import Td3Algorithm
from juggler.learner.around_config import ImitationConfig, IntrinsicConfig
from juggler.learner.config import LearnerConfig
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.elsewhere import algorithm_here
from juggler.runtime.modules.by_name import found
from juggler.runtime.modules.named_classes import NamedClasses
from juggler.runtime.nearest import nearest, one_of

if TYPE_CHECKING:
    from juggler.learner.core.learner_core import LearnerCore
    from juggler.learner.learner import Learner

#: The algorithms that ship.
ALGORITHMS: dict[str, type[Algorithm]] = {
    "appo": AppoAlgorithm,
    "bc": BcAlgorithm,
    "dqn": DqnAlgorithm,
    "impala": ImpalaAlgorithm,
    "iql": IqlAlgorithm,
    "ppo": PpoAlgorithm,
    "pqn": PqnAlgorithm,
    "r2d2": R2d2Algorithm,
    "sac": SacAlgorithm,
    "td3": Td3Algorithm,
}

_classes = NamedClasses("algorithm", ALGORITHMS, checked_algorithm, "algorithm={}", algorithm_here)
find_algorithm = _classes.find
give_algorithm = _classes.give


def algorithms_with(key: str) -> list[str]:
    """Names of those that ship whose config has this key."""
    return [
        name
        for name, algorithm in ALGORITHMS.items()
        if key in (field.name for field in fields(algorithm.config))
    ]


def build_learner(
    config: LearnerConfig | Mapping[str, Any],
    module: str | Callable[..., Any] | None,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    model_config: Mapping[str, Any],
    *,
    distribution: str | Callable[..., Any] | None = None,
    critic_space: gymnasium.Space[Any] | None = None,
    check_specs: bool = False,
    connectors: ConnectorsConfig | Mapping[str, Any] | None = None,
    own_connectors: Mapping[str, type[Any]] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Learner:
    """The learner of a single-agent run.

    Args:
        config: an algorithm's config, or its fields by name; `algorithm` says which, and is impala
            where it is left out.
        module: as `build_module` takes it; none: what the algorithm says.
        observation_space: of the observations in episodes.
        action_space: of the actions in episodes.
        model_config: what the module is built with.
        distribution: as `build_module` takes it.
        critic_space: the same.
        check_specs: the same.
        connectors: a run's table of them; none: rows go to the module as they come.
        own_connectors: classes of a script by their names: connectors, and the algorithm.
        device: where to compute.
        seed: what the first parameters are drawn from.

    Raises:
        ValueError: a hyper-parameter, the module, a connector or a space is not one that can be
            trained with.
    """
    from juggler.learner.learner import Learner
    from juggler.runtime.connectors.building import build_learner_pipeline
    from juggler.runtime.modules.building import build_module

    if not isinstance(config, LearnerConfig | Mapping):
        raise ValueError(f"config = {config!r}: give a table, such as {{'algorithm': 'impala'}}")
    named = config.get("algorithm") if isinstance(config, Mapping) else config.algorithm
    name = named or LearnerConfig.algorithm
    algorithm = (own_connectors or {}).get(name) or find_algorithm(name)
    must_act_in(name, algorithm, action_space)
    if isinstance(config, Mapping):
        known = [each.name for each in fields(algorithm.config)]
        for key in config:
            if key not in known:
                raise ValueError(f"{key!r} is no key of {name!r}{nearest(key, known)}")
        config = algorithm.config(**config)
    core = algorithm.core
    make_core = found(core, "core") if isinstance(core, str) else core
    if not isinstance(connectors, ConnectorsConfig):
        connectors = ConnectorsConfig.parse(connectors or {})
    pipeline = build_learner_pipeline(connectors, observation_space, action_space, own_connectors)
    make_module = partial(
        build_module,
        module or algorithm.module,
        pipeline.observation_space,
        action_space,
        model_config,
        distribution=distribution,
        critic_space=critic_space,
        check_specs=check_specs,
    )
    made = make_core(make_module, replace(config, intrinsic={}, imitation={}))
    return Learner(_with_rewards(made, config), seed=seed, device=device, pipeline=pipeline)


def _with_rewards(core: Any, config: LearnerConfig) -> LearnerCore[Any]:
    """A core with what a configuration has in place of the environment's rewards, or beside them,
    around it."""
    if config.intrinsic:
        from juggler.learner.algorithms.intrinsic.rnd import Rnd

        return Rnd(core, IntrinsicConfig.parse(config.intrinsic))
    if config.imitation:
        from juggler.learner.algorithms.imitation.discriminator import Discriminator

        return Discriminator(core, ImitationConfig.parse(config.imitation))
    made: LearnerCore[Any] = core
    return made


def must_act_in(name: str, algorithm: type[Algorithm], action_space: gymnasium.Space[Any]) -> None:
    """
    Raises:
        ValueError: the algorithm cannot choose actions of this space; names those that can.
    """
    if _acts_in(algorithm, action_space):
        return
    needed = one_of(space.__name__ for space in algorithm.action_spaces)
    others = [
        key
        for key, each in ALGORITHMS.items()
        if each.offline == algorithm.offline and _acts_in(each, action_space)
    ]
    raise ValueError(
        f"algorithm {name!r} needs a {needed} action space, and this environment has "
        f"{action_space}: choose an algorithm that can act in it, such as {' or '.join(others)}"
    )


def _acts_in(algorithm: type[Algorithm], action_space: gymnasium.Space[Any]) -> bool:
    return not algorithm.action_spaces or isinstance(action_space, algorithm.action_spaces)
