from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.learner_groups import LEARNERS, MODEL, Gate, spec
from support.processes import have_jugglers_forkserver, workers_in_threads

import juggler


@pytest.fixture(scope="module", name="group")
def _group(request: pytest.FixtureRequest) -> Iterator[juggler.LearnerGroup]:
    modules = {name: spec(**learner) for name, learner in LEARNERS.items()}
    here = [item for item in request.session.items if item.path == request.path]
    with ExitStack() as last:
        if any(item.get_closest_marker("slow") for item in here):
            request.getfixturevalue("_kept_forkserver")
            have_jugglers_forkserver()
        else:
            last.enter_context(workers_in_threads())
        yield last.enter_context(
            juggler.LearnerGroup(modules, devices="fake:3", snapshot_updates=2)
        )


@pytest.fixture(name="gate")
def _gate(group: juggler.LearnerGroup, tmp_path: Path) -> Iterator[Gate]:
    """What the module "gated", which is on the shard of "target", waits for."""
    gate = Gate(tmp_path / "gate")
    model = {**MODEL, "gate": str(gate.path)}
    group.add_module("gated", {**spec(), "model": model, "module": "support.learner_groups:Gated"})
    assert group.placement["gated"].shard == group.placement["target"].shard == 2
    yield gate
    gate.close()
    group.remove_module("gated")
