"""What is said of observations that are not of their space."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from juggler.envrunner.environments.autoreset import last_observation
from juggler.envrunner.environments.misfits import misfit

BOX = spaces.Box(-1, 1, (2,), np.float32)


def test_a_dict_in_the_place_of_an_array_is_told() -> None:
    space = spaces.Dict(a=BOX, b=spaces.Discrete(2))
    found = misfit(space, {"a": {"x": np.zeros(2, np.float32)}, "b": 1})
    assert found.startswith("its observation has other parts")
    assert misfit(space, {"a": np.zeros(2, np.float32), "b": 1}) == ""


def test_last_observations_that_are_one_number_are_none_of_a_terminated_episode() -> None:
    assert last_observation(BOX, {"final_obs": 3.0}, 0, terminated=True) is None
