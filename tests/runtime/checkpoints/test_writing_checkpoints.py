"""Checkpoints come back as written; interrupted writes leave a good one."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.made_files import checkpoint, equal, names, same

from juggler.runtime.checkpoints import checkpoint as checkpoints
from juggler.runtime.checkpoints.checkpoint import CheckpointError, adopt, newest_good, read, write


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = checkpoint()
    path = write(tmp_path / "checkpoints", written)
    assert path == tmp_path / "checkpoints" / "000000007"
    found = read(path)
    assert same(found, written)
    assert found.path == path
    assert names(path) == ["checkpoint.json", "state.safetensors"]


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
    found = read(write(tmp_path, checkpoint(tree=tree)))
    assert equal(found.tree, tree)
    assert all(array.flags.writeable for array in found.tree.values())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tree": {"a": np.array(["text"])}}, "a has dtype <U4"),
        ({"tree": {"a": np.zeros(1, np.complex64)}}, "a has dtype complex64"),
        ({"tree": {"a": np.array([object()])}}, "a has dtype object"),
        ({"tree": {"a/b": np.zeros(1)}}, "'a/b'"),
        ({"tree": {"__metadata__": np.zeros(1)}}, "__metadata__"),
        ({"tree": {"a": [1, 2]}}, "'a' is a list"),
        ({"modules": {"default": object()}}, "JSON"),
        ({"counters": {"steps": np.int64(3)}}, "JSON"),
    ],
)
def test_what_has_no_place_in_a_checkpoint_is_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        write(tmp_path, checkpoint(**changes))
    assert reason in raised.value.reason
    assert raised.value.path == tmp_path / "000000007"
    assert names(tmp_path) == []


def test_only_the_newest_are_kept_and_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    for update in range(5):
        write(tmp_path, checkpoint(update), keep=2)
    assert names(tmp_path) == ["000000003", "000000004", "best"]


def test_what_a_crash_left_half_written_is_deleted(tmp_path: Path) -> None:
    stale = tmp_path / ".000000003.tmp"
    stale.mkdir()
    (stale / "state.safetensors").write_bytes(b"half")
    write(tmp_path, checkpoint(4))
    assert names(tmp_path) == ["000000004"]


def test_a_crash_while_replacing_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = checkpoint(4)
    write(tmp_path, old)
    rename = Path.rename

    def die_before_the_second(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die_before_the_second)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, checkpoint(4, counters={"env_steps_trained": 9}))
    monkeypatch.undo()
    assert same(read(tmp_path), old)
    write(tmp_path, checkpoint(4, counters={"env_steps_trained": 9}))
    assert read(tmp_path).counters == {"env_steps_trained": 9}
    assert names(tmp_path) == ["000000004"]


def test_a_crash_right_after_replacing_gives_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    write(tmp_path, checkpoint(4))
    monkeypatch.setattr(checkpoints, "_delete_outdated", die)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, checkpoint(4, counters={"env_steps_trained": 9}))
    assert names(tmp_path) == ["000000004", "000000004.replaced"]
    assert read(tmp_path).counters == {"env_steps_trained": 9}


def test_a_damaged_checkpoint_is_deleted_and_not_counted_when_a_new_one_is_written(
    tmp_path: Path,
) -> None:
    write(tmp_path, checkpoint(1))
    (write(tmp_path, checkpoint(2)) / "checkpoint.json").unlink()
    write(tmp_path, checkpoint(3), keep=2)
    assert names(tmp_path) == ["000000001", "000000003"]


def test_a_disk_that_takes_no_more_leaves_the_old_checkpoint_and_nothing_half_written(
    tmp_path: Path,
) -> None:
    old = checkpoint(1)
    write(tmp_path, old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            write(tmp_path, checkpoint(2, tree={"large": np.zeros(100_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.strerror(errno.EFBIG) in raised.value.reason
    assert names(tmp_path) == ["000000001"]
    assert same(read(tmp_path), old)


@pytest.mark.slow
def test_a_process_killed_while_it_writes_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    code = f"""
import itertools
from pathlib import Path
import numpy as np
from juggler.runtime.checkpoints.checkpoint import adopt, write
from juggler.runtime.checkpoints.checkpoint import Checkpoint
for update in itertools.count():
    write(Path({str(tmp_path)!r}), Checkpoint(
        version=(1, update // 2), tree={{"a": np.full(200_000, float(update // 2))}},
        modules={{}}, counters={{}}, config={{}}, spaces={{}}), keep=1)
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
            write(directory, checkpoint())
    finally:
        if is_root:
            os.seteuid(0)
    assert os.strerror(errno.EACCES) in raised.value.reason
    assert names(directory) == []


def test_one_that_is_adopted_finds_nothing_half_deleted_there(tmp_path: Path) -> None:
    """Only `adopt` ever writes into the directory of the best checkpoint."""
    best = tmp_path / "best"
    for name in (".000000003.tmp", ".000000004.replaced.tmp"):
        (best / name).mkdir(parents=True)  # by a process that was killed
    adopted = adopt(write(tmp_path / "evaluated", checkpoint()), best, keep=1)
    assert names(best) == [adopted.name]
