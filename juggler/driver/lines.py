"""The line that a driver writes about its run every second."""

from __future__ import annotations

from typing import Any

from juggler.driver.run_clock import Times
from juggler.driver.workers.worker_events import WorkerEvents


def metrics_line(workers: WorkerEvents, restarts: int, times: Times) -> dict[str, Any]:
    """
    Args:
        workers: of the run.
        restarts: of local processes.
        times: of the run.

    Raises:
        LedgerError: the books do not balance.
    """
    core = workers.core
    counters = core.ledger.counters()
    counters.check()
    workers.metrics.workers.mark(counters.trained)
    return {
        "wall_time": times.wall,
        "training_time": times.training,
        "env_steps_sampled": counters.sampled,
        "env_steps_trained": counters.trained,
        "env_steps_dropped": {reason: n for reason, n in counters.dropped.items() if n},
        "env_steps_in_flight": counters.in_flight,
        "env_steps_lost_unreported": counters.lost_unreported,
        "learner_steps": workers.learners.steps,
        "updates": workers.updates,
        "weights_version": list(core.weights_version),
        "num_env_runners": core.num_runners,
        "num_learners": len(core.members),
        "devices": {name: workers.registry.devices[name] for name in core.members},
        "restarts": restarts,
        **workers.metrics.line(times.wall, counters.trained),
    }
