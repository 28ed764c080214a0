"""Files of lines that somebody else is writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from juggler.driver.record import line_file
from juggler.driver.record.line_file import LineFile


def read(file: LineFile) -> tuple[bool, list[bytes]]:
    return file.begins_anew(), list(file.new_lines())


@pytest.mark.parametrize("part", [5, 11, 1 << 23])
def test_each_line_comes_once_and_whole(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "_PART", part)  # longer than any line here
    path = tmp_path / "lines"
    file = LineFile(path)
    came: list[bytes] = []
    text = b"".join(b"%d\n" % n for n in range(100))
    for end in range(0, len(text) + 1, 7):
        path.write_bytes(text[:end])
        anew, lines = read(file)
        assert not anew
        came += lines
    path.write_bytes(text)
    assert [*came, *read(file)[1]] == [b"%d" % n for n in range(100)]


def test_a_file_that_is_cut_or_another_one_comes_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    file = LineFile(path)
    assert read(file) == (False, [b"one", b"two"])
    path.write_bytes(b"three\n")
    assert read(file) == (True, [b"three"])
    (tmp_path / "new").write_bytes(b"four\nfive\nsix\n")
    (tmp_path / "new").rename(path)
    assert read(file) == (True, [b"four", b"five", b"six"])


def test_what_is_no_file_of_lines_neither_blocks_nor_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = LineFile(tmp_path / "pipe")
    pipe.begins_anew()
    with pytest.raises(OSError, match="plain file"):
        list(pipe.new_lines())
    with pytest.raises(FileNotFoundError):
        LineFile(tmp_path / "nothing").begins_anew()
    monkeypatch.setattr(line_file, "_PART", 10)
    (tmp_path / "one").write_bytes(b"x" * 25)
    assert read(LineFile(tmp_path / "one")) == (False, [b"x" * 10, b"x" * 10])
