"""Few calls lie between the command for an update and its loss, and docs/architecture.md lists
them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.worker_world import World

import juggler
from juggler.learner.algorithms.impala.core import Impala
from juggler.runtime import recorder
from juggler.runtime.episodes.batch import EpisodeBatch

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
PACKAGE = str(Path(juggler.__file__).parent)


def test_nine_calls_lead_from_the_command_for_an_update_to_a_loss(
    tmp_path: Path, make_batch: Callable[..., EpisodeBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    loss = Impala.loss

    def watched(*arguments: Any) -> Any:
        stack = traceback.extract_stack()
        own = [frame for frame in stack if frame.filename.startswith(PACKAGE)]
        calls.extend(frame.name for frame in own if frame.filename != recorder.__file__)
        return loss(*arguments)

    monkeypatch.setattr(Impala, "loss", watched)
    world = World(tmp_path, make_batch)
    try:
        world.send(1, update=10)
        world.update(1)
    finally:
        world.close()
    listed = re.findall(r"^\| \d \| `\w+\.(\w+)`", PAGE.read_text(), re.MULTILINE)
    assert len(listed) == 9
    assert [*calls[calls.index("_update") :], "loss"] == listed
