"""Numbers of infos in lines of metrics."""

from __future__ import annotations

from pathlib import Path

from support.synchronous_rounds import play_a_round, synchronous

from juggler.driver.record.metrics import Metrics
from juggler.driver.upkeep import metrics_line
from juggler.envrunner.info_numbers import MOST_NUMBERS, InfoNumber
from juggler.runtime.wire.v1 import training_pb2


def test_a_line_has_means_over_the_newest_episodes(tmp_path: Path) -> None:
    world = synchronous(tmp_path)
    assert "info" not in metrics_line(world.parts)
    told = training_pb2.InfoNumber(name="x", mean=[1.0, 3.0], least=[0.0, 1.0], most=[2.0, 9.0])
    play_a_round(world, infos=[told])
    means = {"mean": 2.0, "least": 0.5, "most": 5.5}
    assert metrics_line(world.parts)["info"] == {"x": means}
    world.parts.metrics.info_numbers({"x": [InfoNumber(7.0, 7.0, 7.0)] * 100})
    assert metrics_line(world.parts)["info"]["x"] == dict.fromkeys(means, 7.0)


def test_names_that_many_envrunners_tell_do_not_pile_up() -> None:
    metrics = Metrics()
    for k in range(MOST_NUMBERS + 5):
        metrics.info_numbers({f"x{k}": [InfoNumber(1.0, 1.0, 1.0)]})
    assert list(metrics.infos) == [f"x{k}" for k in range(MOST_NUMBERS)]
