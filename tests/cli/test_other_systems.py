from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: What the system lacks fails to import, as it does there.
ELSEWHERE = """
import sys
sys.platform = {system!r}
sys.modules |= dict.fromkeys(["fcntl", "resource", "pwd", "grp", "termios"])
sys.argv = ["juggler", *{arguments!r}]
from juggler.cli import main
sys.exit(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize("arguments", [[], ["--help"], ["train", "cartpole"], ["status"]])
def test_on_other_systems_the_first_line_says_what_runs_it(
    system: str, arguments: list[str], tmp_path: Path
) -> None:
    code = ELSEWHERE.format(system=system, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert first.startswith("juggler runs on Linux. On macOS and Windows, use docker")
    assert "docker run --rm --init -v runs:/runs juggler train cartpole" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
