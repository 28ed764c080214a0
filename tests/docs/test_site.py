"""The site of the pages in docs/, which `make docs` builds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT

pytest.importorskip("material", reason="make docs needs the developers' packages")

pytestmark = pytest.mark.slow  # the site is built by a process

#: What a browser loads by itself, and not what a reader may click on.
LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["'](https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, "a link or a page is wrong: " + built.stderr
    return directory


def test_every_page_is_in_the_menu_and_is_found(site: Path) -> None:
    menu = (site / "index.html").read_text()
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    for page in (ROOT / "docs").glob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert name in found, page.name
        assert f'href="{name}"' in menu or name == "index.html", page.name
    (metrics,) = [each for each in index if each["location"] == "run-directory.html#metrics"]
    assert "env_steps_trained" in metrics["text"]


@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        head = page.read_text()
        loaded = [match[0] for match in LOADED.finditer(head) if 'rel="canonical"' not in match[0]]
        assert loaded == [], page.name


@pytest.mark.long
def test_links_to_files_of_the_repository_lead_to_copies_of_them(site: Path) -> None:
    core = "juggler/learner/algorithms/impala/core.py"
    assert f'href="source/{core}.txt"' in (site / "architecture.html").read_text()
    assert (site / "source" / f"{core}.txt").read_bytes() == (ROOT / core).read_bytes()
    listed = (site / "source" / "examples" / "files.txt").read_text().splitlines()
    assert "own_algorithm.py" in listed
