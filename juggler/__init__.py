"""Juggler: reinforcement learning with many processes at once.

import juggler

result = juggler.train("cartpole", stop_return=475)
print(juggler.evaluate(result.checkpoint).mean)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from juggler.driver.config import ConfigError as ConfigError
    from juggler.driver.config import RunConfig as RunConfig
    from juggler.driver.driver import RunFailed as RunFailed
    from juggler.driver.evaluating import Evaluated as Evaluated
    from juggler.driver.evaluating import evaluate as evaluate
    from juggler.driver.record.checkpoints import CheckpointError as CheckpointError
    from juggler.driver.training import Result as Result
    from juggler.driver.training import resume as resume
    from juggler.driver.training import shipped_configs as shipped_configs
    from juggler.driver.training import train as train
    from juggler.runtime.modules.rl_module import RLModule as RLModule

# Imported when first asked for: the driver process must not pay for torch, nor a user of the wire
# for the driver.
_PUBLIC = {
    "CheckpointError": "juggler.driver.record.checkpoints",
    "ConfigError": "juggler.driver.config",
    "Evaluated": "juggler.driver.evaluating",
    "RLModule": "juggler.runtime.modules.rl_module",
    "Result": "juggler.driver.training",
    "RunConfig": "juggler.driver.config",
    "RunFailed": "juggler.driver.driver",
    "evaluate": "juggler.driver.evaluating",
    "resume": "juggler.driver.training",
    "shipped_configs": "juggler.driver.training",
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
    return sorted([*globals(), *_PUBLIC])
