"""Runs whose hosts know each other by certificates."""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest
from support.commands import status_of
from support.network import free_address
from support.place import (
    REPOSITORY,
    Command,
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    summary,
    trained_steps,
)

LONG = ["--stop-return", 501, "--run-dir", "run", "--bind", "127.0.0.1:0"]


def _address(driver: Command) -> str:
    driver.wait_for("waiting for workers at")
    line = next(line for line in driver.output.splitlines() if "waiting for workers at" in line)
    return line.split()[-1]


def _certs(place: Place, name: str = "tls") -> Path:
    assert status_of("certs", place.path / name) == 0
    return place.path / name


@pytest.mark.slow
def test_a_run_over_tls_trains_and_shows_its_secrets_nowhere(place: Place) -> None:
    tls = _certs(place)
    token = (tls / "token").read_text().strip()
    directory = place.path / "run"
    driver = place.start("driver", "cartpole", *LONG, "--tls", "tls")
    dial = ["--driver", _address(driver), "--tls", "tls"]
    workers = [place.start(role, *dial) for role in ("envrunner", "learner")]
    eventually(
        lambda: trained_steps(directory) and env_runners(directory) == 1,
        60,
        lambda: "\n".join(each.output for each in (driver, *workers)),
    )
    for process in place.processes():
        assert token not in " ".join(process.cmdline())
    driver.process.terminate()
    for each, status in ((driver, 143), *((worker, 0) for worker in workers)):
        assert each.wait(30) == status, each.output
        assert token not in each.output
        assert "PRIVATE KEY" not in each.output
    for file in directory.rglob("*"):
        assert file.is_dir() or token.encode() not in file.read_bytes(), file
    assert summary(directory)["env_steps_trained"] > 0
    assert_books_balance(directory)
    place.assert_nothing_is_left()


@pytest.mark.slow
def test_the_four_commands_of_the_page_train(place: Place) -> None:
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
    started = [place.start(*driver, "--run-dir", "run", "--stop-steps", 50_000)]
    started += [place.start(*each) for each in workers]
    for each in started:
        assert each.wait(110) == 0, each.output
    assert summary(place.path / "run")["env_steps_trained"] >= 50_000
    place.assert_nothing_is_left()


@pytest.mark.long
def test_whoever_lacks_the_right_certificate_is_told_and_the_run_goes_on(place: Place) -> None:
    _certs(place)
    _certs(place, "others")
    directory = place.path / "run"
    driver = place.start("driver", "cartpole", *LONG, "--tls", "tls")
    address = _address(driver)
    token = ["--token-file", "tls/token"]
    workers = [
        place.start(role, "--driver", address, "--tls", "tls") for role in ("learner", "envrunner")
    ]
    plain = place.start("envrunner", "--driver", address, *token)
    stranger = place.start("envrunner", "--driver", address, "--tls", "others", *token)
    thief = place.start("envrunner", "--driver", address, "--tls", "tls", JUGGLER_TOKEN="guess")
    looks = place.start("status", address, "--once", *token)
    for each, words in (
        (plain, f"the driver at {address} speaks TLS: pass --tls DIR here too"),
        (looks, f"juggler status: the driver at {address} speaks TLS: pass --tls DIR here too"),
        (stranger, f"this host does not accept the certificate of the driver at {address}"),
        (thief, "the token is missing or wrong"),
    ):
        assert each.wait(30) == 1, each.output
        assert words in each.output
        assert "Traceback" not in each.output
    assert len(looks.output.splitlines()) == 1, "gRPC says nothing of its own"
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)
    driver.interrupt()
    for each, status in ((driver, 130), *((worker, 0) for worker in workers)):
        assert each.wait(30) == status, each.output
    assert summary(directory)["num_env_runners"] <= 1
    place.assert_nothing_is_left()


#: Options of who would listen beyond loopback, and why it refuses.
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


@pytest.mark.long
def test_a_learner_beyond_loopback_needs_both_tls_and_a_token(place: Place) -> None:
    (_certs(place) / "token").unlink()
    for options, words in LACKING:
        dial = ("learner", "--driver", "[::1]:1", "--bind", "0.0.0.0:0")
        refused = place.run(*dial, *options, seconds=30)
        assert refused.status == 1
        assert REFUSING in refused.output
        assert words in refused.output
        assert "Traceback" not in refused.output


def _own_address() -> str:
    """Of this host, beyond loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            host: str = probe.getsockname()[0]
        except OSError:
            pytest.skip("this host has no address but those of loopback")
        return host


@pytest.mark.slow
def test_learners_of_several_hosts_sum_over_tls_and_one_may_be_killed(place: Place) -> None:
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    made = place.run("certs", "tls", *(word for host in hosts for word in ("--host", host)))
    assert made.status == 0, made.output
    directory = place.path / "run"
    driver = place.start("driver", "cartpole", *LONG, "--num-learners", 2, "--tls", "tls")
    dial = ["--driver", _address(driver), "--tls", "tls"]
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


@pytest.mark.long
def test_learners_on_a_private_network_may_be_plain_and_say_so(place: Place) -> None:
    host = _own_address()
    made = place.run("certs", "tls", "--host", host)
    assert made.status == 0, made.output
    directory = place.path / "run"
    driver = place.start(
        *["driver", "cartpole", *LONG[:-1], f"{host}:0", "--num-learners", 2, "--tls", "tls"]
    )
    dial = ["--driver", _address(driver), "--tls", "tls"]
    runner = place.start("envrunner", *dial)
    bound = [*dial, "--bind", f"{host}:0", "--insecure"]
    learners = [place.start("learner", *bound) for _ in range(2)]
    eventually(lambda: trained_steps(directory) > 0, 60, lambda: driver.output)
    driver.interrupt()
    assert driver.wait(30) == 130, driver.output
    for each in (runner, *learners):
        assert each.wait(30) == 0, each.output
    words = f"learners of a group talk to each other unencrypted and unauthenticated, at {host}"
    assert all(
        f"{words}, even with TLS: keep that network private" in each.output for each in learners
    )
