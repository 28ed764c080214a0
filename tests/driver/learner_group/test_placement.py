"""Which module is trained where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from juggler.driver.learner_group.placement import Placement


@pytest.mark.parametrize(
    ("gpus", "modules", "shards", "gpus_per_shard", "modules_per_shard", "share"),
    [
        (4, 10, 4, 1, 3, 0.4),
        (8, 3, 3, 2, 1, 2.0),
        (8, 2, 2, 4, 1, 4.0),
        (2, 5, 2, 1, 3, 0.4),
        (1, 1, 1, 1, 1, 1.0),
        (4, 4, 4, 1, 1, 1.0),
        (0, 3, 3, 0, 1, 0.0),
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
    placement = _placed(gpus, modules)
    assert len(placement) == shards
    assert max(len(placement.modules_on(shard)) for shard in range(shards)) == modules_per_shard
    for place in placement.places().values():
        assert len(place.devices) == max(gpus_per_shard, 1)
        assert place.share == share


def _placed(gpus: int, modules: int) -> Placement:
    return Placement([f"fake:{n}" for n in range(gpus)], [f"module {n}" for n in range(modules)])


@given(gpus=st.integers(0, 9), modules=st.integers(1, 30))
def test_every_module_is_placed_once_and_no_shard_has_two_more_than_another(
    gpus: int, modules: int
) -> None:
    placement = _placed(gpus, modules)
    places = placement.places()
    assert sorted(places) == sorted(f"module {n}" for n in range(modules))
    loads = [len(placement.modules_on(shard)) for shard in range(len(placement))]
    assert sum(loads) == modules
    assert max(loads) - min(loads) <= 1
    _devices_belong_to_one_shard_each(placement, gpus)


def _devices_belong_to_one_shard_each(placement: Placement, gpus: int) -> None:
    by_shard = {place.shard: place.devices for place in placement.places().values()}
    assert all(by_shard.values())
    taken = Counter(device for devices in by_shard.values() for device in devices)
    if gpus:
        assert max(taken.values(), default=1) == 1
        assert len(taken) <= gpus


@given(
    gpus=st.integers(0, 9),
    modules=st.integers(1, 12),
    moves=st.lists(st.integers(0, 30), max_size=40),
)
def test_modules_come_and_go_and_each_goes_where_there_is_most_room(
    gpus: int, modules: int, moves: list[int]
) -> None:
    placement = _placed(gpus, modules)
    there = [f"module {n}" for n in range(modules)]
    for number, move in enumerate(moves):
        if move % 2 and there:
            module_id = there.pop(move % len(there))
            placement.remove(module_id)
            assert module_id not in placement
            continue
        module_id = f"later {number}"
        shards = len(placement)
        loads = [len(placement.modules_on(shard)) for shard in range(shards)]
        shard = placement.add(module_id)
        there.append(module_id)
        assert placement.shard_of(module_id) == shard
        if shard < shards:  # one that was there: with fewest
            assert loads[shard] == min(loads)
        else:  # a new one: nobody was without a module, and there was a device
            assert shard == shards
            assert min(loads) > 0
        assert shards <= len(placement) <= (gpus or len(placement))
    assert sorted(placement.places()) == sorted(there)
    _devices_belong_to_one_shard_each(placement, gpus)


def test_a_device_that_only_stood_by_is_for_the_next_module() -> None:
    placement = _placed(8, 2)
    assert [placement.add(name) for name in ("third", "fourth")] == [2, 3]
    devices = {name: place.devices for name, place in placement.places().items()}
    assert devices["module 0"] == ("fake:0", "fake:1")  # and computes on the same as before
    assert devices["third"] == ("fake:2", "fake:3")
    for name in ("fifth", "sixth", "seventh", "eighth"):
        placement.add(name)
    assert len(placement) == 8
    assert placement.add("ninth") < 8


def test_devices_that_no_shard_has_come_first() -> None:
    placement = _placed(8, 3)
    assert placement.add("fourth") == 3
    assert placement.places()["fourth"].devices == ("fake:6", "fake:7")


def test_a_closed_shard_gets_no_more_modules() -> None:
    placement = _placed(2, 2)
    placement.close(0)
    placement.remove("module 0")
    assert placement.add("third") == 1
    placement.close(1)
    with pytest.raises(ValueError, match="no shard is left"):
        placement.add("fourth")


def test_a_group_of_no_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one module"):
        _placed(4, 0)
