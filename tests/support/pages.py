"""The pages that people read, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Each takes a minute at most on two idle cores; tests run two at a time, beside others.
SECONDS_OF_A_RUN = 600

#: As they stand: each run has to end by what it was told to reach, and soon.
TO_THE_END = f"""
import functools, tomllib
import juggler

PATIENT = {{"stop_seconds": {SECONDS_OF_A_RUN}, "worker_timeout_seconds": 300}}

def to_its_end(begin):
    @functools.wraps(begin)
    def run(*args, **keys):
        result = begin(*args, **{{**PATIENT, **keys}})
        config = tomllib.loads((result.run_dir / "config.toml").read_text())
        end = result.summary
        text = f"{{config['env']}}: {{end['episode_return_mean']}} in {{end['wall_time']:.0f}} s"
        print(text, "by", end["reason_for_stop"])
        assert result.solved or config["stop_return"] == "none", text
        assert end["reason_for_stop"] != "stop_seconds", text
        assert not juggler.RunConfig.from_flat(config).doubts(), text
        return result
    return run

juggler.train, juggler.resume = to_its_end(juggler.train), to_its_end(juggler.resume)
"""


def blocks(language: str, page: str) -> list[str]:
    """A page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)


def links(page: str) -> list[Path]:
    """Files that a page leads to."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    return [(ROOT / page).parent / target for target in targets]


def script(page: str, directory: Path, before: str = "") -> Path:
    """All Python of a page as one script."""
    file = directory / "snippets.py"
    file.write_text("\n".join([before, *blocks("python", page)]))
    return file
