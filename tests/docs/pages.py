"""The pages that people read, and what stands in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


def run_python(page: str, directory: Path) -> str:
    """What all Python of a page prints as one script, run where it may leave what it likes."""
    script = directory / "snippets.py"
    script.write_text("\n".join([SHORTLY, *blocks("python", page)]))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
