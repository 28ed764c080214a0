from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.learner_groups import LEARNERS, MODEL, Gate, spec

import juggler


@pytest.fixture(scope="module", name="group")
def _group(workers_of_module: None) -> Iterator[juggler.LearnerGroup]:
    modules = {name: spec(**learner) for name, learner in LEARNERS.items()}
    with juggler.LearnerGroup(modules, devices="fake:3", snapshot_updates=2) as group:
        yield group


@pytest.fixture(name="gate")
def _gate(group: juggler.LearnerGroup, tmp_path: Path) -> Iterator[Gate]:
    """The gate of "gated", on the shard of "target"."""
    gate = Gate(tmp_path / "gate")
    model = {**MODEL, "gate": str(gate.path)}
    group.add_module("gated", {**spec(), "model": model, "module": "support.learner_groups:Gated"})
    assert group.placement["gated"].shard == group.placement["target"].shard == 2
    yield gate
    gate.close()
    group.remove_module("gated")
