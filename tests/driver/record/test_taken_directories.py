"""What is said of a directory that a new run cannot have."""

from __future__ import annotations

from pathlib import Path

import pytest

from juggler.driver.record.run_directory import RunDirectoryError, must_be_free


@pytest.mark.parametrize("command", ["train", "driver"])
def test_a_directory_with_a_checkpoint_says_how_its_run_goes_on(
    tmp_path: Path, command: str
) -> None:
    (tmp_path / "checkpoints" / "000000001").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=f"not empty; .*juggler {command} --resume "):
        must_be_free(tmp_path, command)


def test_a_directory_of_other_things_is_not_called_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match=r"go on from; name another$"):
        must_be_free(tmp_path)
