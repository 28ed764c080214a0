"""docs/configuration.md says what the config dataclasses say."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

from juggler.driver.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_its_script_prints_today() -> None:
    printed = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    written = (DOCS / "configuration.md").read_text()
    assert written == printed, "run: python docs/make_configuration.py > docs/configuration.md"


def test_the_page_explains_every_key_of_a_run() -> None:
    rows = [row for row in (DOCS / "configuration.md").read_text().splitlines() if row[:3] == "| `"]
    explained = {row.split("`")[1]: row.rstrip("| ").rpartition("|")[2].strip() for row in rows}
    keys = {key.name for part in vars(RunConfig()).values() for key in fields(part)}
    assert keys <= explained.keys()
    assert all(explained.values()), "a key without a word about it"
