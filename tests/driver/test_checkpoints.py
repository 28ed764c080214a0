from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from juggler.driver.record import checkpoints
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    digest,
    newest_good,
    read,
)


def _checkpoint(update: int = 7, generation: int = 1, **changes: Any) -> Checkpoint:
    rng = np.random.default_rng(update)
    checkpoint = Checkpoint(
        version=(generation, update),
        tree={
            "modules": {"default": {"encoder.0.weight": rng.standard_normal((4, 3))}},
            "optimizer": {"step": np.array(update), "empty": {}},
        },
        extra={"schedule": {"progress": 0.25}},
        counters={"env_steps_trained": 1000 * update},
        config={"env": "CartPole-v1", "lr": 1e-3, "stop_return": None},
        spaces={"observation": {"kind": "Box", "low": [-float("inf")]}},
    )
    return replace(checkpoint, **changes)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _same(a: Checkpoint, b: Checkpoint) -> bool:
    names = ("version", "extra", "counters", "config", "spaces")
    return _equal(a.tree, b.tree) and all(getattr(a, n) == getattr(b, n) for n in names)


def _rewrite_record(path: Path, **changes: Any) -> None:
    """Changes checkpoint.json as somebody would who knows how its digest is made."""
    file = path / "checkpoint.json"
    record = json.loads(file.read_text()) | changes
    del record["sha256"]
    file.write_text(json.dumps(record | {"sha256": digest(record)}))


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = _checkpoint()
    path = write(tmp_path / "checkpoints", written)
    assert path == tmp_path / "checkpoints" / "000000007"
    found = read(path)
    assert _same(found, written)
    assert found.path == path
    assert _names(path) == ["checkpoint.json", "state.safetensors"]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ml_dtypes.bfloat16],
)
def test_every_dtype_and_shape_survives(tmp_path: Path, dtype: Any) -> None:
    values = np.arange(24).reshape(4, 6).astype(dtype)  # [4, 6]
    tree = {
        "plain": values,
        "scalar": np.array(1, dtype),
        "empty": np.zeros((0, 3), dtype),
        "transposed": values.T,  # [6, 4]
        "strided": values[:, ::2],  # [4, 3]
    }
    found = read(write(tmp_path, _checkpoint(tree=tree)))
    assert _equal(found.tree, tree)
    assert all(array.flags.writeable for array in found.tree.values())  # type: ignore[union-attr]


def test_a_big_endian_array_keeps_its_values(tmp_path: Path) -> None:
    found = read(write(tmp_path, _checkpoint(tree={"a": np.array([1.5, -2.0], ">f4")})))
    assert found.tree["a"].tolist() == [1.5, -2.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": {}}, "c": np.zeros(1)}])
def test_empty_branches_survive(tmp_path: Path, tree: dict[str, Any]) -> None:
    assert _equal(read(write(tmp_path, _checkpoint(tree=tree))).tree, tree)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tree": {"a": np.array(["text"])}}, "a has dtype <U4"),
        ({"tree": {"a": np.zeros(1, np.complex64)}}, "a has dtype complex64"),
        ({"tree": {"a": np.array([object()])}}, "a has dtype object"),
        ({"tree": {"a/b": np.zeros(1)}}, "'a/b'"),
        ({"tree": {"__metadata__": np.zeros(1)}}, "__metadata__"),
        ({"tree": {"a": [1, 2]}}, "'a' is a list"),
        ({"extra": {"module": object()}}, "JSON"),
        ({"counters": {"steps": np.int64(3)}}, "JSON"),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        write(tmp_path, _checkpoint(**changes))
    assert reason in raised.value.reason
    assert raised.value.path == tmp_path / "000000007"
    assert _names(tmp_path) == []


def test_only_the_newest_are_kept_and_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for update in range(5):
        write(tmp_path, _checkpoint(update), keep=2)
    assert _names(tmp_path) == ["000000003", "000000004", "best"]


def test_what_a_crash_left_half_written_is_deleted(tmp_path: Path) -> None:
    stale = tmp_path / ".000000003.tmp"
    stale.mkdir()
    (stale / "state.safetensors").write_bytes(b"half")
    write(tmp_path, _checkpoint(4))
    assert _names(tmp_path) == ["000000004"]


def test_a_checkpoint_of_the_same_update_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, _checkpoint(4))
    path = write(tmp_path, _checkpoint(4, counters={"env_steps_trained": 9}))
    assert read(path).counters == {"env_steps_trained": 9}
    assert _names(tmp_path) == ["000000004"]


