"""Few calls lie between an update and its loss, and docs/architecture.md lists them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

import juggler
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.learner import Learner
from juggler.learner.process.overlap import InTurn, Share
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGE = str(Path(juggler.__file__).parent)


def test_six_calls_lead_from_an_update_to_a_loss(make_batch: Callable[..., EpisodeBatch]) -> None:
    seen: list[str] = []

    class Watched(Impala):
        def loss(self, *arguments: Any) -> Any:
            stack = traceback.extract_stack()
            seen.extend(frame.name for frame in stack if frame.filename.startswith(PACKAGE))
            return super().loss(*arguments)

    space = spaces.Box(-10, 10, (4,), np.float32)
    make = partial(build_module, None, space, spaces.Discrete(2), {"hidden_sizes": [8]})
    learner = Learner(Watched({"default": make}, ImpalaConfig()))
    publisher: Any = None
    InTurn(learner, publisher).update(Share([0], {"default": [make_batch()]}))
    listed = re.findall(r"^\| \d \| `(?:\w+\.)?(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == 6
    assert [*seen, "loss"] == listed
