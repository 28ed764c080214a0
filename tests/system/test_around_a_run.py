"""A script alongside a run: its events, actions and results."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest

import juggler

pytestmark = [pytest.mark.slow]
LR = 1.25e-5


class Follows(juggler.Callback):
    """Keeps its events, kills an EnvRunner, and fails after the last one."""

    def __init__(self) -> None:
        self.evaluations: list[juggler.Evaluation] = []
        self.checkpoints: list[Path] = []
        self.lost: list[str] = []
        self.updates = 0
        self.summary: dict[str, Any] = {}
        self._killed = False

    def on_update(self, run: juggler.Run, module_id: str, metrics: Any) -> None:
        self.updates += 1
        if not self._killed:
            self._killed = True
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # one that tried things out
                    if child.name().startswith("juggler: envrun"):
                        child.kill()

    def on_evaluation(self, run: juggler.Run, evaluation: juggler.Evaluation) -> None:
        self.evaluations.append(evaluation)
        if evaluation.is_best:
            assert (run.run_dir / "best" / f"{evaluation.update:09d}").is_dir()
        run.set("lr", LR)

    def on_checkpoint(self, run: juggler.Run, path: Path) -> None:
        self.checkpoints.append(path)

    def on_worker_lost(self, run: juggler.Run, worker_id: str, reason: str) -> None:
        self.lost.append(worker_id)

    def on_metrics(self, run: juggler.Run, metrics: Any) -> None:
        # An update that was under way when the rate was set still tells of the one before.
        is_set = metrics.get("modules/default/lr") == pytest.approx(LR)
        heard = self.lost and len(self.evaluations) >= 2 and self.checkpoints
        if heard and is_set and self.updates > 10:
            raise KeyError("got all")

    def on_end(self, run: juggler.Run, summary: Any) -> None:
        self.summary = dict(summary)


def test_a_run_beside_a_script_is_followed_to_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = Follows()
    monkeypatch.chdir(tmp_path)
    run = juggler.start(
        "cartpole",
        run_dir="run",
        callbacks=[follows],
        num_env_runners=1,
        checkpoint_seconds=1.0,
        evaluation_seconds=0.5,
        evaluation_episodes=2,
        stop_return=None,
        stop_seconds=300,
        progress="off",
    )
    assert run.run_dir == tmp_path / "run"
    monkeypatch.chdir("/")  # the run stays where it is
    lines = list(run.metrics())
    with pytest.raises(KeyError, match="got all") as raised:
        run.result(60)
    assert "juggler train --resume" in raised.value.__notes__[0]
    assert follows.lost[0] == "envrunner-0"
    assert follows.summary["reason_for_stop"] == "callback_failed"
    assert lines[-1]["modules/default/lr"] == pytest.approx(LR), "which it was set to"
    assert 10 < lines[-1]["updates"] <= follows.summary["updates"], "updates under way end"
    assert follows.summary["checkpoint"] == str(max((run.run_dir / "checkpoints").iterdir()))

    best = follows.summary["best"]
    means = [each.mean for each in follows.evaluations]
    first_best = follows.evaluations[means.index(max(means))]
    # An evaluation that ends after the error may be better, but is never reported.
    heard_best = (best["return_mean"], best["update"]) == (first_best.mean, first_best.update)
    assert heard_best or (best["return_mean"] > max(means) and best["update"] > first_best.update)
    assert [each.is_best for each in follows.evaluations] == [
        mean > max(means[:n], default=-1) for n, mean in enumerate(means)
    ]
    played = juggler.evaluate(run.run_dir / "best", episodes=2)
    assert str(played.checkpoint) == best["checkpoint"]
    assert juggler.load_policy(run.run_dir / "best").action_space.n == 2  # type: ignore[attr-defined]
    assert not (run.run_dir / "evaluated").exists()

    more = follows.summary["env_steps_trained"] + 1
    result = juggler.resume(run.run_dir, stop_steps=more, progress="off")
    assert result.best == Path(best["checkpoint"]), "a resumed run keeps it"
    rows = result.metrics()
    assert [row["wall_time"] for row in rows] == sorted(row["wall_time"] for row in rows)
    assert {"episode_return_mean", "modules/default/entropy"} <= rows[-1].keys()
    assert rows[-1]["modules/default/lr"] == pytest.approx(LR), "a resumed run goes on with it"
