"""Checkpoints come back as written; damaged ones are reported."""

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
from support.made_files import checkpoint, equal, names, same

import juggler
from juggler.runtime.checkpoints import checkpoint as checkpoints
from juggler.runtime.checkpoints.checkpoint import (
    CheckpointError,
    adopt,
    digest,
    newest_good,
    read,
    write,
)
from juggler.runtime.checkpoints.weights import NoSuchWeights


def _rewrite_record(path: Path, **changes: Any) -> None:
    """Changes checkpoint.json and its digest, as an attacker would."""
    file = path / "checkpoint.json"
    record = json.loads(file.read_text()) | changes
    del record["sha256"]
    file.write_text(json.dumps(record | {"sha256": digest(record)}))


def test_one_that_is_larger_than_memory_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    write(tmp_path, checkpoint(1))
    monkeypatch.setattr(checkpoints, "decode_tree", fails)
    with pytest.raises(CheckpointError, match="bytes"):
        read(tmp_path)


def test_keys_that_runs_no_longer_have_are_dropped(tmp_path: Path) -> None:
    config = {"env": "CartPole-v1", "trace": "traces.jsonl"}
    write(tmp_path, replace(checkpoint(1), config=config))
    assert read(tmp_path).config == {"env": "CartPole-v1"}


def test_the_newest_is_that_of_the_highest_generation(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(500, generation=1))
    write(tmp_path, checkpoint(400, generation=2))
    assert read(tmp_path).version == (2, 400)
    write(tmp_path, checkpoint(450, generation=2), keep=2)
    assert names(tmp_path) == ["000000400", "000000450"]


def test_a_run_directory_and_its_checkpoints_directory_give_the_newest(tmp_path: Path) -> None:
    for update in (1, 2):
        write(tmp_path / "checkpoints", checkpoint(update))
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


def _flip_last(file: Path) -> None:
    """Flip a bit of an array: only the digest shows it."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
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
    _flip_last: "corrupt",
    Path.unlink: "is missing",
    _make_a_directory: "is not a file",
    _make_a_pipe: "is not a file",
}


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path: Path, damage: Any, name: str
) -> None:
    write(tmp_path, checkpoint(1))
    path = write(tmp_path, checkpoint(2))
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


def test_where_none_is_good_the_error_lists_what_was_found(tmp_path: Path) -> None:
    for update in (1, 2):
        _empty(write(tmp_path / "checkpoints", checkpoint(update)) / "state.safetensors")
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
        (b"[]", "not the file of a checkpoint"),
        (b"{}", "not the file of a checkpoint"),
        (b'{"format": 3, "juggler_version": "9.9"}', "has format 3, written by Juggler 9.9"),
        (b'{"format": 1}', "SHA-256"),
    ],
)
def test_a_record_that_is_something_else_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = write(tmp_path, checkpoint())
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
        {"modules": None},
        {"modules": {"default": None}},
        {"modules": {"default": {"version": [1, 2]}}},
        {"modules": {"default": {"version": [1], "extra": {}}}},
        {"files": {}},
        {"files": []},
        {"files": {"state.safetensors": 3}},
        {"files": {"state.safetensors": {"size": "large", "sha256": ""}}},
        {"empty_branches": 3},
        {"empty_branches": [["optimizer"]]},
    ],
)
def test_a_record_with_wrong_fields_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, checkpoint())
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
    path = write(tmp_path, checkpoint(tree={"a": np.zeros(3)}))
    (path / "state.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    files = {"state.safetensors": {"size": len(content), "sha256": digest}}
    _rewrite_record(path, files=files)
    with pytest.raises(CheckpointError):
        read(path)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("nowhere", "no such file"),
        ("file", "is a file"),
        ("empty", "holds no checkpoint"),
        ("run", "holds no checkpoint; give a checkpoint, or"),
        ("killed", "holds no checkpoint: its run was"),
        ("ended", "its run ended before its first"),
        ("failed", "its run ended before its first"),
        ("deleted", "holds no checkpoint any more, or"),
        ("seeds", "it holds several runs: name"),
        ("source", "holds no checkpoint; give a checkpoint, or"),
        ("000000003", "checkpoint.json is missing"),
    ],
)
def test_a_path_without_a_checkpoint_says_so(tmp_path: Path, what: str, reason: str) -> None:
    (tmp_path / "file").touch()
    below = "run", "seeds/seed-0", "source/package"
    for name in ("empty", "000000003", *(f"{each}/checkpoints" for each in below)):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "seeds/seed-0/config.toml").touch()
    ended = {"reason_for_stop": "stop_seconds", "failure": None}
    failed = {"reason_for_stop": "failed", "failure": "no GPU"}
    deleted = {"reason_for_stop": "solved", "failure": None, "env_steps_trained": 9}
    runs = {"killed": None, "ended": ended, "failed": failed, "deleted": deleted}
    for name, summary in runs.items():
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
        if summary:
            (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(CheckpointError) as raised:
        read(tmp_path / what)
    assert reason in raised.value.reason
    assert what in str(raised.value)


def test_what_is_no_path_says_where_it_may_come_from() -> None:
    for reads in (juggler.load_policy, juggler.evaluate, juggler.resume, juggler.read_weights):
        with pytest.raises(ValueError, match="evaluation_seconds"):
            reads(None)  # type: ignore[operator]


# The weights in a checkpoint, all of them or by patterns of their names.


def unit(**parameters: float) -> dict[str, Any]:
    """A unit's part of a state, as a learner saves it."""
    arrays = {name.replace("__", "."): np.full(2, x) for name, x in parameters.items()}
    return {"parameters": arrays, "buffers": {}, "moments": {"mean": arrays}, "steps": np.array(3)}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tree = {"default": {**unit(encoder__weight=1, head=2), "buffers": {"encoder.seen": np.ones(1)}}}
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    write(
        checkpoints, checkpoint(tree={**tree, "connectors": {"filter": {"count": np.ones(1)}}}), 3
    )
    return tmp_path


