"""A run on Kubernetes: a Job, a StatefulSet of learners, and Deployments."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from juggler.launch.engine import (
    FILES,
    LABEL,
    SIGNALLED,
    DriverState,
    EngineRun,
    Launch,
    LaunchError,
    NoAnswer,
    Report,
    Tail,
    ask,
    wait_until_removed,
)
from juggler.learner.process.learner_program import LEARNER
from juggler.runtime.near_matches import one_of

COMPONENTS = ("autoscale", "gpu")  # components that change the manifests, by name
_GATEWAY, _GATEWAY_PORT = "gateway", 5009  # the component, and the port of its service
_MANIFESTS = Path(str(resources.files("juggler.launch"))) / "manifests" / "kubernetes"
_KINDS = (
    "job,statefulset,deployment,service,networkpolicy,poddisruptionbudget,"
    "horizontalpodautoscaler,secret,configmap"
)
_SERVED = ["--metrics-bind=0.0.0.0:9090", "--insecure", "--health-bind=0.0.0.0:5007"]
_ask = partial(ask, advice="install it, and have it find your cluster")


class KubernetesRun(EngineRun):
    """Applies the manifests of a run, and follows it.

    The run directory is in a volume claim of the cluster, which is kept after the run.

    Raises:
        LaunchError: a number is out of range, the namespace is not a valid name, or a component is
            unknown.
    """

    def __init__(
        self,
        launch: Launch,
        numbers: Mapping[str, int],
        report: Report,
        image: str,
        namespace: str = "",
        components: Sequence[str] = (),
    ) -> None:
        super().__init__(launch, numbers, report)
        if namespace and not LABEL.fullmatch(namespace):
            raise LaunchError(
                f"--namespace {namespace}: Kubernetes accepts at most 63 of a-z, 0-9 and -, "
                "which begin and end with a letter or a digit"
            )
        self._image = image
        self._components = [_component(name) for name in components]
        if launch.gateway:
            self._components.insert(0, _MANIFESTS / _GATEWAY)
        if launch.of_learners:
            self._components.insert(0, _MANIFESTS / "plain-gradients")
        self._namespace = namespace or _own_namespace()
        self._label = f"juggler/run={launch.label}"
        self._shown: list[str] = []  # the pods whose output was or is shown, in order

    def plan(self) -> str:
        """Return the manifests; the Secret is still empty."""
        with tempfile.TemporaryDirectory() as directory:
            tls = Path(directory, "tls")
            tls.mkdir()
            for name in FILES:
                (tls / name).write_text("made when the run is launched\n")
            return _ask("kubectl", "kustomize", str(self._write(Path(directory))))

    def submit(self) -> None:
        if there := self._there():
            raise LaunchError(
                f"{self._launch.run_dir} is already in the cluster ({', '.join(there)}): end it "
                f"with `kubectl -n {self._namespace} delete {_KINDS} -l {self._label}`"
            )
        # Each learner has its own name below that of its service.
        services = [("", "driver"), ("*.", LEARNER)]
        services += [("", _GATEWAY)] if self._launch.gateway else []
        names = [f"{pod}{self._launch.name(of)}.{self._namespace}.svc" for pod, of in services]
        with self.submitting(names, f"kubernetes {self._namespace}"):
            written = self._write(self._launch.directory)
            _ask("kubectl", "apply", "-k", str(written))
        self._report(
            f"applied the manifests in {written}: `kubectl -n {self._namespace} get pods "
            f"-l {self._label}` shows the pods. The run is kept in the claim "
            f"{self._launch.name('runs')}"
        )
        # Simulators are not submitted, so the user needs their address.
        if self._launch.gateway:
            self._report(
                f"simulators dial {names[-1]}:{_GATEWAY_PORT}, with the certificates and the token "
                f"in {self._launch.tls}"
            )

    def driver_state(self, ending: bool) -> DriverState:
        found = self._get("job,pod", f"{self._label},role=driver")
        jobs = [each for each in found if each["kind"] == "Job"]
        if not jobs:
            raise LaunchError("the driver's Job was removed")
        pods = [each for each in found if each["kind"] == "Pod"]
        pods.sort(key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
        self._show(pods)
        # A suspended Job deletes its pods, and is neither complete nor failed.
        if ending and all(_ended(pod) for pod in pods):
            return DriverState(status=-1)
        for condition in jobs[0].get("status", {}).get("conditions", []):
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                statuses = [_exit_status(pod) for pod in pods]
                own = [each for each in statuses if 0 < each < SIGNALLED]
                status = 0 if condition["type"] == "Complete" else (own or [1])[-1]
                return DriverState(status=status)
        # Its Job replaces a pod that a drained node or a full disk took.
        newest = pods[-1] if pods else None
        if newest is None or _ended(newest):
            how = f"ended with status {_exit_status(newest)}" if newest else "was removed"
            why = f"its pod {how}: its Job starts another one, after 10 s to 10 min"
            return DriverState(why if self._shown else "")
        running = newest["status"].get("phase") == "Running"
        return DriverState(running=True) if running else DriverState(_why_waiting(newest))

    def end(self) -> None:
        """Suspend the Job, which ends its pod and starts no other."""
        suspended = json.dumps({"spec": {"suspend": True}})
        job = f"job/{self._launch.name('driver')}"
        _ask("kubectl", "patch", "-n", self._namespace, job, "--type=merge", "-p", suspended)

    def tear_down(self) -> None:
        """End all processes, and remove the run, but keep its claim."""
        self.stop_showing()
        own = ["-n", self._namespace, _KINDS, "-l", self._label]
        _ask("kubectl", "delete", *own, "--wait=false", "--ignore-not-found")
        wait_until_removed(self._there, f"`kubectl -n {self._namespace} get pods -l {self._label}`")

    def _write(self, directory: Path) -> Path:
        """Write the input of kustomize, and return its directory."""
        made = directory / "kubernetes"
        if made.exists():
            shutil.rmtree(made)
        shutil.copytree(_MANIFESTS / "base", made / "base")
        shutil.copytree(directory / "tls", made / "tls")
        parts = [f"{number}-{path.name}" for number, path in enumerate(self._components)]
        for part, path in zip(parts, self._components, strict=True):
            shutil.copytree(path, made / part)
        (made / "run.toml").write_text(self._launch.config_there())
        learners = self._numbers[LEARNER]
        driver = self._launch.driver_there("/runs/run", "/config/run.toml", learners, *_SERVED)
        replicas = [{"name": role, "count": count} for role, count in self._numbers.items()]
        # JSON is YAML.
        values = {
            "namespace": self._namespace,
            "components": parts,
            "image": _image(self._image),
            "replicas": replicas,
            "files": [f"tls/{name}" for name in FILES],
            "driver": driver,
        }
        filled = {name: json.dumps(value) for name, value in values.items()}
        filled["label"] = self._launch.label  # a part of names
        text = Template((_MANIFESTS / "run.yaml").read_text()).substitute(filled)
        (made / "kustomization.yaml").write_text(text)
        return made

    def _get(self, kinds: str, label: str) -> list[dict[str, Any]]:
        output = _ask("kubectl", "get", "-n", self._namespace, kinds, "-l", label, "-o", "json")
        return list(json.loads(output)["items"])

    def _there(self) -> list[str]:
        """List the run's objects in the cluster, except its claim."""
        found = self._get(f"pod,{_KINDS}", self._label)
        return [f"{each['kind'].lower()}/{each['metadata']['name']}" for each in found]

    def _show(self, pods: Sequence[dict[str, Any]]) -> None:
        """Show the output of the newest pod, once it has any."""
        begun = [pod for pod in pods if pod["status"].get("phase") not in (None, "Pending")]
        if not begun:
            return
        name = str(begun[-1]["metadata"]["name"])
        if name in self._shown[:-1]:
            return  # the pod after it was removed
        # The connection to a pod's output may break; what was shown is not shown again.
        again, shows = name in self._shown, self._tail is not None and not self._tail.ended
        if again and (shows or _ended(begun[-1])):
            return
        if self._tail is not None:
            self._tail.close()
        if not again:
            self._shown.append(name)
        more = ["--tail=0"] if again else []
        self._tail = Tail("kubectl", "logs", "-n", self._namespace, "--follow", *more, name)


