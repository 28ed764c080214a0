"""A league whose learners and EnvRunners are on several hosts."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
from support.place import (
    Command,
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    metrics,
    trained_steps,
)

LEAGUE = """
env = "juggler:MatrixGame"
algorithm = "ppo"
envs_per_runner = 16
fragment_steps = 16
batch_size = 256

[league]
builder = "alphastar"
max_historical = 5
min_games = 1
options = {mains = 2, main_exploiters = 1, league_exploiters = 1, min_phase_steps = 2_000, \
max_phase_steps = 4_000}
"""


@pytest.mark.long
def test_a_league_of_two_hosts_outlives_a_learner_and_a_host_that_stands_still(
    place: Place, two_hosts: tuple[list[str], list[str], str]
) -> None:
    first, second, host = two_hosts
    directory = place.path / "run"
    place.write("league.toml", LEAGUE)
    juggler = [sys.executable, "-m", "juggler"]
    secret = ["--token-file", str(place.write("token", "a secret\n"))]
    options = ["--run-dir", "run", "--stop-steps", str(10**9), "--num-learners", "2"]
    options += ["--checkpoint-seconds", "2", "--bind", "0.0.0.0:5005", "--insecure"]
    driver = place.start_program([*first, *juggler, "driver", "league.toml", *options, *secret])
    driver.wait_for("waiting for workers at", 60)
    dial = ["--driver", f"{host}:5005", *secret]

    def learner(there: list[str], address: str, index: int) -> Command:
        data = ["--bind", "0.0.0.0:0", "--advertise", f"{address}:0", "--insecure"]
        which = ["--index", str(index)]
        return place.start_program([*there, *juggler, "learner", *dial, *data, *which])

    near, far = learner(first, host, 0), learner(second, "10.77.0.2", 1)
    runners = [place.start_program([*at, *juggler, "envrunner", *dial]) for at in (first, second)]

    def league() -> dict[str, Any]:
        lines = metrics(directory) if (directory / "metrics.jsonl").exists() else []
        return dict(lines[-1].get("league", {}).get("learning", {})) if lines else {}

    def all_go_on() -> None:
        """Every player is trained and copied from now on."""
        before = league()
        players = {"main-0", "main-1", "main_exploiter-0", "league_exploiter-0"}

        def has_more(player: str) -> bool:
            now, was = league().get(player), before.get(player, {"steps": 0, "copies": 0})
            return now is not None and all(now[key] > was[key] for key in ("steps", "copies"))

        eventually(lambda: all(map(has_more, players)), 120, lambda: driver.output)

    all_go_on()
    near.process.kill()
    driver.wait_for("learner-0 left", 30)
    near = learner(first, host, 0)
    all_go_on()

    stands_still = (far, runners[1])
    for worker in stands_still:
        worker.process.send_signal(signal.SIGSTOP)
    for name in ("learner-1", "envrunner-1"):
        driver.wait_for(f"{name} left", 60)
    reached = trained_steps(directory)
    eventually(lambda: trained_steps(directory) > reached, 60, lambda: driver.output)
    for worker in stands_still:
        worker.process.send_signal(signal.SIGCONT)
    eventually(lambda: env_runners(directory) == 2, 90, lambda: driver.output)
    all_go_on()

    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in (near, far, *runners):
        assert worker.wait(60) == 0, worker.output
    assert "cannot" not in driver.output
    assert_books_balance(directory)
    place.assert_nothing_is_left()
