"""How full the inferences of gateways are."""

from __future__ import annotations

import pytest

from juggler.driver.record.metrics import Metrics


def test_a_line_tells_of_the_inferences_since_the_line_before() -> None:
    metrics = Metrics()
    assert metrics.line(1.0, 0)["inference"] is None
    first = {"inferences": 10, "inferred_rows": 80, "inferred_batches": 40, "waited_seconds": 0.2}
    second = {"inferences": 12, "inferred_rows": 90, "inferred_batches": 45, "waited_seconds": 0.7}
    metrics.workers.counted("envrunner-0", first)
    assert metrics.line(2.0, 0)["inference"] == pytest.approx({"rows": 8.0, "wait_ms": 5.0})
    metrics.workers.counted("envrunner-0", second)
    metrics.workers.counted("envrunner-1", first)
    told = metrics.line(3.0, 0)["inference"]
    assert told == pytest.approx({"rows": 90 / 12, "wait_ms": 1e3 * 0.7 / 45})
    assert metrics.line(4.0, 0)["inference"] is None