def test_all_of_them_are_parameters_and_buffers_by_module(run_dir: Path) -> None:
    weights = juggler.read_weights(run_dir)
    assert weights.keys() == {"default"}
    assert sorted(weights["default"]) == ["encoder.seen", "encoder.weight", "head"]
    assert weights["default"]["head"].tolist() == [2, 2]


@pytest.mark.parametrize("pattern", ["encoder.*", "default:encoder.*"])
def test_patterns_choose_some_of_them(run_dir: Path, pattern: str) -> None:
    weights = juggler.read_weights(run_dir, [pattern])
    assert sorted(weights["default"]) == ["encoder.seen", "encoder.weight"]


def test_a_pattern_that_names_nothing_is_an_error_that_lists_what_there_is(run_dir: Path) -> None:
    with pytest.raises(NoSuchWeights, match=r"like 'encodr\.\*'"):
        juggler.read_weights(run_dir, ["head", "encodr.*"])


def test_modules_that_share_parameters_have_each_their_own_names(tmp_path: Path) -> None:
    joint = unit(**{"left:encoder": 1, "left:head": 2, "right:head": 3})
    write(tmp_path, checkpoint(tree={"left+right": joint, "alone": unit(head=4)}), 3)
    weights = juggler.read_weights(tmp_path, ["head", "left:encoder"])
    found = {key: {name: x[0] for name, x in own.items()} for key, own in weights.items()}
    assert found == {"left": {"encoder": 1, "head": 2}, "right": {"head": 3}, "alone": {"head": 4}}
    assert juggler.read_weights(tmp_path, ["right:*"]).keys() == {"right"}


def test_a_checkpoint_without_parameters_by_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, checkpoint(tree={"connectors": {}, "other": {"state": np.ones(1)}}), 3)
    with pytest.raises(juggler.CheckpointError, match="has no named parameters"):
        juggler.read_weights(tmp_path)


# Checkpoints come back as written; interrupted writes leave a good one.


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