def _image(image: str) -> dict[str, str]:
    """Return an image in kustomize's form."""
    name, at, digest = image.partition("@")
    if at:
        return {"name": "juggler", "newName": name, "digest": digest}
    name, _, tag = image.rpartition(":")
    if not name or "/" in tag:  # a port of the registry, or no tag
        name, tag = image, "latest"
    return {"name": "juggler", "newName": name, "newTag": tag}


def _component(name: str) -> Path:
    path = _MANIFESTS / name if name in COMPONENTS else Path(name)
    if not (path / "kustomization.yaml").is_file():
        raise LaunchError(
            f"--component {name}: give {one_of(COMPONENTS)}, or a directory with a "
            "kustomization.yaml of the kind Component"
        )
    return path


def _own_namespace() -> str:
    """Return kubectl's default namespace."""
    try:
        own = _ask("kubectl", "config", "view", "--minify", "-o", "jsonpath={..namespace}")
    except NoAnswer:  # no cluster is configured
        return "default"
    return own.strip() or "default"


def _ended(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _exit_status(pod: dict[str, Any]) -> int:
    """Return the exit status of a pod; 0 without one."""
    for each in pod["status"].get("containerStatuses", []):
        if ended := each.get("state", {}).get("terminated"):
            return int(ended.get("exitCode", 0))
    return 0


def _why_waiting(pod: dict[str, Any]) -> str:
    """Describe why a pod does not run; "": unknown."""
    states = [each.get("state", {}) for each in pod["status"].get("containerStatuses", [])]
    waiting = [state["waiting"] for state in states if "waiting" in state]
    waiting += [each for each in pod["status"].get("conditions", []) if each["status"] == "False"]
    for each in waiting:
        reason = each.get("reason", "")
        if each.get("message") and reason not in ("ContainersNotReady", "PodCompleted"):
            return f"its pod waits: {reason}: {each['message']}"
    return ""
