"""The page on cores is true."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from support.pages import ROOT, links, script

from juggler.learner.core.learner_core import LearnerCore

PAGE = "docs/cores.md"


def test_its_python_runs_as_one_script(tmp_path: Path, run_shortly: Callable[..., str]) -> None:
    assert "'grad_norm'" in run_shortly(script(PAGE, tmp_path))


def test_its_links_lead_to_files() -> None:
    assert len(links(PAGE)) > 5
    assert [link for link in links(PAGE) if not link.exists()] == []


def test_it_names_every_method_of_a_core() -> None:
    methods = inspect.getmembers(LearnerCore, inspect.isfunction)
    named = set(re.findall(r"`(\w+)\(", (ROOT / PAGE).read_text()))
    assert {name for name, _ in methods if not name.startswith("_")} <= named
