"""Runs in the real Weights & Biases and MLflow, without servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.alone import Alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # pip fetches what it installs

SCRIPT = """
import juggler, pathlib

RECORDED

class Waits(juggler.Callback):
    def on_metrics(self, run, metrics):
        if recorded() and metrics["env_steps_trained"] > 10_000:
            run.stop("a checkpoint is recorded")

keys = {"run_dir": "run", "worker_timeout_seconds": 240, "checkpoint_seconds": 1.0}
keys |= {"evaluation_seconds": 0.5, "evaluation_episodes": 2, "stop_return": None}
keys |= {"track": ["TRACKER"], "stop_seconds": 300.0}
result = juggler.train("cartpole", callbacks=[Waits()], **keys)
assert result.summary["reason_for_stop"] == "a checkpoint is recorded", result.summary
assert not list(result.run_dir.glob("events.out.*")), "TensorBoard was not asked for"
juggler.resume("run", stop_steps=result.summary["env_steps_trained"] + 30_000, stop_seconds=None)
"""


@pytest.fixture
def alone(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Alone:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return Alone(tmp_path, installed)


def record(alone: Alone, tracker: str, recorded: str) -> None:
    """A run and its resumption; first it says what is missing.

    Args:
        alone: where.
        tracker: its name.
        recorded: defines `recorded`, which returns whether it already has a checkpoint of the run.
    """
    script = SCRIPT.replace("TRACKER", tracker).replace("RECORDED", recorded)
    refused = alone.try_to_run("-c", script)
    assert f"track = ['{tracker}']: {tracker} is missing: " in refused.stderr
    alone.run("-m", "pip", "install", "-q", "--no-compile", tracker)
    alone.run("-c", script)


WANDB_RECORDED = """
def recorded():
    files = pathlib.Path("run", "wandb").glob("offline-run-*/*.wandb")
    return any(b"run-checkpoint" in file.read_bytes() for file in files)
"""


@pytest.mark.long
def test_wandb_has_configuration_metrics_and_checkpoints_of_a_run_and_of_its_resumption(
    alone: Alone,
) -> None:
    record(alone, "wandb", WANDB_RECORDED)
    first, second = sorted(alone.path.glob("run/wandb/offline-run-*/*.wandb"))
    assert first.name == second.name, "it is the same run"
    for file in (first, second):
        recorded = file.read_bytes()
        for said in (
            b"num_env_runners",
            b"modules/default/policy_loss",
            b"run-checkpoint",
            b"best",
        ):
            assert said in recorded, said


MLFLOW_RECORDED = """
def recorded():
    import mlflow
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("juggler")
    (run,) = client.search_runs([experiment.experiment_id])
    return all(client.list_artifacts(run.info.run_id, name) for name in ("newest", "best"))
"""

READ = """
import mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("juggler")
(run,) = client.search_runs([experiment.experiment_id])
assert (run.info.status, run.info.run_name) == ("FINISHED", "run"), run.info
assert run.data.params["env"] == "CartPole-v1"
assert run.data.params["stop_seconds"] == "300.0"
assert run.data.tags["reason_for_stop"] == "stop_steps"
losses = client.get_metric_history(run.info.run_id, "modules/default/policy_loss")
steps = [each.step for each in losses]
assert steps and steps[-1] >= 40_000, steps
newest = client.list_artifacts(run.info.run_id, "newest")
assert len(newest) >= 3, newest
(best,) = {each.path for each in client.list_artifacts(run.info.run_id, "best")[-1:]}
files = {each.path.rpartition("/")[2] for each in client.list_artifacts(run.info.run_id, best)}
assert files == {"checkpoint.json", "evaluation.json", "state.safetensors"}, files
"""


@pytest.mark.long  # pip takes minutes
def test_mlflow_has_parameters_metrics_and_checkpoints_of_a_run_and_of_its_resumption(
    alone: Alone,
) -> None:
    record(alone, "mlflow", MLFLOW_RECORDED)
    alone.run("-c", READ)
