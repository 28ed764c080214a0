"""Children of environments end with them, whichever process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from support.place import Command, Place, eventually, first_of, trains_on

#: Each environment starts a game of two processes that it never ends: a child, and one that has
#: left the session and lost its parent, as daemons do.
_GAMES = """
import subprocess, sys
from gymnasium.envs.classic_control import CartPoleEnv

SLEEP = "import time; time.sleep(600)"
DAEMON = f"import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); {SLEEP}"

class Game(CartPoleEnv):
    def __init__(self):
        super().__init__()
        for program in (SLEEP, DAEMON):
            subprocess.Popen([sys.executable, "-c", program, MARK])
"""


def _start(place: Place, *options: object) -> Command:
    place.write("games.py", _GAMES.replace("MARK", repr(str(place.path))))
    several = ["--num-env-runners", 2, "--envs-per-runner", 2, "--fragment-steps", 16]
    return place.start(
        "train", "cartpole", "--env", "games:Game", "--run-dir", "run", "--stop-return", 501,
        "--no-confirm", *several, *options,
    )  # fmt: skip


def _games(place: Place) -> list[psutil.Process]:
    """Wherever they have gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(place.path) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def _no_game_is_left(place: Place) -> Iterator[None]:
    yield
    for process in _games(place):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _all_play(place: Place, run: Command) -> None:
    # Two runners of two environments, with two processes each, and the one for the spaces.
    trains_on(place.path / "run", run)
    eventually(lambda: len(_games(place)) >= 8, 60, lambda: f"{len(_games(place))}\n{run.output}")


@pytest.mark.slow
@pytest.mark.parametrize("vectorize", first_of(["sync", "async"]))
def test_a_killed_envrunner_takes_its_games_with_it_and_a_killed_driver_all(
    place: Place, vectorize: str
) -> None:
    run = _start(place, "--vectorize", vectorize)
    _all_play(place, run)
    before = _games(place)
    mine = psutil.Process(place.worker("envrunner 1").pid).children(recursive=True)
    place.worker("envrunner 0").kill()
    its = [game for game in before if game not in mine]
    assert its
    assert len(its) < len(before)
    eventually(lambda: not any(game.is_running() for game in its), 30, lambda: str(its))
    assert all(game.is_running() for game in before if game in mine)
    trains_on(place.path / "run", run)
    assert "unexpected pid" not in run.output
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait(30)
    eventually(lambda: not place.processes(), 30, lambda: str(place.processes()))
    eventually(lambda: not _games(place), 30, lambda: str(_games(place)))
