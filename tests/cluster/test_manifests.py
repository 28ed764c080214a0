"""The files under docker/ that no engine reads here: by schemas, and against what they name."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from juggler.cli import driver, envrunner, learner
from juggler.cli.arguments import parse
from juggler.driver.record.prometheus import families
from juggler.runtime.wire.v1 import status_pb2

DOCKER = Path(__file__).resolve().parents[2] / "docker"
MANIFESTS = DOCKER / "kubernetes"
ROLES = {"driver": driver, "learner": learner, "envrunner": envrunner}


def _resources() -> list[dict[str, Any]]:
    named = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    assert {*named, "kustomization.yaml"} == {each.name for each in MANIFESTS.iterdir()}
    return [each for name in named for each in yaml.safe_load_all((MANIFESTS / name).read_text())]


def _pods() -> dict[str, dict[str, Any]]:
    """Pods' specs by role."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in _resources()
        if "template" in each.get("spec", {})
    }


@pytest.mark.parametrize("version", ["1.28", "1.33"])
def test_kubernetes_knows_every_field(version: str) -> None:
    for each in _resources():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kubernetes_validate.validate(each, version, strict=True)


def test_pods_are_probed_where_their_commands_serve_health() -> None:
    assert set(_pods()) == set(ROLES)
    for role, pod in _pods().items():
        (container,) = pod["containers"]
        command, *options = container["args"]
        assert command == role
        given = parse(ROLES[role].Arguments, options, role)
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


def test_certificates_are_to_name_what_pods_dial() -> None:
    pods = _pods()
    commands = [each["containers"][0]["args"] for each in pods.values()]
    dialed = {
        option.partition("=")[2].rpartition(":")[0].replace("$(POD)", "*")
        for command in commands
        for option in command
        if option.startswith(("--driver=", "--advertise="))
    }
    page = (DOCKER.parent / "docs" / "docker.md").read_text()
    (made,) = re.findall(r"^juggler certs tls (--host driver\.juggler.*)$", page, re.M)
    assert set(re.findall(r"--host '?([^' ]+)'?", made)) == dialed


def _exported() -> set[str]:
    """Names of all that /metrics has, of a run where everything has happened."""
    status = status_pb2.RunStatus()
    status.steps.dropped["stale"] = 1
    for histogram in (status.staleness, status.sample_request_seconds, status.update_seconds):
        histogram.counts.append(1)
    for field in ("return_mean", "length_mean", "evaluation_return_mean"):
        setattr(status.episodes, field, 1.0)
    status.workers.add(worker_id="learner-0", role="learner", state="ready").seconds["update"] = 1
    samples = {sample.name for family in families(status) for sample in family.samples}
    process = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}
    return samples | process | {"juggler_driver_up"}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((DOCKER / "grafana" / "juggler.json").read_text())
    assert len(dashboard["panels"]) == len({each["id"] for each in dashboard["panels"]})
    asked = set(re.findall(r"\b(?:juggler|process)_\w+", json.dumps(dashboard)))
    assert len(asked) > 25
    assert asked <= _exported(), asked - _exported()


def test_the_example_has_every_variable_of_the_compose_files() -> None:
    files = [each.read_text() for each in DOCKER.glob("*.yaml")]
    used = {name for text in files for name in re.findall(r"(?<!\$)\$\{(\w+)", text)}
    assert used == set(re.findall(r"^#?(\w+)=", (DOCKER / "example.env").read_text(), re.M))
