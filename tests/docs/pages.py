"""The pages that people read, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The snippets as they stand would train until solved; here each of them trains for an update.
SHORTLY = """
import juggler
train, resume = juggler.train, juggler.resume
juggler.train = lambda *args, **keys: train(*args, **{**keys, "stop_steps": 1})
juggler.resume = lambda *args, **keys: resume(*args, **{**keys, "stop_steps": 1})
"""


def blocks(language: str, page: str) -> list[str]:
    """A page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)


def links(page: str) -> list[Path]:
    """Files that a page leads to."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    return [(ROOT / page).parent / target for target in targets]


def script(page: str, directory: Path) -> Path:
    """All Python of a page as one script."""
    file = directory / "snippets.py"
    file.write_text("\n".join([SHORTLY, *blocks("python", page)]))
    return file
