"""A run in containers: a driver, two learners, EnvRunners that come and go, and what befalls them.

The tests share a cluster. One of its run begins it if no test before has. `-s` shows how long
everything took.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest
from support.cluster import LEAGUE, Cluster, all_are_copied, players
from support.engine import IMAGE, Engine
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
)
from support.swarm import Swarm

from juggler.driver.record.run_directory import to_toml
from juggler.driver.shipped import read_shipped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def long_run(cluster: Cluster) -> Cluster:
    """The same run, or a new one, on its way to a return that nobody reaches."""
    cluster.configure(options="--stop-return 501")
    before = len(cluster.events())
    cluster.compose("up", "-d")
    if before:
        cluster.wait_for_event("going on from update ", before)
    cluster.wait_for_workers(3)
    saved = partial(checkpoints, cluster.run_dir)
    cluster.wait_until(saved, "a checkpoint that a driver can go on from")
    return cluster


def _told(cluster: Cluster, *texts: str) -> None:
    """`juggler status` says so."""
    log_messages = [each["text"] for each in cluster.status()["log_messages"]]
    for text in texts:
        assert any(text in each for each in log_messages), (text, log_messages)


@pytest.fixture(scope="module")
def swarm(engine: Engine) -> Iterator[Swarm]:
    made = Swarm(engine)
    yield made
    made.close()


def _figure(what: str, seconds: float) -> None:
    print(f"\n{what}: {seconds:.1f} s")


def test_a_cluster_trains_cartpole_to_solved_and_ends(cluster: Cluster) -> None:
    _figure("image, MB", int(cluster.docker("inspect", "--format", "{{.Size}}", IMAGE)) / 1e6)
    begun = time.monotonic()
    cluster.compose("up", "-d")
    cluster.wait_until(lambda: cluster.newest().get("updates"), "a first update")
    _figure("up to first update", time.monotonic() - begun)
    summary = cluster.run_dir / "summary.json"
    cluster.wait_until(summary.exists, "solved", 120)
    _figure("up to solved", time.monotonic() - begun)
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
def test_containers_of_the_host_share_memory(cluster: Cluster) -> None:
    # Batches of CartPole that are large enough.
    large = "--stop-return 501 --envs-per-runner 256 --fragment-steps 64 --batch-size 32768"
    numbers = {"JUGGLER_LEARNERS": 1, "JUGGLER_ENVRUNNERS": 2}
    cluster.configure(options=large, JUGGLER_NAME="shares", **numbers)
    try:
        cluster.compose("up", "-d")
        workers = [*cluster.containers("learner"), *cluster.containers("envrunner")]

        def shared(container: str) -> set[str]:
            """The memories that it has mapped, by their inodes."""
            look = "cat /proc/[0-9]*/maps | grep memfd:juggler || true"
            lines = cluster.docker("exec", container, "sh", "-c", look).splitlines()
            return {line.split()[4] for line in lines}

        def all_share() -> bool:
            learner, *runners = map(shared, workers)
            return all(learner & each for each in runners)

        cluster.wait_until(all_share, "each EnvRunner shares memory with the learner")
        cluster.wait_until(lambda: cluster.lines()[-1]["updates"] > 5, "it trains")
        assert not any("shared memory" in each for each in cluster.events())
        assert not any("shares no memory" in each for each in cluster.events())
    finally:
        cluster.compose("down", "--timeout", "1")
        cluster.configure()


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
    roles = {"learner": 1, "envrunner": 2, "driver": 1}  # nobody may come when the run is over
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
def test_a_killed_envrunner_is_started_again_and_the_run_goes_on(long_run: Cluster) -> None:
    before, victim = len(long_run.events()), long_run.containers("envrunner")[1]
    worker = long_run.worker(victim)
    begun = time.monotonic()
    long_run.kill(victim)
    long_run.wait_for_event(f"{worker} left: ", before)
    long_run.wait_for_training()
    long_run.wait_for_workers(3)
    _figure("killed EnvRunner: three again after", time.monotonic() - begun)
    _told(long_run, f"{worker} left: the connection ended without a farewell")
    assert long_run.inspect(victim, ".RestartCount") == "1"


@pytest.mark.long
def test_a_killed_learner_leaves_the_other_one_training_and_joins_it_again(
    long_run: Cluster,
) -> None:
    before, victim = len(long_run.events()), long_run.containers("learner")[0]
    worker = long_run.worker(victim)
    begun = time.monotonic()
    long_run.kill(victim)
    long_run.wait_for_event("learner group ", before)
    _figure("killed learner: the other one alone after", time.monotonic() - begun)
    long_run.wait_for_training()
    long_run.wait_for_workers(3)
    _figure("killed learner: both after", time.monotonic() - begun)
    _told(long_run, f"{worker} left: ", "learner group ")
    assert long_run.newest()["env_steps_dropped"]["learner_lost"] > 0


@pytest.mark.long
def test_a_paused_learner_is_left_behind_and_comes_back(long_run: Cluster) -> None:
    before, victim = len(long_run.events()), long_run.containers("learner")[1]
    worker = long_run.worker(victim)
    begun = time.monotonic()
    long_run.pause(victim)
    try:
        long_run.wait_for_event(f"{worker} left: no heartbeat", before)
        long_run.wait_for_event("learner group ", before)
        _figure("paused learner: the other one alone after", time.monotonic() - begun)
        long_run.wait_for_training()
    finally:
        long_run.docker("unpause", victim)
    begun = time.monotonic()
    long_run.wait_for_workers(3)
    _figure("unpaused learner: both after", time.monotonic() - begun)
    long_run.wait_for_training()
    _told(long_run, f"{worker} left: no heartbeat")


@pytest.mark.long
def test_hosts_that_are_cut_off_for_20_s_are_done_without_and_come_back(
    long_run: Cluster,
) -> None:
    before = len(long_run.events())
    victims = [long_run.containers(service)[0] for service in ("learner", "envrunner")]
    learner, runner = (long_run.worker(each) for each in victims)
    begun = time.monotonic()
    for each in victims:
        long_run.cut_off(each, "--append")
    try:
        long_run.wait_for_event(f"{learner} left: ", before)
        long_run.wait_for_event(f"{runner} left: ", before)
        _figure("cut-off hosts: both given up after", time.monotonic() - begun)
        long_run.wait_for_training()
        time.sleep(max(0.0, 20 - (time.monotonic() - begun)))
    finally:
        for each in victims:
            long_run.cut_off(each, "--delete")
    begun = time.monotonic()
    long_run.wait_for_workers(3)
    _figure("healed network: all there after", time.monotonic() - begun)
    long_run.wait_for_training()
    _told(long_run, f"{learner} left: ", f"{runner} left: ")


@pytest.mark.long
def test_envrunners_are_scaled_up_and_down_while_the_run_goes_on(long_run: Cluster) -> None:
    def scale(number: int) -> float:
        begun = time.monotonic()
        long_run.compose("up", "-d", "--no-recreate", "--scale", f"envrunner={number}")
        long_run.wait_for_workers(number)
        long_run.wait_for_training()
        return time.monotonic() - begun

    before = len(long_run.events())
    _figure("3 to 5 EnvRunners", scale(5))
    _figure("5 to 2 EnvRunners", scale(2))
    left = [each for each in long_run.events()[before:] if each.endswith("left: terminated")]
    assert len(left) == 3, "in order, each of them"
    _told(long_run, *left)
    states = [each["state"] for each in long_run.status()["workers"] if each["role"] == "envrunner"]
    assert sorted(states) == ["left"] * 3 + ["ready"] * 2


@pytest.mark.long
def test_a_killed_driver_goes_on_from_its_checkpoint_with_the_same_workers(
    long_run: Cluster,
) -> None:
    before = len(long_run.events())
    newest = long_run.newest()
    generation, here = newest["weights_version"][0], newest["num_env_runners"]
    begun = time.monotonic()
    long_run.kill(long_run.containers("driver")[0])
    long_run.wait_for_event("going on from update ", before)
    _figure("killed driver: goes on after", time.monotonic() - begun)
    long_run.wait_for_event("learner group ", before)
    long_run.wait_for_workers(here)
    _figure("killed driver: all there after", time.monotonic() - begun)
    long_run.wait_for_training()
    assert long_run.newest()["weights_version"][0] > generation
    _told(long_run, "going on from update ")


@pytest.mark.long
def test_a_cluster_that_is_stopped_ends_in_order_and_goes_on_when_it_is_started(
    long_run: Cluster,
) -> None:
    before = len(long_run.events())
    begun = time.monotonic()
    long_run.compose("stop")
    _figure("all stopped, with a checkpoint, after", time.monotonic() - begun)
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

    begun = time.monotonic()
    long_run.compose("up", "-d")
    long_run.wait_for_event(f"going on from update {end['updates']}", before)
    long_run.wait_for_workers(3)
    _figure("all started: all there after", time.monotonic() - begun)
    long_run.wait_for_training()
    assert long_run.newest()["env_steps_trained"] > end["env_steps_trained"]


@pytest.mark.long
@pytest.mark.timeout(1800)  # it may be alone, and then builds the image
def test_a_league_outlives_a_killed_learner_and_a_host_that_is_paused(cluster: Cluster) -> None:
    cluster.compose("down", "--timeout", "30")
    cluster.configure("jl", JUGGLER_RUN=LEAGUE)
    begun = time.monotonic()
    cluster.compose("up", "-d")
    cluster.wait_until(lambda: len(players(cluster)) == 4, "four players learn")
    cluster.wait_for_workers(3)
    _figure("league: all four players after", time.monotonic() - begun)
    _figure("league: every player is trained and copied within", all_are_copied(cluster))

    before, victim = len(cluster.events()), cluster.containers("learner")[0]
    worker = cluster.worker(victim)
    begun = time.monotonic()
    cluster.kill(victim)
    cluster.wait_for_event(f"{worker} left: ", before)
    _figure("league: killed learner missed after", time.monotonic() - begun)
    cluster.wait_for_workers(3)
    _figure("league: killed learner back after", time.monotonic() - begun)
    _figure("league: every player is trained and copied within", all_are_copied(cluster))

    host = cluster.containers("learner")[1], cluster.containers("envrunner")[2]
    workers = [cluster.worker(each) for each in host]
    before, begun = len(cluster.events()), time.monotonic()
    for each in host:
        cluster.pause(each)
    try:
        for worker in workers:
            cluster.wait_for_event(f"{worker} left: no heartbeat", before)
        _figure("league: paused host missed after", time.monotonic() - begun)
        reached = cluster.newest()["env_steps_trained"]
        cluster.wait_until(
            lambda: cluster.newest()["env_steps_trained"] > reached, "the other learner goes on"
        )
    finally:
        for each in host:
            cluster.docker("unpause", each)
    begun = time.monotonic()
    cluster.wait_for_workers(3)
    _figure("league: paused host back after", time.monotonic() - begun)
    _figure("league: every player is trained and copied within", all_are_copied(cluster))
    assert not [each for each in cluster.events() if "cannot" in each]
    cluster.compose("stop")
    end = json.loads((cluster.run_dir / "summary.json").read_text())
    assert (end["reason_for_stop"], end["env_steps_in_flight"]) == ("terminated", 0)


@pytest.mark.long
def test_a_stack_on_a_swarm_is_solved_and_leaves_nothing(
    place: Place, cluster: Cluster, swarm: Swarm
) -> None:
    cluster.close()  # two cores
    text = to_toml(read_shipped("cartpole").config.flat()).decode()
    place.write("mine.toml", text)
    launch = swarm.launch(place, "mine.toml", "--learners", "2")
    assert launch.wait(180) == 0, launch.output
    assert "solved: return" in launch.output
    assert_books_balance(place.path / "run")
    assert set(metrics(place.path / "run")[-1]["learner_steps"]) == {"learner-0", "learner-1"}
    assert not swarm.left()


@pytest.mark.long
def test_a_stack_outlives_a_killed_task_and_a_drained_node(place: Place, swarm: Swarm) -> None:
    run_dir = place.path / "run"
    options = ["--", "--stop-return", "501", "--checkpoint-seconds", "1"]
    launch = swarm.launch(place, "cartpole", *options)

    def there(number: int) -> None:
        eventually(lambda: env_runners(run_dir) == number, 90, lambda: launch.output)

    there(2)
    eventually(lambda: trained_steps(run_dir) > 0, 60, lambda: launch.output)
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
    assert "ending the run; once more ends all processes at once" in launch.output
    assert summary(run_dir)["reason_for_stop"] == "terminated"
    assert_books_balance(run_dir)
    assert not swarm.left()


@pytest.mark.long
def test_a_stack_whose_driver_fails_says_why(place: Place, swarm: Swarm) -> None:
    (place.path / "run").mkdir()
    place.write("run/something", "")
    launch = swarm.launch(place, "cartpole")
    assert launch.wait(120) == 1, launch.output
    assert "is not empty" in launch.output
    assert not swarm.left()