def test_a_crash_while_replacing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _checkpoint(4)
    write(tmp_path, old)
    rename = Path.rename

    def die_before_the_second(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, _checkpoint(4, counters={"env_steps_trained": 9}))
    monkeypatch.undo()
    assert _same(read(tmp_path), old)
    write(tmp_path, _checkpoint(4, counters={"env_steps_trained": 9}))
    assert read(tmp_path).counters == {"env_steps_trained": 9}
    assert _names(tmp_path) == ["000000004"]


def test_a_crash_right_after_replacing_gives_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    write(tmp_path, _checkpoint(4))
    monkeypatch.setattr(checkpoints, "_delete_outdated", die)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, _checkpoint(4, counters={"env_steps_trained": 9}))
    assert _names(tmp_path) == ["000000004", "000000004.replaced"]
    assert read(tmp_path).counters == {"env_steps_trained": 9}


def test_the_newest_is_that_of_the_highest_generation(tmp_path: Path) -> None:
    write(tmp_path, _checkpoint(500, generation=1))
    write(tmp_path, _checkpoint(400, generation=2))
    assert read(tmp_path).version == (2, 400)
    write(tmp_path, _checkpoint(450, generation=2), keep=2)
    assert _names(tmp_path) == ["000000400", "000000450"]


def test_the_one_just_written_is_kept_whatever_else_is_there(tmp_path: Path) -> None:
    write(tmp_path, _checkpoint(500, generation=9))
    write(tmp_path, _checkpoint(1, generation=0), keep=1)
    assert _names(tmp_path) == ["000000001"]


def test_a_run_directory_and_its_checkpoints_directory_give_the_newest(tmp_path: Path) -> None:
    for update in (1, 2):
        write(tmp_path / "checkpoints", _checkpoint(update))
    assert read(tmp_path).version == read(tmp_path / "checkpoints").version == (1, 2)
    assert read(tmp_path / "checkpoints" / "000000001").version == (1, 1)
    run = tmp_path.rename(tmp_path.with_name("20261120231500"))
    assert read(run).version == (1, 2)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _make_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _make_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


_DAMAGES = {
    _truncate: "truncated",
    _empty: "truncated",
    _lengthen: "corrupt",
    _flip: "corrupt",
    Path.unlink: "is missing",
    _make_a_directory: "is not a file",
    _make_a_pipe: "is not a file",
}


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, damage: Any, name: str
) -> None:
    write(tmp_path, _checkpoint(1))
    path = write(tmp_path, _checkpoint(2))
    damage(path / name)
    with pytest.raises(CheckpointError) as raised:
        read(path)
    assert raised.value.path == path
    assert name in raised.value.reason
    assert _DAMAGES[damage] in raised.value.reason
    found, problems = newest_good(tmp_path)
    assert found.version == (1, 1)
    assert problems == [str(raised.value)]
    assert read(tmp_path).problems == tuple(problems)


def test_a_damaged_checkpoint_is_deleted_and_not_counted_when_a_new_one_is_written(
    tmp_path: Path,
) -> None:
    write(tmp_path, _checkpoint(1))
    (write(tmp_path, _checkpoint(2)) / "checkpoint.json").unlink()
    write(tmp_path, _checkpoint(3), keep=2)
    assert _names(tmp_path) == ["000000001", "000000003"]


