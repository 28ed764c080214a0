"""A user's notebook, executed by Jupyter's own client."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from support.alone import Alone

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # pip fetches Jupyter

CELLS = [
    "import juggler\n"
    "run = juggler.start('cartpole', stop_return=None, stop_steps=30_000)\n"
    "seen = [metrics['env_steps_trained'] for metrics in run.metrics()]",
    "from IPython.display import display\nshown = display(juggler.plot(run), display_id=True)",
    "shown.update(juggler.plot(run))",
    "result = run.result()\nresult",
    "juggler.train('cartpole', stop_return=None, stop_steps=2_000).summary['env_steps_trained']",
]
EXECUTE = f"""
import nbformat, json
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(cell) for cell in {CELLS!r}]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


def test_a_notebook_shows_progress_pictures_and_results(tmp_path: Path, installed: Path) -> None:
    alone = Alone(tmp_path, installed)
    alone.run("-m", "pip", "install", "-q", "--no-compile", "nbclient", "ipykernel", "nbformat")
    cells = json.loads(alone.run("-c", EXECUTE).splitlines()[-1])
    started, picture, updated, result, trained = cells
    assert not [out for cell in cells for out in cell if out["output_type"] == "error"]
    said = "".join(str(out) for out in started)
    assert "CartPole-v1 with impala until 30k steps" in said, "a line of progress"
    (shown,) = (out["data"]["image/png"] for out in picture)
    assert base64.b64decode(shown).startswith(b"\x89PNG")
    assert updated == [], "the picture was redrawn in place"
    (table,) = (out["data"] for out in result if "text/html" in out.get("data", {}))
    assert "<table>" in table["text/html"]
    assert "ended (stop_steps)" in table["text/html"]
    (steps,) = (
        out["data"]["text/plain"] for out in trained if out["output_type"] == "execute_result"
    )
    assert int(steps) >= 2_000
