"""The algorithms that ship, by name. No torch here until one is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium

from juggler.learner.config import AppoConfig, ImpalaConfig, LearnerConfig, PpoConfig
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.nearest import nearest

if TYPE_CHECKING:
    from juggler.learner.learner import Learner


@dataclass(frozen=True)
class Algorithm:
    """A config and a core that go together.

    Attributes:
        config: its hyper-parameters.
        core: package.module:Class, called with module factories by id and the config. A name, so
            that the driver can read configs without importing torch.
        off_policy: whether it makes up for whatever policy has acted, as long as its
            log-probabilities are known. Else that must have been its own, not long ago.
    """

    config: type[LearnerConfig]
    core: str
    off_policy: bool


ALGORITHMS: dict[str, Algorithm] = {
    "appo": Algorithm(
        config=AppoConfig, core="juggler.learner.algorithms.appo.core:Appo", off_policy=True
    ),
    "impala": Algorithm(
        config=ImpalaConfig, core="juggler.learner.algorithms.impala.core:Impala", off_policy=True
    ),
    "ppo": Algorithm(
        config=PpoConfig, core="juggler.learner.algorithms.ppo.core:Ppo", off_policy=False
    ),
}


def find_algorithm(name: object) -> Algorithm:
    """Raises:
    ValueError: there is no algorithm of that name; says which is nearest.
    """
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    raise ValueError(f"algorithm = {name!r} is not known{nearest(name, ALGORITHMS)}")


def algorithms_with(key: str) -> list[str]:
    """Names of those whose config has this key."""
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
    check_specs: bool = False,
    connectors: ConnectorsConfig | None = None,
    own_connectors: Mapping[str, type[Any]] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Learner:
    """The learner of a single-agent run.

    Args:
        config: an algorithm's config, or its fields by name; `algorithm` says which.
        module: as `build_module` takes it.
        observation_space: of the observations in episodes.
        action_space: of the actions in episodes.
        model_config: what the module is built with.
        distribution: as `build_module` takes it.
        check_specs: the same.
        connectors: of the run; none: rows go to the module as they come.
        own_connectors: as `build_learner_pipeline` takes it.
        device: where to compute.
        seed: what the first parameters are drawn from.

    Raises:
        ValueError: a hyper-parameter, the module, a connector or a space is not one that can be
            trained with.
    """
    from juggler.learner.learner import Learner
    from juggler.runtime.connectors.building import build_learner_pipeline
    from juggler.runtime.modules.building import build_module

    if isinstance(config, Mapping):
        config = find_algorithm(config.get("algorithm", "impala")).config(**config)
    package, _, attribute = find_algorithm(config.algorithm).core.partition(":")
    make_core = getattr(importlib.import_module(package), attribute)
    pipeline = build_learner_pipeline(
        connectors or ConnectorsConfig(), observation_space, action_space, own_connectors
    )
    make_module = partial(
        build_module,
        module,
        pipeline.observation_space,
        action_space,
        model_config,
        distribution=distribution,
        check_specs=check_specs,
    )
    return Learner(
        make_core({DEFAULT_MODULE: make_module}, config),
        seed=seed,
        device=device,
        pipelines={DEFAULT_MODULE: pipeline},
    )
