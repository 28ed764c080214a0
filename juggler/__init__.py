"""Juggler: reinforcement learning with many processes at once.

import juggler

result = juggler.train("cartpole", stop_return=475)
print(juggler.evaluate(result.checkpoint).mean)
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from juggler.driver.config import ConfigError as ConfigError
    from juggler.driver.config import RunConfig as RunConfig
    from juggler.driver.driver import RunFailed as RunFailed
    from juggler.driver.evaluating import Evaluated as Evaluated
    from juggler.driver.evaluating import evaluate as evaluate
    from juggler.driver.learner_group.group import LearnerGroup as LearnerGroup
    from juggler.driver.learner_group.spec import LearnerSpec as LearnerSpec
    from juggler.driver.learner_group.update import LearnerGroupError as LearnerGroupError
    from juggler.driver.learner_group.update import ShardLost as ShardLost
    from juggler.driver.learner_group.update import UpdateFailed as UpdateFailed
    from juggler.driver.result import Result as Result
    from juggler.driver.shipped import shipped_configs as shipped_configs
    from juggler.driver.training import resume as resume
    from juggler.driver.training import train as train
    from juggler.policies.loading import load_policy as load_policy
    from juggler.policies.policy import Policy as Policy
    from juggler.runtime.checkpoints.checkpoint import CheckpointError as CheckpointError
    from juggler.runtime.checkpoints.weights import read_weights as read_weights
    from juggler.runtime.connectors.connector import ActionConnector as ActionConnector
    from juggler.runtime.connectors.connector import ContextConnector as ContextConnector
    from juggler.runtime.connectors.connector import LearnerConnector as LearnerConnector
    from juggler.runtime.connectors.connector import MergeableConnector as MergeableConnector
    from juggler.runtime.connectors.connector import ObservationConnector as ObservationConnector
    from juggler.runtime.connectors.per_episode import PerEpisode as PerEpisode
    from juggler.runtime.modules.catalog import Catalog as Catalog
    from juggler.runtime.modules.distributions import ActionDistribution as ActionDistribution
    from juggler.runtime.modules.distributions import DistributionSpec as DistributionSpec
    from juggler.runtime.modules.models import ActorCritic as ActorCritic
    from juggler.runtime.modules.module_spec import RLModuleSpec as RLModuleSpec
    from juggler.runtime.modules.multi_rl_module import MultiRLModule as MultiRLModule
    from juggler.runtime.modules.multi_rl_module import MultiRLModuleSpec as MultiRLModuleSpec
    from juggler.runtime.modules.rl_module import RLModule as RLModule
    from juggler.runtime.modules.specs import TensorSpec as TensorSpec

# Else gRPC starts threads of its own in whatever is forked from a process that uses it, even before
# that becomes another program: what environments and videos start has hung there, or ended. None
# of Juggler's processes forks to go on with gRPC. It is read when gRPC is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Imported when first asked for: the driver process must not pay for torch, nor a user of the wire
# for the driver.
_PUBLIC = {
    "ActionConnector": "juggler.runtime.connectors.connector",
    "ActionDistribution": "juggler.runtime.modules.distributions",
    "ActorCritic": "juggler.runtime.modules.models",
    "Catalog": "juggler.runtime.modules.catalog",
    "CheckpointError": "juggler.runtime.checkpoints.checkpoint",
    "ConfigError": "juggler.driver.config",
    "ContextConnector": "juggler.runtime.connectors.connector",
    "DistributionSpec": "juggler.runtime.modules.distributions",
    "Evaluated": "juggler.driver.evaluating",
    "LearnerConnector": "juggler.runtime.connectors.connector",
    "LearnerGroup": "juggler.driver.learner_group.group",
    "LearnerGroupError": "juggler.driver.learner_group.update",
    "LearnerSpec": "juggler.driver.learner_group.spec",
    "MergeableConnector": "juggler.runtime.connectors.connector",
    "MultiRLModule": "juggler.runtime.modules.multi_rl_module",
    "MultiRLModuleSpec": "juggler.runtime.modules.multi_rl_module",
    "ObservationConnector": "juggler.runtime.connectors.connector",
    "PerEpisode": "juggler.runtime.connectors.per_episode",
    "Policy": "juggler.policies.policy",
    "RLModule": "juggler.runtime.modules.rl_module",
    "RLModuleSpec": "juggler.runtime.modules.module_spec",
    "Result": "juggler.driver.result",
    "RunConfig": "juggler.driver.config",
    "RunFailed": "juggler.driver.driver",
    "ShardLost": "juggler.driver.learner_group.update",
    "TensorSpec": "juggler.runtime.modules.specs",
    "UpdateFailed": "juggler.driver.learner_group.update",
    "evaluate": "juggler.driver.evaluating",
    "load_policy": "juggler.policies.loading",
    "read_weights": "juggler.runtime.checkpoints.weights",
    "resume": "juggler.driver.training",
    "shipped_configs": "juggler.driver.shipped",
    "train": "juggler.driver.training",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'juggler' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    rooms = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted([*rooms, *_PUBLIC])
