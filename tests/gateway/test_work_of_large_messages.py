"""A gateway's work on messages of many environments."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.gateway_world import GatewayWorld, RawSimulator, steps_of

ROWS = 1024


def seconds_to_end(world: GatewayWorld, rows: int, kind: str) -> float:
    """CPU time of a message that ends this many episodes."""
    shown, all_of_them = np.zeros((rows, 3), np.float32), [True] * rows
    given: dict[str, Any] = {
        "truncated": {
            "truncated": all_of_them,
            "final_rows": range(rows),
            "final_observations": steps_of(1, shown).agents[0].observations,
        },
        "both": {"truncated": all_of_them, "terminated": all_of_them},
        "paused": {"terminated": all_of_them, "paused": all_of_them},
    }[kind]
    with RawSimulator(world.address) as simulator:
        simulator.greet(environments=rows)
        assert simulator.step(steps_of(1, shown)).actions.seq == 1
        message = steps_of(2, shown, rewards=[0.0] * rows, **given)
        began = time.process_time()
        assert simulator.step(message).actions.seq == 2
        return time.process_time() - began


@pytest.mark.slow  # it looks at the clock of the process
@pytest.mark.parametrize("kind", ["truncated", "both", "paused"])
def test_sixteen_times_the_environments_that_end_together_are_no_work_of_their_square(
    kind: str,
) -> None:
    with GatewayWorld(rows=1 << 16, steps=4, max_batch=1 << 16) as world:
        world.ask()
        seconds_to_end(world, ROWS, kind)  # the first time of all
        some = min(seconds_to_end(world, ROWS, kind) for _ in range(3))
        more = min(seconds_to_end(world, 16 * ROWS, kind) for _ in range(3))
    assert more < 64 * some, "quadratic work takes 256 times as long"
