"""Files under docker/ that no engine reads here, checked by schemas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.place import options_of

from juggler.cli import driver, launch
from juggler.cli.arguments import parse
from juggler.driver.monitoring import plain_status
from juggler.driver.reporting.prometheus import families
from juggler.launch.engine import Launch
from juggler.runtime.wire.v1 import status_pb2

DOCKER = Path(__file__).resolve().parents[2] / "docker"
MANIFESTS = DOCKER / "kubernetes"
BASE = MANIFESTS / "base"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
ROLES = ("driver", "learner", "envrunner", "evaluator")


def _resources() -> list[dict[str, Any]]:
    named = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {*named, "kustomization.yaml"} == {each.name for each in BASE.iterdir()}
    files = [*(BASE / name for name in named), MANIFESTS / "namespace.yaml"]
    found = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    return [item for each in found for item in each.get("items", [each])]


def _kustomized(directory: Path) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def _pods() -> dict[str, dict[str, Any]]:
    """Pods' specs by role."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in _resources()
        if "template" in each.get("spec", {})
    }


def _known(resources: list[dict[str, Any]]) -> None:
    """Kubernetes knows every field."""
    for each in resources:
        for version in ("1.28", "1.33"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kubernetes_validate.validate(each, version, strict=True)


def test_kubernetes_knows_every_field() -> None:
    _known(_resources())


@pytest.mark.long
@needs_kubectl
def test_a_run_in_a_namespace_of_its_own_is_the_base_in_it() -> None:
    made = _kustomized(MANIFESTS)
    _known(made)
    assert {each["metadata"].get("namespace", "juggler") for each in made} == {"juggler"}
    kinds = Counter(each["kind"] for each in _resources())
    assert Counter(each["kind"] for each in made) == kinds + Counter(["ConfigMap"])


@pytest.mark.long
@needs_kubectl
def test_a_launch_has_names_of_its_own_and_the_parts_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    (tmp_path / "mine.toml").write_text('env = "CartPole-v1"\n')
    numbers = ["--env-runners", "7", "--learners", "2", "--evaluators", "3", "--plain-gradients"]
    more = ["--image", "lab:5000/juggler", "--component", "gpu", "--component", "autoscale"]
    own = ["--run-dir", "a run", "--namespace", "lab", "--dry-run", "--", "--lr", "1e-3"]
    assert launch.run(["kubernetes", "mine.toml", *numbers, *more, *own]) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]
    _known(made)
    label = Launch(tmp_path / "a run", "").label
    by_kind = {each["kind"]: each for each in made}
    replicas = {
        each["metadata"]["name"].rpartition("-")[2]: each["spec"]["replicas"]
        for each in made
        if each["kind"] == "Deployment"
    }
    assert replicas == {"envrunner": 7, "evaluator": 3}
    for each in made:
        assert each["metadata"]["name"].startswith(f"{label}-")
        assert each["metadata"]["labels"]["juggler/run"] == label
        assert each["metadata"]["namespace"] == "lab"
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in made
        if each["kind"] in ("Job", "StatefulSet", "Deployment")
    }
    # The launch asks for the Job and its pods by the same labels.
    job = by_kind["Job"]
    assert job["metadata"]["labels"] == job["spec"]["template"]["metadata"]["labels"]
    given = driver.read_arguments(
        ["mine.toml", *pods[f"{label}-driver"]["containers"][0]["args"][2:]]
    ).arguments
    assert given.run.driver.num_learners == 2
    assert by_kind["StatefulSet"]["spec"]["replicas"] == 2
    assert by_kind["StatefulSet"]["spec"]["serviceName"] == f"{label}-learner"
    assert {pod["containers"][0]["image"] for pod in pods.values()} == {"lab:5000/juggler:latest"}
    args = pods[f"{label}-learner"]["containers"][0]["args"]
    assert args[-1] == "--insecure"
    limits = pods[f"{label}-learner"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 1
    # What one resource calls another by is what that is called.
    names = {(each["kind"], each["metadata"]["name"]) for each in made}
    (run,) = (each for each in made if set(each.get("data", {})) == {"DRIVER", "LEARNERS"})
    assert ("Service", run["data"]["DRIVER"]) in names
    assert ("Service", run["data"]["LEARNERS"]) in names
    for pod in pods.values():
        for volume in pod["volumes"]:
            for source, kind, key in (
                ("secret", "Secret", "secretName"),
                ("configMap", "ConfigMap", "name"),
                ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
            ):
                assert source not in volume or (kind, volume[source][key]) in names
    scaler = by_kind["HorizontalPodAutoscaler"]["spec"]
    assert ("Deployment", scaler["scaleTargetRef"]["name"]) in names
    (metric,) = (each["object"] for each in scaler["metrics"])
    assert ("Service", metric["describedObject"]["name"]) in names
    # Labels select workers of this run only.
    for each in made:
        selector = each.get("spec", {}).get("selector") or each.get("spec", {}).get("podSelector")
        if isinstance(selector, dict) and each["kind"] != "PersistentVolumeClaim":
            assert selector.get("matchLabels", selector)["juggler/run"] == label, each


def test_the_autoscaler_asks_for_a_metric_that_the_rule_makes_of_those_that_there_are() -> None:
    part = MANIFESTS / "autoscale"
    (metric,) = yaml.safe_load((part / "autoscaler.yaml").read_text())["spec"]["metrics"]
    (rule,) = yaml.safe_load((part / "adapter-rules.yaml").read_text())["rules"]
    assert rule["name"]["as"] == metric["object"]["metric"]["name"]
    asked = set(re.findall(r"juggler_\w+(?=\{)", rule["seriesQuery"] + rule["metricsQuery"]))
    assert asked == {"juggler_worker_seconds_total"} <= _exported()


def test_pods_are_probed_where_their_commands_serve_health() -> None:
    assert set(_pods()) == set(ROLES)
    for role, pod in _pods().items():
        (container,) = pod["containers"]
        command, *options = container["args"]
        assert command == role
        given = parse(options_of(role), options, role)
        port = int(given.health_bind.rpartition(":")[2])
        for probe, service in (("livenessProbe", None), ("readinessProbe", "readiness")):
            asked = {"port": port} if service is None else {"port": port, "service": service}
            assert container[probe]["grpc"] == asked
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["securityContext"]["runAsNonRoot"]


def test_no_process_is_the_first_of_its_pod_which_signals_would_not_end() -> None:
    assert all(pod["shareProcessNamespace"] for pod in _pods().values())


def test_certificates_are_to_name_what_pods_dial() -> None:
    pods = _pods()
    commands = [each["containers"][0]["args"] for each in pods.values()]
    (generated,) = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]
    names = dict(each.split("=") for each in generated["literals"])
    names |= {"POD": "*", "NAMESPACE": "juggler"}
    dialed = {
        re.sub(r"\$\((\w+)\)", lambda found: names[found[1]], option.partition("=")[2]).rpartition(
            ":"
        )[0]
        for command in commands
        for option in command
        if option.startswith(("--driver=", "--advertise="))
    }
    page = (DOCKER.parent / "docs" / "docker.md").read_text()
    (made,) = re.findall(r"^juggler certs tls (--host driver\.juggler.*)$", page, re.M)
    assert set(re.findall(r"--host '?([^' ]+)'?", made)) == dialed


