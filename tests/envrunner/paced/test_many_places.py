"""Places are taken and given back in time that is in proportion to their number."""

from __future__ import annotations

import time

from juggler.envrunner.paced.rows import Places


def test_many_places_that_are_taken_one_by_one_take_little_time() -> None:
    places, many = Places(1 << 18), 100_000
    began = time.process_time()
    taken = [places.take(1)[0] for _ in range(many)]
    assert time.process_time() - began < 5.0, "each copied all that are free"
    assert taken == list(range(many))
    places.give_back(*taken)
    assert places.used == 0
