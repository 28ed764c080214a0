"""Commands that install extras of Juggler, for messages."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

#: First Python 3.N for which pip would have to build a package of the extra.
_WITHOUT_WHEELS: Final = {"box2d": 14}


def installing(extra: str) -> str:
    """Return the shell command that installs an extra for this Python.

    An editable checkout stays editable. If no command would work, the text explains it.

    Args:
        extra: an extra of pyproject.toml.
    """
    first = _WITHOUT_WHEELS.get(extra)
    if first is not None and sys.version_info >= (3, first):
        return f"{extra} has no wheels for Python 3.{first} or newer, so it needs an older one"
    pip = shutil.which("pip")
    own = pip is not None and Path(pip).parent == Path(sys.executable).parent
    command = ["pip"] if own else [sys.executable, "-m", "pip"]
    return shlex.join([*command, "install", *_source(extra)])


def _source(extra: str) -> list[str]:
    """Return arguments with which pip finds the extra."""
    origin = _origin()
    url = origin.get("url", "")
    path = Path(unquote(urlsplit(url).path))
    if url.startswith("file:") and path.exists():
        editable = ["-e"] if origin.get("dir_info", {}).get("editable") else []
        return [*editable, f"{'.' if path == Path.cwd() else path}[{extra}]"]
    if "vcs_info" in origin:
        return [f"juggler[{extra}] @ {origin['vcs_info']['vcs']}+{url}"]
    return [f"juggler[{extra}]"]


def _origin() -> dict[str, Any]:
    """Return the place from which pip installed Juggler, unless an index."""
    # All distributions of that name: one that a build leaves in a checkout has no such note.
    for each in distributions(name="juggler"):
        if note := each.read_text("direct_url.json"):
            origin: dict[str, Any] = json.loads(note)
            return origin
    return {}
