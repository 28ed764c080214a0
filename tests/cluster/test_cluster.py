"""A run in containers, through scaling and faults.

The tests share a cluster. One of its run begins it if no test before has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest
from support.containers import Cluster, Engine, Swarm
from support.network import free_address
from support.place import (
    Place,
    assert_books_balance,
    checkpoints,
    env_runners,
    eventually,
    metrics,
    summary,
    trained_steps,
    trains_on,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def long_run(cluster: Cluster) -> Cluster:
    """A run, new or resumed, with a return out of reach."""
    cluster.configure(options="--stop-return 501")
    before = len(cluster.events())
    cluster.compose("up", "-d")
    if before:
        cluster.wait_for_event("resuming from update ", before)
    cluster.wait_for_workers(3)
    saved = partial(checkpoints, cluster.run_dir)
    cluster.wait_until(saved, "a checkpoint that a driver can go on from")
    return cluster


@pytest.fixture(scope="module")
def swarm(engine: Engine) -> Iterator[Swarm]:
    made = Swarm(engine)
    yield made
    made.close()


def test_a_cluster_trains_cartpole_to_solved_and_ends(cluster: Cluster) -> None:
    cluster.compose("up", "-d")
    cluster.wait_until(lambda: cluster.newest().get("updates"), "a first update")
    summary = cluster.run_dir / "summary.json"
    cluster.wait_until(summary.exists, "solved", 120)
    end = json.loads(summary.read_text())
    assert end["solved"], end
    assert end["env_steps_in_flight"] == 0
    lines = cluster.lines()
    assert {"learner-0", "learner-1"} == set(lines[-1]["learner_steps"])
    assert max(line["num_env_runners"] for line in lines) == 3
    everybody = [
        each
        for service, number in (("driver", 1), ("learner", 2), ("envrunner", 3))
        for each in cluster.ended(service, number)
    ]
    assert [cluster.inspect(each, ".State.ExitCode") for each in everybody] == ["0"] * 6
    assert [cluster.inspect(each, ".RestartCount") for each in everybody] == ["0"] * 6


@pytest.mark.long
def test_the_files_for_several_hosts_make_a_run_on_the_network_of_their_hosts(
    cluster: Cluster,
) -> None:
    port = free_address().rpartition(":")[2]
    cluster.configure(
        "jh",
        "--stop-return 501 --stop-steps 500000",  # EnvRunners dial every 2 s: both must come
        JUGGLER_PORT=port,
        JUGGLER_DRIVER=f"localhost:{port}",
        JUGGLER_HOST="localhost",
        JUGGLER_LEARNERS=1,
        JUGGLER_ENVRUNNERS=2,
    )
    roles = {"learner": 1, "envrunner": 2, "driver": 1}  # no worker may come after the run's end
    for role, number in roles.items():
        files = "-f", f"{role}.yaml"
        cluster.compose(*files, "up", "-d")
        if role != "driver":
            cluster.wait_until(
                lambda files=files, number=number: (  # type: ignore[misc]
                    cluster.compose(*files, "logs").count("dials the driver") == number
                ),
                f"each {role} looks for its driver",
            )
    for role, number in roles.items():
        for each in cluster.ended(role, number):
            assert cluster.inspect(each, ".State.ExitCode") == "0", role
    end = json.loads((cluster.run_dir / "summary.json").read_text())
    assert end["reason_for_stop"] == "stop_steps"
    assert len(end["devices"]) == 1
    cluster.compose(*(word for role in roles for word in ("-f", f"{role}.yaml")), "down", "-v")


@pytest.mark.long
def test_no_container_has_more_rights_than_it_needs(long_run: Cluster) -> None:
    for service in ("driver", "learner", "envrunner"):
        container = long_run.containers(service)[0]
        assert long_run.inspect(container, ".HostConfig.ReadonlyRootfs") == "true"
        assert long_run.inspect(container, ".HostConfig.CapDrop") == "[ALL]"
        status = long_run.docker("exec", container, "cat", "/proc/1/status")
        rights = dict(line.split(":\t", 1) for line in status.splitlines())
        assert rights["Uid"].split() == ["1000"] * 4
        assert int(rights["CapEff"], 16) == int(rights["CapBnd"], 16) == 0
        assert rights["NoNewPrivs"] == "1"


@pytest.mark.long
def test_a_killed_driver_goes_on_from_its_checkpoint_with_the_same_workers(
    long_run: Cluster,
) -> None:
    before = len(long_run.events())
    newest = long_run.newest()
    generation, here = newest["weights_version"][0], newest["num_env_runners"]
    long_run.kill(long_run.containers("driver")[0])
    long_run.wait_for_event("resuming from update ", before)
    long_run.wait_for_event("learner group ", before)
    long_run.wait_for_workers(here)
    long_run.wait_for_training()
    assert long_run.newest()["weights_version"][0] > generation


@pytest.mark.long
def test_a_cluster_that_is_stopped_ends_in_order_and_goes_on_when_it_is_started(
    long_run: Cluster,
) -> None:
    before = len(long_run.events())
    long_run.compose("stop")
    for service, number in (("driver", 1), ("learner", 2), ("envrunner", 2)):
        for each in long_run.ended(service, number):
            # The driver tells of the signal. A worker that it sent home was on its way out when
            # docker's came.
            allowed = ("143",) if service == "driver" else ("0", "143")
            assert long_run.inspect(each, ".State.ExitCode") in allowed, service
    end = json.loads((long_run.run_dir / "summary.json").read_text())
    assert end["reason_for_stop"] == "terminated"
    assert end["env_steps_in_flight"] == 0
    assert end["checkpoint"].endswith(f"{end['updates']:09d}"), "learners are stopped last"

    long_run.compose("up", "-d")
    long_run.wait_for_event(f"resuming from update {end['updates']}", before)
    long_run.wait_for_workers(3)
    long_run.wait_for_training()
    assert long_run.newest()["env_steps_trained"] > end["env_steps_trained"]


@pytest.mark.long
def test_a_stack_outlives_a_killed_task_and_a_drained_node(place: Place, swarm: Swarm) -> None:
    run_dir = place.path / "run"
    options = ["--", "--stop-return", "501", "--checkpoint-seconds", "1"]
    launch = swarm.launch(place, "cartpole", *options)

    def there(number: int) -> None:
        eventually(lambda: env_runners(run_dir) == number, 90, lambda: launch.output)

    there(2)
    trains_on(run_dir, launch)
    swarm.kill_one(run_dir, "envrunner")
    there(1)
    there(2)
    lost = metrics(run_dir)[-1]["env_steps_lost_unreported"]  # with the one that was killed
    for number in (4, 1):
        scaled = place.run("scale", "run", "--env-runners", number, **swarm.variables)
        assert scaled.status == 0, scaled.output
        there(number)
    events = (run_dir / "events.jsonl").read_text()
    assert events.count("left: terminated") == 3, "in order, each of them"
    assert metrics(run_dir)[-1]["env_steps_lost_unreported"] == lost

    swarm.make_node("drain")
    try:
        launch.wait_for("the driver: its task is pending (no suitable node", 90)
        # The next task waits as soon as the one before is told to end.
        ended = run_dir / "summary.json"
        eventually(ended.exists, 60, lambda: launch.output)
        trained = summary(run_dir)["env_steps_trained"]
    finally:
        swarm.make_node("active")
    eventually(lambda: trained_steps(run_dir) > trained + 20_000, 120, lambda: launch.output)

    launch.interrupt()
    assert launch.wait(120) == 130, launch.output
    assert "ending the run; another signal ends all processes at once" in launch.output
    assert summary(run_dir)["reason_for_stop"] == "terminated"
    assert_books_balance(run_dir)
    assert not swarm.left()
