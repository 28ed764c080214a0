"""What a run begins with."""

from __future__ import annotations

from juggler.driver.checkpoint.beginning import Beginning, Origins
from juggler.driver.config import RunConfig


def beginning_of(config: RunConfig) -> Beginning | None:
    return Origins.of(config).beginning(config)
