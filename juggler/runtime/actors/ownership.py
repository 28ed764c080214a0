"""Check that no other user may write to a file or directory."""

from __future__ import annotations

import os
import stat


def is_ours_alone(found: os.stat_result) -> bool:
    """Whether only this user or root may write to a path."""
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in (0, os.geteuid()) and not others
