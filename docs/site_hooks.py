"""What MkDocs does with links that lead out of docs/: the site has the files that they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files of the repository lead to copies of them, which are part of the site, and
    links to directories to a list of what is in them."""

    def changed(match: re.Match[str]) -> str:
        target = (Path(config["docs_dir"]) / match[1]).resolve()
        name = target.relative_to(ROOT).as_posix()
        # A browser shows text, and does not download it.
        copy = f"source/{name}/files.txt" if target.is_dir() else f"source/{name}.txt"
        if files.get_file_from_path(copy) is None:
            content = _listing(target) if target.is_dir() else target.read_bytes()
            files.append(File.generated(config, copy, content=content))
        return f"]({copy})"

    return _LINK.sub(changed, markdown)


def _listing(directory: Path) -> bytes:
    """The names of a directory's files, a line each."""
    names = (each.name + "/" * each.is_dir() for each in directory.iterdir())
    shown = sorted(name for name in names if not name.startswith((".", "__pycache__")))
    return "".join(f"{name}\n" for name in shown).encode()
