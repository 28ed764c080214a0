"""Workers and simulators that dial in, with TLS and tokens."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.network import free_address
from support.place import (
    REPOSITORY,
    Command,
    Place,
    assert_books_balance,
    eventually,
    status_of,
    summary,
    trained_steps,
    trains_on,
)

from juggler.runtime.actors.certificates import make_certificates

LONG = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]


def _certs(place: Place, name: str = "tls") -> Path:
    assert status_of("certs", place.path / name) == 0
    return place.path / name


@pytest.mark.slow
def test_the_four_commands_of_the_page_train_and_show_their_secrets_nowhere(place: Place) -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```$", page, re.S | re.M)
    first, second = (free_address().rpartition(":")[2] for _ in range(2))
    here = {"gpu1": "localhost", "5005": first, "5006": second}
    typed = re.sub("|".join(here), lambda found: here[found[0]], block).splitlines()
    certs, driver, *workers = [shlex.split(line)[1:] for line in typed]
    assert [certs[0], driver[0], *(each[0] for each in workers)] == [
        "certs", "driver", "learner", "envrunner",
    ]  # fmt: skip
    made = place.run(*certs)
    assert made.status == 0, made.output
    token, directory = (place.path / "tls" / "token").read_text().strip(), place.path / "run"
    started = [place.start(*driver, "--run-dir", "run", "--stop-steps", 50_000)]
    started += [place.start(*each) for each in workers]
    trains_on(directory, started[0])
    for process in place.processes():
        assert token not in " ".join(process.cmdline())
    for each in started:
        assert each.wait(110) == 0, each.output
        assert token not in each.output
        assert "PRIVATE KEY" not in each.output
    for file in directory.rglob("*"):
        assert file.is_dir() or token.encode() not in file.read_bytes(), file
    assert summary(directory)["env_steps_trained"] >= 50_000
    assert_books_balance(directory)
    place.assert_nothing_is_left()


#: Options of a listener beyond loopback, and why it is refused.
LACKING = (
    ([], "and nothing is encrypted. Pass --tls DIR, which `juggler certs DIR` makes"),
    (["--tls", "tls"], "and there is no token. Pass --token-file FILE"),
)
REFUSING = "refusing to listen on 0.0.0.0:0: other machines could reach it"


def test_a_driver_beyond_loopback_needs_both_tls_and_a_token(
    in_a_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("certs", "tls") == 0
    Path("tls/token").unlink()
    for options, words in LACKING:
        assert status_of("driver", "cartpole", "--bind", "0.0.0.0:0", *options) == 1
        said = capsys.readouterr().err
        assert REFUSING in said
        assert words in said
        assert "Traceback" not in said


@pytest.mark.slow
def test_learners_of_several_hosts_sum_over_tls_and_one_may_be_killed(place: Place) -> None:
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    made = place.run("certs", "tls", *(word for host in hosts for word in ("--host", host)))
    assert made.status == 0, made.output
    directory = place.path / "run"
    driver = place.start("driver", "cartpole", *LONG, "--num-learners", 2, "--tls", "tls")
    dial = ["--driver", driver.address(), "--tls", "tls"]
    runner = place.start("envrunner", *dial)
    first, second = (place.start("learner", *dial, "--bind", f"{host}:0") for host in hosts[:2])

    def trained_more(than: int) -> None:
        eventually(
            lambda: trained_steps(directory) > than,
            60,
            lambda: "\n".join(each.output for each in (driver, runner, first, second)),
        )

    trained_more(0)
    mixed = place.start("learner", *dial, "--bind", f"{hosts[2]}:0", "--insecure")
    assert mixed.wait(60) == 1
    assert "some learners of this group would encrypt their gradients" in mixed.output
    second.process.kill()
    second.wait(30)
    trained_more(trained_steps(directory) + 20_000)
    third = place.start("learner", *dial, "--bind", f"{hosts[2]}:0")
    both = r"learner group \d+: learner-\d on cpu, learner-\d on cpu"
    eventually(lambda: len(re.findall(both, driver.output)) == 2, 60, lambda: driver.output)
    trained_more(trained_steps(directory) + 20_000)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for each in (runner, first, third):
        assert each.wait(30) == 0, each.output
        assert "unencrypted" not in each.output
    assert_books_balance(directory)


# Workers that dial in over TCP.


@pytest.mark.slow
def test_a_worker_may_leave_and_another_one_join(place: Place) -> None:
    directory = place.path / "run"
    options = ["--stop-steps", 10**9, "--stop-return", 501, "--run-dir", "run"]
    driver = place.start("driver", "cartpole", "--bind", "127.0.0.1:0", *options)
    address = driver.address()
    learner = place.start("learner", "--driver", address)
    first = place.start("envrunner", "--driver", address)
    trains_on(directory, driver)
    first.process.terminate()
    assert first.wait(30) == 0, first.output
    driver.wait_for("envrunner-0 left: terminated")
    reached = trained_steps(directory)
    second = place.start("envrunner", "--driver", address)
    eventually(lambda: trained_steps(directory) > reached + 50_000, 60, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for worker in (second, learner):
        assert worker.wait(30) == 0, worker.output
    assert_books_balance(directory)
    end = summary(directory)
    assert end["env_steps_lost_unreported"] == 0, "it told what it had sampled before it left"
    assert end["env_steps_trained"] == end["learner_steps"]["learner-0"]["trained"]
    place.assert_nothing_is_left()


# Runs whose environments are simulators elsewhere, served by the example.


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
