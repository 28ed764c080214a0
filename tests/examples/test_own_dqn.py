"""The loss of the example that is derived from DQN, against one written out in NumPy."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import juggler
from juggler.testing import check_core, sample_for

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_dqn.py"))
VECTOR, THREE = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
MAKE = partial(juggler.QNetwork, VECTOR, THREE, {"hidden_sizes": [8]})


def make_core(**keys: Any) -> juggler.Dqn:
    core: juggler.Dqn = EXAMPLE["MunchausenCore"](MAKE, EXAMPLE["MunchausenConfig"](**keys))
    return core


def test_it_conforms() -> None:
    check_core(make_core, sample_for(MAKE()))


def test_it_has_no_bonus_of_several_steps() -> None:
    with pytest.raises(ValueError, match="n_step = 3"):
        make_core(n_step=3)
