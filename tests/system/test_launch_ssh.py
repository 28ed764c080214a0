"""`juggler launch ssh` with a real sshd, on another host."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.place import (
    REPOSITORY,
    Place,
    assert_books_balance,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    trains_on,
    workers_in,
)

FAR = "10.77.0.2"


@pytest.fixture
def far_host(
    place: Place, two_hosts: tuple[list[str], list[str], str]
) -> Iterator[tuple[list[str], list[str]]]:
    """Run commands on each of two hosts; the second has an sshd."""
    sshd, client = shutil.which("sshd", path="/usr/sbin:/sbin"), shutil.which("ssh")
    if sshd is None or client is None:
        pytest.skip("needs sshd and ssh (Debian: openssh-server openssh-client)")
    first, second, _ = two_hosts
    keys = place.path / "keys"
    keys.mkdir(mode=0o700)
    for name in ("host", "own"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(make, check=True)
    place.write(
        "sshd_config",
        f"ListenAddress {FAR}\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/own.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile {keys}/pid\nPermitRootLogin yes\n",
    )
    options = "BatchMode=yes IdentitiesOnly=yes StrictHostKeyChecking=no LogLevel=ERROR"
    own = [f"-o {each}" for each in [*options.split(), "UserKnownHostsFile=/dev/null"]]
    there = place.write("ssh", f'#!/bin/sh\nexec {client} -i {keys}/own {" ".join(own)} "$@"\n')
    there.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([*second, sshd, "-D", "-f", str(place.path / "sshd_config")])
    try:
        yield first, second
    finally:
        daemon.terminate()
        daemon.wait(10)


def _hosts(place: Place, far: str) -> None:
    python = f"env PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1 {sys.executable} -m juggler"
    place.write(
        "hosts.toml",
        f'driver = "10.77.0.1:5005"\njuggler = "{python}"\n'
        f'directory = "{place.path}"\n[hosts."{FAR}"]\n{far}',
    )


def keys_left() -> set[Path]:
    """Keys of runs on this host, including killed runs."""
    return set(Path.home().joinpath(".juggler").glob("run-*/tls/key.pem"))


@pytest.mark.slow
def test_a_run_over_ssh_outlives_a_worker_and_a_cut_network_and_ends_with_ctrl_c(
    place: Place, far_host: tuple[list[str], list[str]]
) -> None:
    first, second = far_host
    before = keys_left()
    _hosts(place, "learners = 1\nenv_runners = 2\nevaluators = 1\n")
    run_dir = place.path / "run"
    command = ["launch", "ssh", "cartpole", "--hosts", "hosts.toml", "--run-dir", "run", "--"]
    options = ["--stop-return", "501", "--checkpoint-seconds", "2", "--progress", "plain"]
    options += ["--evaluation-seconds", "2"]
    path = f"{place.path}:/usr/sbin:/usr/bin:/bin"
    launch = place.start_program(
        [*first, sys.executable, "-m", "juggler", *command, *options], PATH=path
    )

    def all_there() -> bool:
        return env_runners(run_dir) == 2 and trained_steps(run_dir) > 0

    eventually(all_there, 90, lambda: launch.output)
    workers_in(place.path, "envrunner 1")[0].kill()
    launch.wait_for("envrunner 1 on 10.77.0.2 ended: ", 30)
    eventually(lambda: env_runners(run_dir) < 2, 30, lambda: launch.output)
    eventually(all_there, 60, lambda: launch.output)

    scaled = place.run("scale", "run", "--env-runners", "3")
    assert scaled.output == "envrunner: 3 instead of 2\n"
    eventually(lambda: env_runners(run_dir) == 3, 60, lambda: launch.output)
    assert place.run("scale", "run", "--env-runners", "2").status == 0
    eventually(lambda: env_runners(run_dir) == 2, 60, lambda: launch.output)

    ends = subprocess.run([*second, "ip", "-o", "link"], capture_output=True, text=True).stdout
    cable = next(name for name in ends.split() if name.startswith("ve")).partition("@")[0]
    subprocess.run([*second, "ip", "link", "set", cable, "down"], check=True)
    launch.wait_for("learner 0 on 10.77.0.2 ended: ", 60)
    subprocess.run([*second, "ip", "link", "set", cable, "up"], check=True)
    trains_on(run_dir, launch, 20_000)

    def solved() -> bool:
        return any((line["episode_return_mean"] or 0.0) >= 475.0 for line in metrics(run_dir))

    eventually(solved, 120, lambda: launch.output)
    assert place.run("scale", "run", "--evaluators", "2").status == 0
    eventually(lambda: len(workers_in(place.path, "evaluator")) == 2, 60, lambda: launch.output)
    eventually(lambda: list((run_dir / "best").glob("0*")), 60, lambda: launch.output)

    launch.interrupt()
    assert launch.wait(90) == 130, launch.output
    assert summary(run_dir)["reason_for_stop"] == "interrupted", launch.output
    assert_books_balance(run_dir)
    assert metrics(run_dir)[-1]["num_learners"] == 1
    assert keys_left() <= before
    eventually(lambda: not workers_in(place.path, ""), 60)
