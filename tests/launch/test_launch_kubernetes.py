"""`juggler launch kubernetes` with a scripted `kubectl`.

Only `kubectl kustomize` is the real one, in tests/cluster.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from juggler.cli import launch, scale
from juggler.launch import engine as following
from juggler.launch.engine import Launch

#: Takes the next of the states from a file whenever it is asked for the driver's Job and pods.
FAKE = """#!{python}
import json, os, pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
applied = here / "applied"
if words[0] == "config":
    print("lab", end="")
elif words[0] == "apply":
    made = pathlib.Path(words[2])
    assert sorted(each.name for each in (made / "tls").iterdir() if each.name != "hosts") == [
        "ca.pem", "cert.pem", "key.pem", "token"]
    if (here / "refuse").exists():
        sys.exit("error: quota exceeded")
    applied.touch()
elif words[0] == "delete":
    applied.unlink(missing_ok=True)
elif words[0] == "logs":
    print("a line of", words[-1])
elif words[0] == "get" and words[3] == "job,pod":
    states = json.loads((here / "states").read_text())
    state = states.pop(0) if len(states) > 1 else states[0]
    (here / "states").write_text(json.dumps(states))
    if state == "silence":
        sys.exit("Unable to connect to the server")
    if state == "ctrl-c":
        os.kill(os.getppid(), signal.SIGINT)
        state = states[0]
    print(json.dumps({{"items": state}}))
elif words[0] == "get":
    pods = [{{"kind": "Job", "metadata": {{"name": "it"}}}}] if applied.exists() else []
    print(json.dumps({{"items": pods}}))
"""


def _job(*conditions: str) -> dict[str, Any]:
    told = [{"type": each, "status": "True"} for each in conditions]
    return {"kind": "Job", "metadata": {"name": "driver"}, "status": {"conditions": told}}


def _pod(name: str, phase: str, exit_code: int | None = None, waits: str = "") -> dict[str, Any]:
    state: dict[str, Any] = {"running": {}}
    if exit_code is not None:
        state = {"terminated": {"exitCode": exit_code}}
    if waits:
        state = {"waiting": {"reason": "ImagePullBackOff", "message": waits}}
    status = {"phase": phase, "containerStatuses": [{"state": state}]}
    about = {"name": name, "creationTimestamp": f"2026-01-01T00:00:0{name[-1]}Z"}
    return {"kind": "Pod", "metadata": about, "status": status}


class Kubectl:
    """The directory of the fake, which is the working directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def answers(self, *states: object) -> None:
        (self.path / "states").write_text(json.dumps(states))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.path / "calls").read_text().splitlines()]

    @property
    def changes(self) -> list[str]:
        """What it was told to change, in order."""
        return [each[0] for each in self.calls if each[0] not in ("config", "get", "logs")]


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    program = tmp_path / "kubectl"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("_LOOK_SECONDS", "_ASK_SECONDS"):
        monkeypatch.setattr(following, name, 0.01)
    return Kubectl(tmp_path)


def _launched(*options: str) -> int:
    return launch.run(["kubernetes", "cartpole", "--run-dir", "run", *options])