def test_where_none_is_good_the_error_lists_what_was_found(tmp_path: Path) -> None:
    for update in (1, 2):
        _empty(write(tmp_path / "checkpoints", _checkpoint(update)) / "state.safetensors")
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path)
    assert "000000001: state.safetensors is truncated" in raised.value.reason
    assert "000000002: state.safetensors is truncated" in raised.value.reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated or corrupt"),
        (b"{", "truncated or corrupt"),
        (b"\xff\xfe", "truncated or corrupt"),
        (b"[" * 100_000, "truncated or corrupt"),
        (b"9" * 10_000, "truncated or corrupt"),
        (b"[]", "not that of a checkpoint"),
        (b"{}", "not that of a checkpoint"),
        (b'{"format": 2, "juggler_version": "9.9"}', "has format 2, written by Juggler 9.9"),
        (b'{"format": 1}', "SHA-256"),
    ],
)
def test_a_record_that_is_something_else_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = write(tmp_path, _checkpoint())
    (path / "checkpoint.json").write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        read(path)
    assert reason in raised.value.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"version": [1]},
        {"version": [1, -1]},
        {"version": [1, True]},
        {"version": 3},
        {"counters": []},
        {"extra": None},
        {"files": {}},
        {"files": []},
        {"files": {"state.safetensors": 3}},
        {"files": {"state.safetensors": {"size": "large", "sha256": ""}}},
        {"empty_branches": 3},
        {"empty_branches": [["optimizer"]]},
    ],
)
def test_a_record_with_wrong_fields_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, _checkpoint())
    _rewrite_record(path, **changes)
    with pytest.raises(CheckpointError):
        read(path)
    with pytest.raises(CheckpointError):
        newest_good(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"{}" + b"more than the header says",
        safetensors.numpy.save({"a": np.zeros(2, np.complex64)}),
        safetensors.numpy.save({"a": np.zeros(2), "a/b": np.zeros(2)}),
        safetensors.numpy.save({}),
    ],
)
def test_a_state_file_that_is_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path, _checkpoint(tree={"a": np.zeros(3)}))
    (path / "state.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    files = {"state.safetensors": {"size": len(content), "sha256": digest}}
    _rewrite_record(path, files=files)
    with pytest.raises(CheckpointError):
        read(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoints"), _checkpoint())


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_change_of_bytes_gives_another_checkpoint_or_another_exception(
    whole: Path, name: str, data: st.DataObject
) -> None:
    file = whole / name
    before = file.read_bytes()
    start = data.draw(st.integers(0, len(before)))
    end = data.draw(st.integers(start, min(start + 8, len(before))))
    file.write_bytes(before[:start] + data.draw(st.binary(max_size=8)) + before[end:])
    try:
        assert _same(read(whole), _checkpoint())
    except CheckpointError as error:
        assert error.path == whole  # noqa: PT017
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nowhere", "no such file"),
        ("file", "is a file"),
        ("empty", "holds no checkpoint"),
        ("run", "holds no checkpoint"),
        ("000000003", "checkpoint.json is missing"),
    ],
)
def test_a_path_without_a_checkpoint_says_so(tmp_path: Path, what: str, reason: str) -> None:
    (tmp_path / "file").touch()
    for name in ("empty", "run/checkpoints", "000000003"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path / what)
    assert reason in raised.value.reason
    assert what in str(raised.value)


def test_a_disk_that_takes_no_more_leaves_the_old_checkpoint_and_nothing_half_written(
    tmp_path: Path,
) -> None:
    old = _checkpoint(1)
    write(tmp_path, old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            write(tmp_path, _checkpoint(2, tree={"large": np.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in raised.value.reason
    assert _names(tmp_path) == ["000000001"]
    assert _same(read(tmp_path), old)


def test_a_process_killed_while_it_writes_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    code = f"""
import itertools
from pathlib import Path
import numpy as np
from juggler.driver.record.checkpoints import write
from juggler.runtime.checkpoints.checkpoint import Checkpoint
for update in itertools.count():
    write(Path({str(tmp_path)!r}), Checkpoint(
        version=(1, update // 2), tree={{"a": np.full(200_000, float(update // 2))}},
        extra={{}}, counters={{}}, config={{}}, spaces={{}}), keep=1)
    print(update // 2, flush=True)
"""
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            said = [int(process.stdout.readline()) for _ in range(10)]
            process.kill()
        found, problems = newest_good(tmp_path)
        assert problems == []
        assert found.version[1] >= said[-1]
        assert float(found.tree["a"][0]) == found.version[1]  # type: ignore[index,arg-type]
        shutil.rmtree(found.path or tmp_path)


def test_a_directory_that_may_not_be_written_is_an_error(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir(mode=0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(CheckpointError) as raised:
            write(directory, _checkpoint())
    finally:
        if is_root:
            os.seteuid(0)
    assert os.strerror(errno.EACCES) in raised.value.reason
    assert _names(directory) == []


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write(tmp_path / "checkpoints", _checkpoint())


def test_to_keep_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        write(tmp_path, _checkpoint(), keep=0)


def test_checkpoints_need_no_torch() -> None:
    code = "import sys, juggler.driver.record.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
