"""Rules for a learner, as checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.testing.comparing import assert_same, checked, copied, differ, must

#: Makes a learner from a seed.
MakeLearner = Callable[[int], Learner]


def check_learner(make: MakeLearner, samples: Sequence[Columns]) -> None:
    """Check that a learner is reproducible and continues from its state.

    Args:
        make: makes the learner from a seed.
        samples: for its `step`; two or more.

    Raises:
        AssertionError: names the broken rule, and the place.
    """
    name = type(make(0)).__name__
    for rule, check in _LEARNER_RULES.items():
        checked(f"{name}: {rule}", partial(check, make, samples))


def _stepped(learner: Learner, samples: Sequence[Columns]) -> list[Any]:
    return [fetch_metrics(learner.step(sample)) for sample in samples]


def _agree(one: Learner, other: Learner, samples: Sequence[Columns]) -> None:
    same = _stepped(one, samples) == _stepped(other, samples)
    must(same, "metrics differ")
    assert_same(one.get_weights(), other.get_weights(), "weights")


def _steps_learn(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner = make(0)
    before = copied(learner.get_params())
    found = any(_stepped(learner, samples))
    nothing_due = (
        f"nothing was learned from these {len(samples)} samples. A replay returns nothing before "
        "replay_begin steps, and then one sample per replay_batch_size / replay_ratio steps: "
        "lower these, or give more steps"
    )
    changed = differ(learner.get_params(), before)
    must(changed, "no step changed them" if found else nothing_due)


def _learners_repeat(make: MakeLearner, samples: Sequence[Columns]) -> None:
    one = make(0)
    _agree(one, make(0), samples)
    must(one.updates == len(samples), f"{len(samples)} steps are counted as {one.updates}")
    other = make(1).get_weights()
    must(differ(one.get_weights(), other), "seeds 0 and 1 give the same weights")


def _sources_are_samples(make: MakeLearner, samples: Sequence[Columns]) -> None:
    given, sourced = make(0), make(0)
    sourced.source = iter(samples)
    for sample in samples:
        same = fetch_metrics(given.step(sample)) == fetch_metrics(sourced.step())
        must(same, "metrics differ between step(sample) and step() with a source")
    assert_same(given.get_weights(), sourced.get_weights(), "weights")
    for learner, error in ((sourced, StopIteration), (given, ValueError)):
        try:
            learner.step()
        except error:
            continue
        raise AssertionError(f"step() without a sample must raise {error.__name__}")


def _weights_stay(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner = make(0)
    params, weights = learner.get_params(), learner.get_weights()
    before = copied(params), copied(weights)
    _stepped(learner, samples)
    assert_same(params, before[0], "get_params()")
    assert_same(weights, before[1], "get_weights()")


def _learner_continues(make: MakeLearner, samples: Sequence[Columns]) -> None:
    learner, restored = make(0), make(9)
    _stepped(learner, samples)
    # Buffers for later steps are not saved, so both have to start without them.
    learner.forget()
    tree, extras = learner.save()
    before = copied(tree)
    restored.restore(tree, extras)
    must(restored.updates == learner.updates, "updates are not restored")
    assert_same(restored.get_weights(), learner.get_weights(), "restored weights")
    _agree(restored, learner, samples)
    assert_same(tree, before, "what was saved")


_LEARNER_RULES: dict[str, Callable[[MakeLearner, Sequence[Columns]], None]] = {
    "steps change parameters": _steps_learn,
    "learners of one seed agree": _learners_repeat,
    "a step on a sample equals a step on the next one of a source": _sources_are_samples,
    "returned weights never change": _weights_stay,
    "a restored learner continues with the same numbers": _learner_continues,
}
