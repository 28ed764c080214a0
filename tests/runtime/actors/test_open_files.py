"""The limit of open files: raised as far as it may be, and handed down."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
from juggler.runtime.actors.open_files import allow_many_open_files
allow_many_open_files()
files = [open(os.devnull) for _ in range(200)]
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
handed_down = int(subprocess.check_output([sys.executable, "-c", child]))
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), handed_down]))
"""


def test_the_soft_limit_is_raised_to_the_hard_one_here_and_in_children() -> None:
    said = subprocess.check_output([sys.executable, "-c", SCRIPT], timeout=60)
    assert json.loads(said) == [[256, 256], 256]


def test_a_limit_that_is_too_low_is_named() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 24))
from juggler.runtime.actors.open_files import allow_many_open_files
allow_many_open_files(24)
try:
    allow_many_open_files(25)
except ValueError as error:
    print(error)
"""
    said = subprocess.check_output([sys.executable, "-c", program], timeout=60, text=True)
    assert said.startswith("a process may have 24 files open at once here, and this one needs 25")
