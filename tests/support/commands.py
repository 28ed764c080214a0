"""Commands in this process."""

from __future__ import annotations

from juggler.cli import main


def status_of(*arguments: object) -> int:
    """Run a command and return its exit status."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:  # tyro's own way out
        return int(error.code or 0)
