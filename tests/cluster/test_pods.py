"""`juggler launch kubernetes` on a real cluster: see `support.pods`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.place import Command, Place, assert_books_balance, eventually, metrics, summary

#: The cluster: a file as kubectl takes it.
CLUSTER = "JUGGLER_TEST_KUBECONFIG"
#: What pods run: the image of docker/Dockerfile, with a tag, where the nodes find it.
IMAGE = "JUGGLER_TEST_IMAGE"
#: A part of the manifests: these runs are small, and so may their cluster be.
_SMALL = """\
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
patches:
  - target: {kind: (Job|StatefulSet|Deployment)}
    patch: |-
      - op: replace
        path: /spec/template/spec/containers/0/resources/requests
        value: {cpu: 100m, memory: 256Mi}
"""


def missing() -> str:
    """Why there is no cluster to test on; "": there is one."""
    lacking = [name for name in (CLUSTER, IMAGE) if not os.environ.get(name)]
    if lacking:
        return f"needs a cluster of Kubernetes: set {' and '.join(lacking)} (see CONTRIBUTING.md)"
    return "" if shutil.which("kubectl") else "needs kubectl"


class Pods:
    """A namespace that lets in nothing but pods without rights.

    Attributes:
        namespace: its name.
        variables: with which commands find the cluster.
    """

    def __init__(self) -> None:
        self.namespace = f"juggler-test-{uuid.uuid4().hex[:8]}"
        self.variables = {"KUBECONFIG": os.environ[CLUSTER]}
        label = "pod-security.kubernetes.io/enforce=restricted"
        self._kubectl("create", "namespace", self.namespace)
        self._kubectl("label", "namespace", self.namespace, label)

    def launch(self, place: Place, *options: str) -> Command:
        """Launch CartPole in the directory `run`: two learners and two EnvRunners."""
        small = place.path / "small"
        small.mkdir(exist_ok=True)
        (small / "kustomization.yaml").write_text(_SMALL)
        own = ["--run-dir", "run", "--namespace", self.namespace, "--component", "small"]
        numbers = ["--image", os.environ[IMAGE], "--learners", "2", "--env-runners", "2"]
        words = ["launch", "kubernetes", "cartpole", *own, *numbers, *options]
        return place.start(*words, **self.variables)

    def ask(self, *words: str, given: str = "", refused: str = "") -> str:
        """What kubectl says of this namespace.

        Args:
            words: of its command.
            given: its standard input.
            refused: what it is to say as it fails; "": it is not to fail.
        """
        return self._kubectl("-n", self.namespace, *words, given=given, refused=refused)

    def found(self, kinds: str, label: str = "") -> list[dict[str, Any]]:
        """What there is and is not being removed."""
        chosen = ["-l", label] if label else []
        items = json.loads(self.ask("get", kinds, *chosen, "-o", "json"))["items"]
        return [each for each in items if "deletionTimestamp" not in each["metadata"]]

    def ready(self, role: str) -> dict[str, str]:
        """The container in each pod that answers its probes, by name."""
        return {
            each["metadata"]["name"]: each["status"]["containerStatuses"][0]["containerID"]
            for each in self.found("pods", f"role={role}")
            for condition in each["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        }

    def wait_for(self, run: Command, what: Callable[[], Any], seconds: float = 120) -> Any:
        """Wait for a result of `what`, while the command follows the run."""

        def looked() -> Any:
            assert run.status is None, run.output
            return what()

        return eventually(looked, seconds, lambda: f"{run.output}\n{self._told()}")

    def wait_for_ready(self, run: Command, **numbers: int) -> None:
        for role, number in numbers.items():
            self.wait_for(run, lambda r=role, n=number: len(self.ready(r)) == n)  # type: ignore[misc]

    def status(self) -> dict[str, Any]:
        """What `juggler status` says in the driver's pod."""
        (driver,) = self.ready("driver")
        words = ["juggler", "status", "/runs/run", "--once", "--json"]
        told: dict[str, Any] = json.loads(self.ask("exec", driver, "--", *words))
        return told

    def kill(self, pod: str) -> None:
        """SIGKILL to all that runs in it, from inside."""
        self.ask("exec", pod, "--", "sh", "-c", "kill -9 -1")

    def evict(self, pod: str, refused: str = "") -> None:
        """Ask for what a drained node asks for."""
        about = {"name": pod, "namespace": self.namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        given = json.dumps(eviction)
        self.ask("create", "--raw", path, "-f", "-", given=given, refused=refused)

    def may_be_evicted(self, role: str) -> int:
        """Number of pods of this role that a drained node may evict."""
        budgets = {
            each["metadata"]["name"].rpartition("-")[2]: each["status"]
            for each in self.found("poddisruptionbudget")
        }
        return int(budgets[role].get("disruptionsAllowed", 0))

    def copy_run(self, to: Path) -> None:
        """Copy the run out of its claim, after everything else is gone."""
        (claim,) = self.found("persistentvolumeclaim")
        spec = {
            "securityContext": {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 1000}
            | {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "reader",
                    "image": os.environ[IMAGE],
                    "command": ["sleep", "600"],
                    "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
            ],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": spec}
        self.ask("apply", "-f", "-", given=json.dumps(pod))
        self.ask("wait", "--for=condition=Ready", "pod/reader", "--timeout=120s")
        to.mkdir()
        for name in ("summary.json", "metrics.jsonl", "events.jsonl"):
            (to / name).write_text(self.ask("exec", "reader", "--", "cat", f"/runs/run/{name}"))
        self.ask("delete", "pod", "reader", "--grace-period=0", "--force")

    def close(self) -> None:
        """Remove the namespace, and all that is in it."""
        self._kubectl("delete", "namespace", self.namespace, "--timeout=180s", seconds=200)

    def _told(self) -> str:
        return self.ask("get", "all,events")

    def _kubectl(
        self, *words: str, given: str = "", refused: str = "", seconds: float = 150
    ) -> str:
        done = subprocess.run(
            ["kubectl", *words],
            input=given,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if refused:
            assert done.returncode, words
            assert refused in done.stderr, (words, done.stderr)
        else:
            assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout


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
        return int(pods.status()["metrics"]["env_steps_trained"])

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
    assert "resuming from update" in launch.output
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
    assert "ending the run; another signal ends all processes at once" in launch.output
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
