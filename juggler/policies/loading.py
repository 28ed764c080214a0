"""Loads a policy from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gymnasium
from google.protobuf.json_format import ParseDict

from juggler.policies.policy import Policy
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read_or_warn
from juggler.runtime.checkpoints.frozen import module_in
from juggler.runtime.checkpoints.weights import acting_arrays
from juggler.runtime.connectors.building import OwnClasses, build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.env_to_module import EnvToModule
from juggler.runtime.connectors.mergeable_state import connector_state
from juggler.runtime.connectors.module_to_env import ModuleToEnv
from juggler.runtime.connectors.pipeline import own_connectors
from juggler.runtime.episodes.batch import DEFAULT_MODULE
from juggler.runtime.modules.acting import acting_names, strip_to_acting
from juggler.runtime.modules.building import ModuleFactory, build_module
from juggler.runtime.modules.by_name import must_be_given_again
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.modules.stepping import load_weights, weights_of
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.v1 import spaces_pb2


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What a policy is built from, besides spaces and a checkpoint.

    Attributes:
        module: the configuration's module.
        connectors: the configuration's connectors.
        factory: the module's class, or another callable that makes it, if it cannot be imported by
            name.
        own: connector classes that cannot be imported by name.
    """

    module: ModuleConfig
    connectors: ConnectorsConfig
    factory: ModuleFactory | None
    own: OwnClasses


def load_policy(
    checkpoint: str | Path,
    *,
    module_id: str | None = None,
    module: str | Callable[..., Any] | None = None,
    connectors: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Policy:
    """The policy in a checkpoint, including the connectors around it.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest good checkpoint is taken, with a
            warning if it is not the newest. A run's directory `best` has the one that played best.
        module_id: which of the run's modules, trained or not; None: the only one that is trained.
        module: the class that the run trained, if it cannot be imported by name.
        connectors: the module's connectors again, if some of their classes cannot be imported by
            name.
        seed: seed of exploration.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it has no such module, or several
            where none is named.
        ValueError: a part of the run cannot be built here; says which one and what to do. Or the
            checkpoint is None.
    """
    saved = read_or_warn(checkpoint)
    if isinstance(module, str) and ":" not in module:
        raise ValueError(
            f"module = {module!r}: expected a class, as 'package.module:Class'; for the module of "
            f"this id, pass module_id={module!r}"
        )
    saved, module_id = module_in(saved, module_id)
    keys: dict[str, Any] = {} if connectors is None else {"connectors": connectors}
    own = own_connectors(keys)
    config = {**saved.config_of(module_id), **keys}
    named = module_config(config)
    if isinstance(module, str):
        named.module = module
    policy_config = PolicyConfig(
        named,
        ConnectorsConfig.parse(config.get("connectors", {})),
        module if callable(module) else None,
        own,
    )
    if (spaces := _spaces_of(saved, module_id)) is None:
        raise CheckpointError(
            saved.path or Path(),
            "does not have the spaces of its environment, one of which has no encoding: play it "
            "with juggler evaluate",
        )
    return Policy(*restore_parts(saved, policy_config, *spaces, module_id), *spaces, seed)


def module_config(config: Mapping[str, Any]) -> ModuleConfig:
    """What a module is built from, out of a flat configuration, where "none" may stand for None."""
    known = {key.name for key in fields(ModuleConfig)}
    keys: dict[str, Any] = {
        key: None if config[key] == "none" else config[key] for key in known & config.keys()
    }
    return ModuleConfig(**keys)


def restore_parts(
    saved: Checkpoint,
    policy_config: PolicyConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    module_id: str = DEFAULT_MODULE,
) -> tuple[RLModule, EnvToModule, ModuleToEnv]:
    """The module and the connectors of a run as they were at a checkpoint.

    Args:
        saved: the checkpoint.
        policy_config: what both are built from.
        observation_space: the environment's.
        action_space: the environment's.
        module_id: of the module in the checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another module.
        ValueError: a part cannot be built; says which one.
    """
    where = saved.path or Path("in memory")
    config = policy_config.module
    must_be_given_again("module", config.module, policy_config.factory)
    policy_config.connectors.must_be_given_again(
        policy_config.own, ("env_to_module", "module_to_env")
    )
    env_to_module, module_to_env = build_runner_pipelines(
        policy_config.connectors, observation_space, action_space, policy_config.own
    )
    module = build_module(
        policy_config.factory or config.module,
        env_to_module.module_observation_space,
        module_to_env.action_space,
        config.model,
        distribution=config.distribution,
        check_specs=config.check_specs,
    )
    try:
        state: Any = saved.tree[module_id]
        weights = acting_arrays(state)
        if config.critic_sees != "observation":
            # Its value function was built for what acting does not see.
            strip_to_acting(module)
            weights = {name: weights[name] for name in acting_names(module)}
        load_weights(weights_of(module), weights)
    except (KeyError, TypeError, ValueError) as error:
        here = observation_space, action_space
        if (there := _spaces_of(saved, module_id)) is not None and there != here:
            raise CheckpointError(
                where,
                f"was learned in another environment: its observation space is {there[0]} and its "
                f"action space {there[1]}, and here they are {here[0]} and {here[1]}",
            ) from error
        fit = "does not fit what this environment and configuration make of it"
        raise CheckpointError(where, f"{fit}: {error}") from error
    try:
        if learned := connector_state(saved, module_id):
            env_to_module.set_state(learned)
    except ValueError as error:
        raise CheckpointError(where, str(error)) from error
    return module, env_to_module, module_to_env


def _spaces_of(
    saved: Checkpoint, module_id: str
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None:
    """The observation space and the action space of the agents that a module played in training;
    None: the checkpoint does not have them."""
    if not (spaces := saved.spaces_of(module_id)):
        return None
    observation, action = (
        space_from_message(ParseDict(spaces[key], spaces_pb2.Space()))
        for key in ("observation", "action")
    )
    return observation, action