@pytest.mark.slow
def test_a_run_that_reaches_its_goal_is_shown_and_taken_down(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = _pod("pod-1", "Pending", waits="no such image")
    again = [_job(), _pod("pod-1", "Failed", 137), _pod("pod-2", "Running")]
    kubectl.answers(
        [_job()],
        [_job(), waits],
        [_job(), _pod("pod-1", "Running")],
        "silence",
        again,
        [_job("Complete"), _pod("pod-1", "Failed", 137), _pod("pod-2", "Succeeded", 0)],
    )
    assert _launched("--env-runners", "3") == 0
    printed = capfd.readouterr()
    assert printed.out == "a line of pod-1\na line of pod-2\n"
    assert "the driver: its pod waits: ImagePullBackOff: no such image" in printed.err
    assert "Unable to connect to the server; the run continues" in printed.err
    assert kubectl.changes == ["apply", "delete"]
    (deleted,) = (each for each in kubectl.calls if each[0] == "delete")
    assert deleted[1:3] == ["-n", "lab"]
    assert deleted[4:6] == ["-l", f"juggler/run={Launch(kubectl.path / 'run', '').label}"]
    # All but the claim that keeps the run.
    kinds = {"job", "statefulset", "deployment", "service", "networkpolicy", "secret", "configmap"}
    kinds |= {"poddisruptionbudget", "horizontalpodautoscaler"}
    assert set(deleted[3].split(",")) == kinds


@pytest.mark.slow
@pytest.mark.parametrize(("exit_code", "status"), [(1, 1), (2, 2), (137, 1)])
def test_a_run_that_fails_has_the_exit_status_of_its_driver(
    kubectl: Kubectl, exit_code: int, status: int
) -> None:
    kubectl.answers([_job("Failed"), _pod("pod-1", "Failed", exit_code)])
    assert _launched() == status
    assert kubectl.changes == ["apply", "delete"]


@pytest.mark.slow
def test_ctrl_c_suspends_the_job_and_waits_for_its_pod(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [_job(), _pod("pod-1", "Running")]
    kubectl.answers(runs, "ctrl-c", runs, runs, [_job("Suspended"), _pod("pod-1", "Failed", 143)])
    assert _launched() == 130
    assert kubectl.changes == ["apply", "patch", "delete"]
    (patched,) = (each for each in kubectl.calls if each[0] == "patch")
    assert json.loads(patched[-1]) == {"spec": {"suspend": True}}
    assert "ending the run" in capfd.readouterr().err


@pytest.mark.slow
def test_a_driver_that_has_no_pod_for_a_while_is_told(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, runs = _pod("pod-1", "Failed", 137), _pod("pod-2", "Running")
    drained, over = [_job()], [_job("Complete"), _pod("pod-3", "Succeeded", 0)]
    kubectl.answers(drained, [_job(), ended], [_job(), ended, runs], drained, over)
    assert _launched() == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "the driver:" in line]
    again = "its Job starts another one, after 10 s to 10 min"
    assert told == [
        f"juggler launch: the driver: its pod ended with status 137: {again}",
        f"juggler launch: the driver: its pod was removed: {again}",
    ]


@pytest.mark.slow
def test_what_a_driver_has_printed_is_shown_once_though_the_pod_after_it_is_removed(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [_job(), _pod("pod-1", "Failed", 137)]
    over = [_job("Failed"), _pod("pod-1", "Failed", 137)]
    kubectl.answers(before, [*before, _pod("pod-2", "Running")], before, over)
    assert _launched() == 1
    assert capfd.readouterr().out == "a line of pod-1\na line of pod-2\n"


@pytest.mark.slow
def test_a_run_of_which_nobody_waits_for_the_end_is_scaled_and_not_launched_again(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _launched("--env-runners", "3", "--detach") == 0
    assert scale.run(["run", "--env-runners", "5"]) == 0
    label = Launch(kubectl.path / "run", "").label
    own = ["scale", "-n", "lab", f"deployment/{label}-envrunner", "--replicas=5"]
    assert kubectl.calls[-1] == own
    assert scale.run(["run", "--learners", "2"]) == 0
    own = ["scale", "-n", "lab", f"statefulset/{label}-learner", "--replicas=2"]
    assert kubectl.calls[-1] == own
    assert scale.run(["run", "--evaluators", "1"]) == 0
    own = ["scale", "-n", "lab", f"deployment/{label}-evaluator", "--replicas=1"]
    assert kubectl.calls[-1] == own
    assert _launched() == 1
    said = capfd.readouterr().err
    assert "is already in the cluster (job/it): end it with `kubectl -n lab delete" in said
    assert kubectl.changes == ["apply", "scale", "scale", "scale"]


@pytest.mark.slow
def test_what_the_cluster_refuses_is_told_and_leaves_nothing(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    (kubectl.path / "refuse").touch()
    assert _launched() == 1
    assert "quota exceeded" in capfd.readouterr().err
    assert kubectl.changes == ["apply", "delete"]


@pytest.mark.slow
def test_a_run_that_somebody_removes_is_told(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers([_job(), _pod("pod-1", "Running")], [])
    assert _launched() == 1
    assert "the driver's Job was removed" in capfd.readouterr().err
    assert kubectl.changes == ["apply", "delete"]


@pytest.mark.slow
def test_simulators_are_told_where_to_dial_and_the_certificate_has_that_name(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    kubectl.answers([_job("Complete"), _pod("pod-1", "Succeeded", 0)])
    assert _launched("--", "--gateway", "127.0.0.1:5005") == 0
    name = f"{Launch(kubectl.path / 'run', '').label}-gateway.lab.svc"
    assert f"simulators dial {name}:5009, with the cert" in capfd.readouterr().err
    assert name in (kubectl.path / "run.launch" / "tls" / "hosts").read_text().split()
    assert (kubectl.path / "run.launch" / "kubernetes" / "0-gateway" / "service.yaml").is_file()


@pytest.mark.parametrize("name", ["BAD_NS", "lab.one", "-lab", "lab-", "l" * 64])
def test_a_namespace_that_kubernetes_refuses_is_refused_before_anything_is_written(
    kubectl: Kubectl, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    assert _launched(f"--namespace={name}", "--dry-run") == 1
    said = capfd.readouterr()
    assert f"--namespace {name}: Kubernetes accepts at most 63 of a-z, 0-9" in said.err
    assert said.out == ""
    assert not (kubectl.path / "calls").exists()
