"""Metrics lines on their way into a run's directory, whatever becomes of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from juggler.driver.record.progress import Progress
from juggler.driver.record.run_directory import RunDirectory, RunDirectoryError


class LineWriter:
    """Writes a run's lines. A run does not end because its disk does not take them: people are told
    once what is wrong, and once that it is over.
    """

    def __init__(self, directory: RunDirectory, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress
        self._problem = ""

    def append(self, line: Mapping[str, Any]) -> bool:
        """True where the directory was gone, and has been made again."""
        problem, renewed = "", False
        try:
            renewed = self._directory.renew()
            self._directory.append(line)
        except RunDirectoryError as error:
            problem = str(error)
        path = self._directory.path
        if renewed:
            text = f"the run directory {path} was deleted or moved. It is made again, without what"
            self._progress.message(f"{text} was in it", "error")
        if problem and problem != self._problem:
            self._progress.message(problem, "error")
        elif self._problem and not problem:
            self._progress.message(f"metrics are written in {path} again", "info")
        self._problem = problem
        return renewed
