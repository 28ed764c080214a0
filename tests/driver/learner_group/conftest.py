from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.learner_groups import LEARNERS, MODEL, spec
from support.processes import have_jugglers_forkserver

import juggler


@pytest.fixture(scope="module", name="group")
def _group(_kept_forkserver: None) -> Iterator[juggler.LearnerGroup]:
    modules = {name: spec(**learner) for name, learner in LEARNERS.items()}
    have_jugglers_forkserver()
    with juggler.LearnerGroup(modules, devices="fake:3", snapshot_updates=2) as group:
        yield group


@pytest.fixture(name="gate")
def _gate(group: juggler.LearnerGroup, tmp_path: Path) -> Iterator[Path]:
    """The file that "gated" waits for, on the shard of "target"."""
    gate = tmp_path / "gate"
    model = {**MODEL, "gate": str(gate)}
    group.add_module("gated", {**spec(), "model": model, "module": "support.learner_groups:Gated"})
    assert group.placement["gated"].shard == group.placement["target"].shard == 2
    yield gate
    gate.touch()
    group.remove_module("gated")