def _exported() -> set[str]:
    """Names of all metrics of a run in which everything has happened."""
    fields = ("sampled", "trained", "in_flight", "lost_unreported")
    means = ("episode_return_mean", "episode_length_mean", "evaluation_return_mean")
    numbers = ("wall_time", "updates", "restarts", "episodes", *means)
    line = dict.fromkeys((*numbers, *(f"env_steps_{each}" for each in fields)), 1)
    line |= {"env_steps_dropped": {"stale": 1}, "weights_version": [1, 1]}
    status = status_pb2.RunStatus(metrics=json.dumps(line))
    for histogram in (status.staleness, status.sample_request_seconds, status.update_seconds):
        histogram.counts.append(1)
    status.queues.SetInParent()
    worker = status.workers.add(worker_id="learner-0", role="learner", state="ready")
    worker.seconds["update"] = 1
    worker.resources.resident_bytes = worker.version.update = 1
    found = families(plain_status(status))
    samples = {sample.name for family in found for sample in family.samples}
    process = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
    return samples | process | {"juggler_driver_up"}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "juggler.json").read_text())
    assert len(dashboard["panels"]) == len({each["id"] for each in dashboard["panels"]})
    asked = set(re.findall(r"\b(?:juggler|process)_\w+", json.dumps(dashboard)))
    assert len(asked) > 25
    assert asked <= _exported(), asked - _exported()


@pytest.mark.long
@needs_kubectl
def test_a_run_with_a_gateway_has_a_service_that_simulators_dial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    (tmp_path / "mine.toml").write_text('env = "mine"\ngateway = "127.0.0.1:5005"\n')
    own = ["--run-dir", "run", "--namespace", "lab", "--dry-run"]
    assert launch.run(["kubernetes", "mine.toml", *own]) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    _known(made)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in made}
    label = Launch(tmp_path / "run", "").label
    service = by_name["Service", f"{label}-gateway"]["spec"]
    assert service["publishNotReadyAddresses"], "it is ready when a simulator has dialed it"
    pods = by_name["Deployment", f"{label}-envrunner"]["spec"]["template"]
    assert service["selector"].items() <= pods["metadata"]["labels"].items()
    (container,) = pods["spec"]["containers"]
    ports = {each["containerPort"] for each in container["ports"]}
    assert {each["port"] for each in service["ports"]} <= ports
    given = parse(options_of("envrunner"), container["args"][1:], "envrunner")
    assert given.gateway == f"0.0.0.0:{service['ports'][0]['port']}"


def test_the_gateway_of_the_compose_files_is_dialed_at_the_port_that_it_listens_on() -> None:
    service = yaml.safe_load((DOCKER / "gateway.yaml").read_text())["services"]["envrunner"]
    given = parse(options_of("envrunner"), service["command"].split()[1:], "envrunner")
    port = given.gateway.rpartition(":")[2]
    assert [each.rpartition(":")[2] for each in service["ports"]] == [port]
    below = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["envrunner"]
    assert given.driver == parse(options_of("envrunner"), below["command"].split()[1:], "").driver
