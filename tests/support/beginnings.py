"""What a run begins with."""

from __future__ import annotations

from juggler.driver.checkpoint.beginning import FirstWeights, Origins
from juggler.driver.config import RunConfig


def beginning_of(config: RunConfig) -> dict[str, FirstWeights]:
    return Origins.of(config).beginning(config)[0]
