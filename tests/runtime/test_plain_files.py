"""Files that others may have put into a run's directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from juggler.runtime.plain_files import MOST_JSON, read_json, read_plain, read_toml_table


def test_a_plain_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_plain(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "none", 5)


def test_a_pipe_a_device_a_link_and_a_directory_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("/etc/passwd")
    for path in (*tmp_path.iterdir(), Path("/dev/zero")):
        with pytest.raises(OSError, match="not a plain file"):
            read_plain(path, 1 << 20)


def test_a_huge_sparse_file_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"more than {MOST_JSON} bytes"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b'{"a": ' * 100_000])
def test_json_that_cannot_be_read_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"decode|deeply|JSON|column"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize(
    "content",
    [b"\xff = 1", b"a = " + b"[" * 100_000, b"a" + b".a" * 20_000 + b" = 1", b"a = " + b"1" * 5000],
)
def test_toml_that_cannot_be_read_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"decode|deeply|dots|digits"):
        read_toml_table(tmp_path / "file")
