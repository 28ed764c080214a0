"""What `import juggler` gives, and what it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import juggler
import juggler.runtime

PACKAGE = Path(inspect.getfile(juggler)).parent


def test_everything_that_it_names_is_there() -> None:
    for name in juggler.__all__:
        value = getattr(juggler, name)
        assert callable(value), name
        assert value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'RLModul'"):
        juggler.RLModul  # noqa: B018


def test_dir_lists_that_and_its_rooms_alone() -> None:
    listed = dir(juggler)
    assert listed == sorted(set(listed))
    rooms = {name for name in listed if inspect.ismodule(getattr(juggler, name))}
    assert "runtime" in rooms
    assert rooms <= {each.parent.name for each in PACKAGE.glob("*/__init__.py")}
    assert set(listed) - rooms == set(juggler.__all__)


def test_type_checkers_are_told_the_same() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in told.body if isinstance(node, ast.ImportFrom)]
    assert {node.names[0].asname: node.module for node in imports} == juggler._PUBLIC


def test_it_imports_nothing_that_was_not_asked_for() -> None:
    code = (
        "import sys, juggler\n"
        "assert not {'torch', 'numpy', 'gymnasium', 'grpc'} & sys.modules.keys()\n"
        "juggler.ObservationConnector, juggler.LearnerConnector, juggler.train\n"
        "assert 'torch' not in sys.modules\n"
        "juggler.RLModule\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
