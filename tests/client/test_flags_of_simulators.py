"""What a simulator says of the ends of its episodes is true or false."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.gateway_world import GatewayWorld


@pytest.mark.parametrize("said", [{"terminated": "yes"}, {"truncated": "no"}, {"truncated": 2}])
def test_a_session_refuses_what_is_neither_true_nor_false(said: dict[str, Any]) -> None:
    (name,) = said
    with GatewayWorld(rows=1, steps=4) as world:
        world.ask(10)
        with world.connect() as session:
            session.step(np.zeros(3))
            with pytest.raises(ValueError, match=f"{name} must be True or False, not"):
                session.step(np.zeros(3), 1.0, final_observation=np.zeros(3), **said)
            assert session.step(np.zeros(3), 1.0, np.True_) is None
        with world.connect(environments=2) as session:
            session.step(np.zeros((2, 3)))
            many = {name: [said[name], False]}
            with pytest.raises(ValueError, match=f"{name} must be True or False, not"):
                session.step(np.zeros((2, 3)), np.ones(2), **many)
