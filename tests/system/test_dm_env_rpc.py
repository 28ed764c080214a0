"""Runs whose environments are simulators elsewhere, served by the example."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from support.place import Command, Place, assert_books_balance

from juggler.runtime.actors.certificates import make_certificates

SMALL = ["--envs-per-runner", 4, "--fragment-steps", 16, "--batch-size", 60]
ONE_RUNNER = ["--num-env-runners", 1, "--run-dir", "run"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "simulators" / "serve_gym.py"


def serve(place: Place, env: str = "CartPole-v1", *options: object) -> tuple[Command, str]:
    """A server, and what `--env` takes to dial it."""
    server = place.start_program([sys.executable, str(EXAMPLE), env, *map(str, options)])
    server.wait_for("serving", seconds=60)
    found = re.search(r"dm_env_rpc://\S+", server.output)
    assert found is not None, server.output
    return server, found[0]


def stop(server: Command) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0, server.output


@pytest.mark.slow
def test_a_run_trains_on_what_is_served_with_tls_and_a_token(place: Place) -> None:
    make_certificates(place.path / "tls", (), 1.0)
    server, address = serve(place, "CartPole-v1", "--tls", "tls")
    kwargs = json.dumps({"tls": "tls", "seed_setting": "seed"})
    options = ["--env", address, "--env-kwargs", kwargs, "--stop-steps", 600]
    run = place.run("train", *SMALL, *ONE_RUNNER, *options)
    assert run.status == 0, run.output
    assert_books_balance(place.path / "run")
    played = place.run("evaluate", "run", "--episodes", 3)
    assert "3 episodes: return" in played.output, played.output
    stop(server)
    place.assert_nothing_is_left()
