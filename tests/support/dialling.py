"""Environments in the arena that a test serves."""

from __future__ import annotations

from typing import Any

import numpy as np

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env

SEEN = ["board", "agent.count"]


def dial(where: str, count: int = 1, deadline: float = 10.0, **options: Any) -> Any:
    config = EnvRunnerConfig(
        env=f"dm_env_rpc://{where}",
        env_kwargs=options,
        envs_per_runner=count,
        step_deadline_seconds=deadline,
    )
    return make_vector_env(config)


def act(count: int, move: int = 1) -> dict[str, Any]:
    return {"move": np.full(count, move), "push": np.full((count, 2), 0.05, np.float32)}
