"""The page on Python use is true, with Optuna and pandas."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.alone import Alone
from support.pages import script

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # pip fetches both

#: As a page is run elsewhere, but that a run has the time to say something.
BEFORE = """
import juggler
"""
#: A trial that the page's callback prunes for sure.
PRUNED = """
from pathlib import Path

before = {*Path("runs").iterdir()}
study = optuna.create_study(
    direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=1e6)
)
study.optimize(objective, n_trials=1)
assert [each.state for each in study.trials] == [optuna.trial.TrialState.PRUNED]
(pruned,) = {*Path("runs").iterdir()} - before
assert list((pruned / "checkpoints").iterdir()), "it ended in order"
"""


def test_its_python_runs_as_one_script(tmp_path: Path, installed: Path) -> None:
    alone = Alone(tmp_path, installed)
    alone.run("-m", "pip", "install", "-q", "--no-compile", "optuna", "pandas")
    page = script("docs/python.md", tmp_path, BEFORE)
    page.write_text(page.read_text() + PRUNED)
    print(alone.run(page))
