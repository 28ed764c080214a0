"""Chooses values of missing keys by algorithm and observations.

The dataclasses have general defaults. The defaults here are for a first run in an environment.
They were measured in fifteen environments (benchmarks/defaults.py, with a table in
benchmarks/sample-efficiency.md). They learn from few environment steps, with small batches and
many optimizer steps.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gymnasium import spaces

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import RunConfig
from juggler.driver.module_placement import ModulePlacement
from juggler.learner.algorithms.off_policy import OffPolicyConfig
from juggler.learner.algorithms.registry import ALGORITHMS, find_algorithm
from juggler.runtime.modules.import_by_name import name_of
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.structures import space_leaves, two_bounds
from juggler.runtime.wire.v1 import spaces_pb2
from juggler.runtime.wire.v1.tensors_pb2 import DType

_BOX_ACTION: Final = "a Box action"  # a key of `Algorithm.chosen_for`
_MINIBATCH = 64  # live steps in a minibatch of PPO
_UNKNOWN = (
    "the spaces of the environment are unknown on this host: keys that were not given have their "
    "general defaults, as in docs/configuration.md"
)
#: Keys of these tables that all modules of a run share.
_SHARED = ("envs_per_runner", "fragment_steps")
_FLOATS = (DType.DTYPE_FLOAT16, DType.DTYPE_FLOAT32, DType.DTYPE_FLOAT64)


def may_be_chosen(config: RunConfig) -> set[str]:
    """Return the keys that affect the choices of `settled`."""
    algorithms: set[str] = {config.learner.algorithm}
    algorithms |= {table.get("algorithm", "") for table in config.agents.modules.values()}
    found = {"batch_size", "connectors", "minibatches", "reward_scale"}
    for algorithm in (ALGORITHMS[name] for name in algorithms & ALGORITHMS.keys()):
        found = found.union(algorithm.chosen, *algorithm.chosen_for.values())
    return found


def with_models(config: RunConfig, given: Collection[str]) -> RunConfig:
    """Choose models for algorithms that have no default model."""
    algorithm, module = config.learner.algorithm, config.module.module
    changed: dict[str, Any] = {}
    if "model" not in given and (model := _model(algorithm, module)):
        changed["model"] = model
    tables = dict(config.agents.modules)
    for module_id, table in tables.items():
        own = table.get("algorithm", algorithm)
        model = _model(own, table.get("module"))
        if model and own != algorithm and "model" not in {*table, *given}:
            tables[module_id] = {**table, "model": model}
            changed["modules"] = tables
    return RunConfig.from_flat({**config.flat(), **changed}) if changed else config


def _model(algorithm: str, module: str | None) -> dict[str, Any]:
    """Return the chosen model if the module is the algorithm's own."""
    ships = ALGORITHMS.get(algorithm)
    if ships is None or module not in (None, name_of(ships.module)):
        return {}
    return dict(ships.chosen.get("model", {}))


def settled(
    config: RunConfig,
    given: Collection[str],
    groups: Sequence[FoundGroup],
    rescaled: Mapping[str, bool] = MappingProxyType({}),
) -> tuple[RunConfig, str]:
    """Choose values for keys that were not given, and name them."""
    alone = not (groups and groups[0].agents)
    if alone and (not groups or groups[0].observation is None or groups[0].action is None):
        # Not chosen if the weights of any module acted without it.
        together = all(rescaled.values()) if rescaled else None
        pieces = {} if "connectors" in given else _action_connectors(config, None, together)
        chosen: dict[str, Any] = {"connectors": pieces} if pieces else {}
        ships = ALGORITHMS.get(config.learner.algorithm)
        unknown = _UNKNOWN if ships and {*ships.chosen} - {*given} else ""
        changed = RunConfig.from_flat({**config.flat(), **chosen}) if chosen else config
        return changed, "\n".join(filter(None, (_description(config, chosen), unknown)))
    # With one agent, the choices become keys of the run; else of its modules' tables.
    notes = []
    for module_id in config.module_ids:
        agents = [agent for agent, ids in config.played_by.items() if module_id in ids]
        group = next(each for each in groups if alone or agents[0] in each.agents)
        of_module, own = config.of(module_id), config.agents.modules.get(module_id, {})
        if group.observation is None or group.action is None:
            if of_module.learner.algorithm in ALGORITHMS:
                notes.append(f"module {module_id!r}: {_UNKNOWN}")
            continue
        # `batch_size` follows from the number of learners, too.
        chosen = _chosen(
            of_module,
            {*given, *own},
            group.observation,
            group.action,
            ModulePlacement(config, config.module_ids).processes_of(module_id),
            agents=1 if alone else len(agents),
            rescaled=rescaled.get(module_id),
        )
        notes.append(_description(of_module, chosen, "" if alone else f" in module {module_id!r}"))
        shared = {key: chosen.pop(key) for key in [*chosen] if alone or key in _SHARED}
        given = {*given, *shared}
        tables = {**config.agents.modules, **({} if alone else {module_id: {**own, **chosen}})}
        config = RunConfig.from_flat({**config.flat(), **shared, "modules": tables})
    return config, "\n".join(filter(None, notes))


