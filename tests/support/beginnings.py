"""What a run begins with."""

from __future__ import annotations

from juggler.driver.checkpoint.first_weights import FirstCheckpoints, FirstWeights
from juggler.driver.config import RunConfig


def beginning_of(config: RunConfig) -> dict[str, FirstWeights]:
    return FirstCheckpoints.of(config).beginning(config)[0]
