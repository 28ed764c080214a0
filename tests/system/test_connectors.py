"""Parts of one's own by their names, on workers that dial in."""

from __future__ import annotations

import pytest
from support.place import REPOSITORY, Place, assert_books_balance, first_of, summary

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["custom_module", "custom_connector"]))
def test_a_part_of_ones_own_works_on_workers_that_dial_in(place: Place, name: str) -> None:
    path = {"PYTHONPATH": f"{REPOSITORY}:{EXAMPLES}"}
    options = ["--bind", "127.0.0.1:0", "--run-dir", "run", "--stop-steps", 20_000]
    driver = place.start("driver", EXAMPLES / f"{name}.toml", *options)
    dial = ["--driver", driver.address()]
    workers = [place.start(role, *dial, **path) for role in ("learner", "envrunner")]
    assert driver.wait(110) == 0, driver.output
    for worker in workers:
        assert worker.wait(60) == 0, worker.output
    assert summary(place.path / "run")["env_steps_trained"] >= 20_000
    assert_books_balance(place.path / "run")
    played = place.run("evaluate", "run", "--episodes", 2, **path)
    assert played.status == 0, played.output
    place.assert_nothing_is_left()
