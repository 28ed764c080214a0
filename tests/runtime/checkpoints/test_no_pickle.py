"""No source unpickles, and pickles are refused unread."""

from __future__ import annotations

import ast
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made_files import checkpoint

import juggler
from juggler.runtime.checkpoints.checkpoint import (
    METADATA_FILE,
    STATE_FILE,
    CheckpointError,
    read,
    write,
)
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.v1 import episodes_pb2, training_pb2

PACKAGE = Path(juggler.__file__).parent
UNPICKLES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml",
}  # fmt: skip
CALLS = {
    "eval", "exec", "compile", "torch.load", "torch.jit.load", "np.load", "numpy.load",
    "send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object",
    "gather_object", "scatter_object_list",
}  # fmt: skip
LAST = {each.rpartition(".")[2] for each in CALLS} | {"loads"}
#: A script's own classes go to local workers through the pipe that starts their processes, and an
#: EnvRunner talks to its environments' processes through pipes of multiprocessing.
ALLOWED = {
    ("driver/script_classes.py", "import cloudpickle"),
    ("driver/rehearsal.py", "import cloudpickle"),
    ("driver/rehearsal.py", "cloudpickle.loads(rehearsal.own_code)"),
    ("driver/rehearsal.py", "cloudpickle.loads(rehearsal.trial)"),
    ("driver/preflight.py", "import cloudpickle"),
    ("envrunner/sampling_worker.py", "import cloudpickle"),
    ("learner/process/learner_worker.py", "import cloudpickle"),
    ("envrunner/sampling_worker.py", "cloudpickle.loads(program.own_code)"),
    ("learner/process/learner_worker.py", "cloudpickle.loads(program.own_code)"),
    ("envrunner/environments/environment_processes.py", "ForkingPickler.loads(request)"),
    ("envrunner/environments/environment_processes.py", "ForkingPickler.loads(answer)"),
}


def _of_interest() -> Iterator[tuple[str, str]]:
    """(file, code) of each place that unpickles, runs code, or imports either."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.partition(".")[0] in UNPICKLES for name in names):
                yield str(file.relative_to(PACKAGE)), ast.unparse(node)
            if isinstance(node, ast.Call):
                last = getattr(node.func, "attr", getattr(node.func, "id", ""))
                called = ast.unparse(node.func) if last in LAST else ""
                if called in CALLS or last in CALLS - {"eval", "compile"} or last == "loads":
                    yield str(file.relative_to(PACKAGE)), ast.unparse(node)


def test_the_sources_have_nothing_that_unpickles_but_for_local_workers_own_code() -> None:
    found = {(file, code) for file, code in _of_interest() if not code.startswith("json.loads(")}
    assert {each for each in found if "tomllib.loads" not in each[1]} == ALLOWED


def test_own_code_is_given_to_the_processes_that_a_driver_starts_and_to_no_others() -> None:
    users = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if "own_code" in file.read_text()
    }
    assert not {file for file in users if file.startswith(("cli/", "runtime/"))}


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("went-off",)


BOMBS: dict[str, Callable[[Path], Any]] = {
    "pickle": lambda path: path.write_bytes(pickle.dumps(_Bomb())),
    "torch's": lambda path: torch.save({"module": _Bomb()}, path),
    "torch's before 1.6": lambda path: torch.save(
        {"module": _Bomb()}, path, _use_new_zipfile_serialization=False
    ),
}


@pytest.fixture(params=BOMBS)
def bomb(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[bytes]:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bomb"
    BOMBS[request.param](file)
    yield file.read_bytes()
    assert not (tmp_path / "went-off").exists()


@pytest.mark.parametrize(
    "header", [episodes_pb2.BatchHeader, episodes_pb2.WeightsHeader, training_pb2.StateHeader]
)
def test_a_pickle_is_no_batch_no_weights_and_no_state(bomb: bytes, header: Any) -> None:
    with pytest.raises(WireError):
        FrameReader(header).feed(bomb)


@pytest.mark.parametrize("name", [STATE_FILE, METADATA_FILE])
def test_a_pickle_is_no_part_of_a_checkpoint(bomb: bytes, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", checkpoint())
    (path / name).write_bytes(bomb)
    with pytest.raises(CheckpointError):
        read(path)


def test_the_bombs_do_go_off_where_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(_Bomb()))  # noqa: S301
    assert (tmp_path / "went-off").exists()
