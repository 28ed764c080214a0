"""Rules for a core, as checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from juggler.learner.core.learner_core import Columns, LearnerCore
from juggler.testing.comparing import assert_same, checked, copied, differ, must

#: Makes a core, the same every time.
MakeCore = Callable[[], LearnerCore[Any]]


def check_core(make: MakeCore, sample: Columns) -> None:
    """Check that a core is a function of its state: see `LearnerCore`.

    Args:
        make: makes the core, the same every time.
        sample: data for a step.

    Raises:
        AssertionError: names the broken rule, and the place.
    """
    name = make().name
    for rule, check in _CORE_RULES.items():
        checked(f"core {name!r}: {rule}", partial(check, make, sample))


def _after(core: LearnerCore[Any], state: Any, sample: Columns, steps: int = 3) -> Any:
    """Return the state after some updates, starting from a copy."""
    state = copied(state)
    for _ in range(steps):
        state = core.step(state, sample).state
    return state


def _same_from_seed(make: MakeCore, sample: Columns) -> None:
    core = make()
    first = core.init(3)
    assert_same(first, core.init(3), "init(3), twice")
    assert_same(first, make().init(3), "init(3) of two cores")
    other = core.get_params(core.init(4))
    must(differ(core.get_params(first), other), "init(3) and init(4) draw the same parameters")


def _learns(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = core.init(0)
    after = core.get_params(_after(core, state, sample))
    must(differ(core.get_params(state), after), "three steps changed no parameter")


def _repeats(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=2)
    one, other = (core.step(copied(state), sample) for _ in range(2))
    assert_same(one.state, other.state, "state")
    assert_same(one.metrics, other.metrics, "metrics")


def _remembers_nothing(make: MakeCore, sample: Columns) -> None:
    fresh, used = make(), make()
    state = fresh.init(0)
    _after(used, used.init(7), sample)
    expected = _after(fresh, state, sample)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        before = torch.get_rng_state()
        assert_same(_after(used, state, sample), expected, "state, of a new core and a used one")
        same = torch.equal(before, torch.get_rng_state())
        must(same, "a step drew from torch's random generator; keep a key in the state instead")


def _grads_changes_nothing(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=1)
    before, columns = copied(state), copied(sample)
    one = core.grads(state, sample)[0]
    assert_same(state, before, "state")
    assert_same(sample, columns, "sample")
    assert_same(one, core.grads(state, sample)[0], "gradients, found twice")


def _step_keeps_inputs(make: MakeCore, sample: Columns) -> None:
    core = make()
    columns = copied(sample)
    core.step(core.init(0), sample)
    assert_same(sample, columns, "sample")
    state = core.init(0)
    grads, aux = core.grads(state, sample)
    before = copied(grads)
    core.apply(state, grads, aux)
    assert_same(grads, before, "gradients")


def _params_stay(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = core.init(0)
    params = core.get_params(state)
    before = copied(params)
    for _ in range(3):
        state = core.step(state, sample).state
    assert_same(params, before, "parameters")


def _continues_from_a_tree(make: MakeCore, sample: Columns) -> None:
    core = make()
    state = _after(core, core.init(0), sample, steps=2)
    tree = core.state_to_tree(state)
    before, other = copied(tree), make()
    restored = other.state_from_tree(tree, like=other.init(9))
    assert_same(restored, state, "restored state")
    expected = _after(core, state, sample)
    core.step(state, sample)  # consumes it
    assert_same(tree, before, "arrays, after a later step")
    assert_same(_after(other, restored, sample), expected, "state after three steps more")


def _metrics_are_numbers(make: MakeCore, sample: Columns) -> None:
    core = make()
    metrics = core.step(core.init(0), sample).metrics
    must(bool(metrics), "there are no metrics")
    for name, value in metrics.items():
        must(isinstance(value, Tensor), f"{name!r} is a {type(value).__name__}, not a tensor")
        must(value.shape == (), f"{name!r} has shape {tuple(value.shape)}, not ()")
        must(not value.requires_grad, f"{name!r} requires a gradient: detach it")
        must(bool(value.isfinite()), f"{name!r} is {value}")


_CORE_RULES: dict[str, Callable[[MakeCore, Columns], None]] = {
    "a seed gives the same state every time": _same_from_seed,
    "a step changes parameters": _learns,
    "the same state and sample give the same result": _repeats,
    "nothing is remembered outside the state": _remembers_nothing,
    "grads changes neither state nor sample": _grads_changes_nothing,
    "step and apply change neither sample nor gradients": _step_keeps_inputs,
    "returned parameters never change": _params_stay,
    "a saved state continues with the same numbers": _continues_from_a_tree,
    "metrics are finite 0-d tensors": _metrics_are_numbers,
}
