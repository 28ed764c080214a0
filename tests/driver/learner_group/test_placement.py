"""Which module is trained where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.driver.config import ConfigError
from juggler.driver.learner_group.group import Place, choose_shard, places


class Placement:
    """Modules that come and go, placed as a group places them."""

    def __init__(self, gpus: int, modules: int) -> None:
        self.gpus = [f"fake:{n}" for n in range(gpus)]
        self.count = 0
        self.shards: dict[str, int] = {}
        for n in range(modules):
            self.add(f"module {n}")

    def loads(self) -> list[int]:
        found = Counter(self.shards.values())
        return [found[shard] for shard in range(self.count)]

    def add(self, module_id: str) -> int:
        shard = self.shards[module_id] = choose_shard(self.loads(), len(self.gpus) or None)
        self.count = max(self.count, shard + 1)
        return shard

    def places(self) -> dict[str, Place]:
        return places(self.shards, self.gpus, self.count)

    def check(self) -> None:
        by_shard = {place.shard: place.devices for place in self.places().values()}
        assert all(by_shard.values())
        if self.gpus:
            taken = Counter(device for devices in by_shard.values() for device in devices)
            assert max(taken.values(), default=1) == 1
            for shard, devices in by_shard.items():
                assert devices[0] == self.gpus[shard], "it computes on the same as before"


@pytest.mark.parametrize(
    ("gpus", "modules", "shards", "gpus_per_shard", "modules_per_shard", "share"),
    [
        (4, 10, 4, 1, 3, 0.4),
        (8, 3, 3, 3, 1, 8 / 3),
        (8, 2, 2, 4, 1, 4.0),
        (2, 5, 2, 1, 3, 0.4),
        (1, 1, 1, 1, 1, 1.0),
        (4, 4, 4, 1, 1, 1.0),
        (0, 3, 3, 1, 1, 0.0),
    ],
)
def test_modules_are_spread_over_gpus_as_the_table_says(
    gpus: int,
    modules: int,
    shards: int,
    gpus_per_shard: int,
    modules_per_shard: int,
    share: float,
) -> None:
    placement = Placement(gpus, modules)
    assert placement.count == shards
    assert max(placement.loads()) == modules_per_shard
    found = placement.places().values()
    assert max(len(place.devices) for place in found) == gpus_per_shard
    assert {place.share for place in found} == {share}


@given(gpus=st.integers(0, 9), modules=st.integers(1, 30))
def test_no_shard_has_two_modules_more_than_another(gpus: int, modules: int) -> None:
    placement = Placement(gpus, modules)
    loads = placement.loads()
    assert sum(loads) == modules
    assert max(loads) - min(loads) <= 1
    placement.check()


@given(
    gpus=st.integers(0, 9),
    modules=st.integers(1, 12),
    moves=st.lists(st.integers(0, 30), max_size=40),
)
def test_modules_come_and_go_and_each_goes_where_there_is_most_room(
    gpus: int, modules: int, moves: list[int]
) -> None:
    placement = Placement(gpus, modules)
    there = list(placement.shards)
    for number, move in enumerate(moves):
        if move % 2 and there:
            del placement.shards[there.pop(move % len(there))]
            continue
        there.append(f"later {number}")
        before, loads = placement.count, placement.loads()
        shard = placement.add(there[-1])
        if shard < before:
            assert loads[shard] == min(loads)
        else:
            assert shard == before
            assert min(loads) > 0
        assert placement.count <= (gpus or placement.count)
    assert sorted(placement.places()) == sorted(there)
    placement.check()


def test_a_shard_that_is_down_gets_no_more_modules() -> None:
    assert choose_shard([None, 1], 2) == 1
    assert choose_shard([None, 1], 3) == 2
    assert choose_shard([None, 1], None) == 2
    with pytest.raises(ConfigError, match="no shard is left"):
        choose_shard([None, None], 2)
