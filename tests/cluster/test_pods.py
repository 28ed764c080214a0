"""`juggler launch kubernetes` on a real cluster, which environment variables name: see
`support.pods`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.place import Place, assert_books_balance, metrics, summary
from support.pods import Pods, missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
_KEPT = {"PersistentVolumeClaim"}


@pytest.fixture
def pods() -> Iterator[Pods]:
    if why := missing():
        pytest.skip(why)
    made = Pods()
    yield made
    made.close()


def _left(pods: Pods) -> set[str]:
    """Kinds of all that there is of runs."""
    kinds = "pod,job,statefulset,deployment,service,networkpolicy,poddisruptionbudget"
    kinds += ",horizontalpodautoscaler,secret,configmap,persistentvolumeclaim"
    return {each["kind"] for each in pods.found(kinds, "juggler/run")}


def test_a_run_in_pods_outlives_what_befalls_it_and_goes_on_to_its_goal(
    place: Place, pods: Pods
) -> None:
    launch = pods.launch(place, "--", "--stop-return", "501", "--checkpoint-seconds", "1")

    def trained() -> int:
        return int(pods.status()["steps"]["trained"])

    def goes_on() -> None:
        goal = trained() + 10_000
        pods.wait_for(launch, lambda: trained() > goal)

    def killed(role: str) -> None:
        number = len(pods.ready(role))
        victim, container = next(iter(pods.ready(role).items()))
        pods.kill(victim)
        pods.wait_for(launch, lambda: container not in pods.ready(role).values())
        pods.wait_for_ready(launch, **{role: number})

    pods.wait_for_ready(launch, driver=1, learner=2, envrunner=2)
    goes_on()
    for role in ("envrunner", "learner"):
        killed(role)
        goes_on()
    killed("driver")
    assert "going on from update" in launch.output
    pods.wait_for_ready(launch, learner=2, envrunner=2)
    goes_on()
    for number in (4, 2):
        scaled = place.run("scale", "run", "--env-runners", number, **pods.variables)
        assert scaled.status == 0, scaled.output
        pods.wait_for_ready(launch, envrunner=number)
    goes_on()
    pods.wait_for(launch, lambda: pods.may_be_evicted("envrunner") == 1)
    first, second = pods.ready("envrunner")
    pods.evict(first)
    pods.evict(second, refused="disruption budget")
    pods.wait_for(launch, lambda: first not in pods.ready("envrunner"))
    pods.wait_for_ready(launch, envrunner=2)
    launch.interrupt()
    assert launch.wait(120) == 130, launch.output
    assert "ending the run; once more ends all processes at once" in launch.output
    assert _left(pods) == _KEPT

    again = pods.launch(place, "--", "--stop-return", "475")
    assert again.wait(600) == 0, again.output
    assert "solved: return" in again.output
    assert _left(pods) == _KEPT
    run_dir = place.path / "copy"
    pods.copy_run(run_dir)
    assert summary(run_dir)["solved"]
    assert_books_balance(run_dir)
    trained_by = {name for line in metrics(run_dir) for name in line["learner_steps"]}
    assert trained_by == {"learner-0", "learner-1"}