def _description(config: RunConfig, chosen: dict[str, Any], where: str = "") -> str:
    values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
    return f"chosen for {config.learner.algorithm}{where}: {values}" if chosen else ""


def _chosen(
    config: RunConfig,
    given: Collection[str],
    observation: spaces_pb2.Space,
    action: spaces_pb2.Space,
    learners: int,
    agents: int = 1,
    rescaled: bool | None = None,
) -> dict[str, Any]:
    """Choose values by key, except for given keys."""
    actions = _action_connectors(config, action, rescaled)
    if (ships := ALGORITHMS.get(config.learner.algorithm)) is None:  # a user's algorithm
        return {"connectors": actions} if actions and "connectors" not in given else {}
    chosen: dict[str, Any] = {}

    def choose(key: str, value: Any) -> None:
        if key not in given:
            chosen[key] = value

    observed = _kind(observation)
    special = ships.chosen_for.get(observed, {})
    boxed = ships.chosen_for.get(_BOX_ACTION, {}) if action.HasField("box") else {}
    for key, value in {**ships.chosen, **special, **boxed}.items():
        choose(key, value)
    # Choices that contradict given keys are left out.
    if config.module.module != name_of(ships.module):
        chosen.pop("model", None)  # a user's module has its own keys
    if config.flat().get("burn_in") or config.module.model.get("recurrent", "none") != "none":
        chosen.pop("fragment_steps", None)  # a recurrent module is trained within a fragment
    if config.learner.weights_interval > 1 or config.driver.synchronous:
        chosen.pop("max_staleness", None)
    gamma = chosen.get("gamma", config.learner.gamma)
    if pieces := {**_connectors(config, given, observed, gamma), **actions}:
        choose("connectors", pieces)
    flat = {**config.flat(), **chosen}
    # Requests are limited to the steps of a few updates: many EnvRunners need larger updates.
    fragment = flat["envs_per_runner"] * flat["fragment_steps"] * agents
    least = boxed.get("batch_size", ships.least_batch)
    batch = max(least, fragment * max(1, config.driver.num_env_runners // 2))
    choose("batch_size", batch * learners)
    if config.learner.algorithm == "ppo":
        choose("minibatches", max(1, {**flat, **chosen}["batch_size"] // _MINIBATCH))
    return chosen


def _action_connectors(
    config: RunConfig, action: spaces_pb2.Space | None, rescaled: bool | None
) -> dict[str, Any]:
    """Choose the connectors of actions."""
    if rescaled is None:
        squashes = find_algorithm(config.learner.algorithm).squashes or config.module.model.get(
            "squash"
        )
        # The actions of demonstrations already have the environment's bounds.
        rescaled = not squashes and not config.learner.imitation
    # Also if a float Box has finite bounds other than -1 and 1.
    suits = action is None or any(
        (two_bounds(leaf) & ((leaf.low != -1) | (leaf.high != 1))).any()
        for _, leaf in space_leaves(space_from_message(action))
        if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"
    )
    return {"module_to_env": ["rescale_actions"]} if rescaled and suits else {}


def _kind(observation: spaces_pb2.Space) -> str:
    """Return a key of `Algorithm.chosen_for`, or ""."""
    box = observation.box
    if len(box.shape) == 1 and box.dtype in _FLOATS:
        return "a vector of floats"
    if observation.HasField("discrete"):
        return "a Discrete"
    return "an image" if _has_image(observation) else ""


def _has_image(space: spaces_pb2.Space) -> bool:
    parts = [*(entry.space for entry in space.dict.entries), *space.tuple.spaces]
    return len(space.box.shape) >= 2 or any(map(_has_image, parts))


def _connectors(
    config: RunConfig, given: Collection[str], observed: str, gamma: float
) -> dict[str, Any]:
    """Choose the connectors of observations and rewards."""
    # A replay keeps rewards as they are. Demonstrations have unfiltered observations. A
    # discriminator's rewards are scaled already.
    keeps = isinstance(config.learner, OffPolicyConfig)
    if "reward_scale" in given or keeps or config.learner.imitation:
        return {}
    pieces: dict[str, Any] = {}
    if not find_algorithm(config.learner.algorithm).offline:
        # A value function learns fastest if returns are about 1.
        pieces["learner"] = [{"use": "normalize_rewards", "gamma": gamma}]
    # Not in a Dict: next to discrete observations, filtered numbers made learning slower. Images
    # have a known scale.
    if observed == "a vector of floats":
        pieces["env_to_module"] = ["mean_std_filter"]
    return pieces
