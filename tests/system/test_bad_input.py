"""Wrong input: one clear message, and exit status 1 or 2.

`tests/docs/errors.txt` has more of these messages, each of them whole.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gymnasium
import pytest
from support.place import status_of

pytestmark = pytest.mark.usefixtures("no_forkserver")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--env", "ALE/Pong-v5"), "Nearest: ale_py:ALE/Pong-v5"),
        (("--env", "envpool:Pong-v5"), "needs the package envpool: "),
    ],
)
def test_a_name_that_leads_nowhere_is_told_before_anything_starts(
    in_a_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    if "envpool" in words and importlib.util.find_spec("envpool"):
        pytest.skip("envpool is here")
    for name in [each for each in gymnasium.registry if each.startswith("ALE/")]:
        monkeypatch.delitem(gymnasium.registry, name)  # another test may have imported ale_py
    assert status_of("train", *arguments) == 2
    said = capsys.readouterr().err
    assert words in said, said
    assert "Traceback" not in said
    assert list(in_a_directory.iterdir()) == []


@pytest.mark.usefixtures("local_workers")
def test_what_cannot_be_made_is_told_before_there_is_a_run_directory(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("oops\n")
    Path("of_text.py").write_text(
        "import gymnasium\n"
        "class Talk(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Text(10)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'hello', {}\n"
        "    def step(self, action):\n"
        "        return 'bye', 0.0, True, False, {}\n"
    )
    told = {
        ("--env", "Acrobot-v1", "--env-kwargs", '{"x": 1}'): "unexpected keyword argument 'x'",
        ("cartpole", "--devices", "cuda:99"): "devices = 'cuda:99': this host has ",
        ("cartpole", "--module", "json:Policy"): "the Python module 'json' has no 'Policy'",
        ("--env", "broken:Env"): "module 'broken' failed in import: NameError: name 'oops'",
        ("--env", "broken"): "no environment is registered as 'broken'",
        ("--env", "of_text:Talk", "--envs-per-runner", "2"): "Text(",
    }
    for arguments, words in told.items():
        status = status_of("train", *arguments)
        said = "".join(capsys.readouterr())
        assert status == 2, (arguments, said)
        assert words in said.splitlines()[-1], arguments
    assert "Traceback" not in said, "of the last one, which nothing raised"
    assert not (in_a_directory / "runs").exists()
