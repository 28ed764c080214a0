"""The page on learners is true."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

from support.pages import ROOT, blocks, links, script

from juggler.driver.config import RunConfig
from juggler.learner.optim.config import OWN_KEYS

PAGE = "docs/learners.md"


def test_its_python_runs_as_one_script_and_is_refused_as_it_says(
    tmp_path: Path, run_shortly: Callable[..., str]
) -> None:
    said = run_shortly(script(PAGE, tmp_path))
    messages = re.findall(r"^ *refused\(.*\n *# (.*)$", "\n".join(blocks("python", PAGE)), re.M)
    assert len(messages) == 7
    for message in messages:
        assert message.removesuffix("…").rstrip() in said


def test_its_table_of_optimizers_is_one_and_names_every_key() -> None:
    (file,) = blocks("toml", PAGE)
    RunConfig.from_flat(tomllib.loads(file))
    text = (ROOT / PAGE).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `lr`, "))
    assert set(re.findall(r"`(\w+)`", row)) == set(OWN_KEYS)


def test_its_links_lead_to_files() -> None:
    assert [link for link in links(PAGE) if not link.exists()] == []
