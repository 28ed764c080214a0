"""What holds for every LearnerCore and every Learner, those that ship and those of users.

A check is a function that raises AssertionError. Those in CORE_CHECKS take what makes a core, the
same one every time, and a sample for it; those in LEARNER_CHECKS what makes a learner from a seed,
and samples for its `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from juggler.learner.core.learner_core import LearnerCore, Sample
from juggler.learner.learner import Learner, fetch_metrics

MakeCore = Callable[[], LearnerCore[Any]]
MakeLearner = Callable[[int], Learner]


def copied(tree: Any) -> Any:
    """A tree of tensors or arrays with memory of its own."""
    if isinstance(tree, Mapping):
        return {key: copied(branch) for key, branch in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else np.array(tree)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Bit for bit, NaNs included."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys(), f"{where}: {sorted(one)} and {sorted(other)}"
        for key, branch in one.items():
            assert_same(branch, other[key], f"{where}/{key}")
        return
    assert one.dtype == other.dtype, where
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=where)


def differ(one: Any, other: Any) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def after(core: LearnerCore[Any], state: Any, sample: Sample, steps: int = 3) -> Any:
    """The state that some updates lead to, from a copy of one."""
    state = copied(state)
    for _ in range(steps):
        state = core.step(state, sample).state
    return state


# -- cores -----------------------------------------------------------------------------------------


def a_seed_gives_the_same_state_every_time(make: MakeCore, sample: Sample) -> None:
    core = make()
    states = [core.init(3), core.init(3), make().init(3)]
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])
    assert differ(core.get_params(states[0]), core.get_params(core.init(4)))


def a_step_changes_the_parameters(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = core.init(0)
    assert differ(core.get_params(state), core.get_params(after(core, state, sample)))


def the_same_state_and_sample_give_the_same_result(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = after(core, core.init(0), sample, steps=2)
    one, other = (core.step(copied(state), sample) for _ in range(2))
    assert_same(one.state, other.state)
    assert_same(one.metrics, other.metrics)


def nothing_is_remembered_beside_the_state(make: MakeCore, sample: Sample) -> None:
    """Neither what it did before nor a random generator changes what a core does."""
    fresh, used = make(), make()
    state = fresh.init(0)
    after(used, used.init(7), sample)
    expected = after(fresh, state, sample)
    with torch.random.fork_rng():
        torch.manual_seed(12345)
        before = torch.get_rng_state()
        assert_same(after(used, state, sample), expected)
        assert torch.equal(before, torch.get_rng_state()), "random numbers were drawn"


def gradients_leave_the_state_and_the_sample_alone(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = after(core, core.init(0), sample, steps=1)
    before, columns = copied(state), copied(sample)
    one = core.grads(state, sample)[0]
    assert_same(state, before)
    assert_same(sample, columns)
    assert_same(one, core.grads(state, sample)[0])


def a_step_leaves_sample_and_gradients_alone(make: MakeCore, sample: Sample) -> None:
    core = make()
    columns = copied(sample)
    core.step(core.init(0), sample)
    assert_same(sample, columns)
    state = core.init(0)
    grads, aux = core.grads(state, sample)
    before = copied(grads)
    core.apply(state, grads, aux)
    assert_same(grads, before)


def params_that_were_given_stay_as_they_were(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = core.init(0)
    params = core.get_params(state)
    before = copied(params)
    for _ in range(3):
        state = core.step(state, sample).state
    assert_same(params, before)


def a_saved_state_goes_on_with_the_same_numbers(make: MakeCore, sample: Sample) -> None:
    core = make()
    state = after(core, core.init(0), sample, steps=2)
    tree = core.state_to_tree(state)
    before, other = copied(tree), make()
    restored = other.state_from_tree(tree, like=other.init(9))
    assert_same(restored, state)
    expected = after(core, state, sample)
    core.step(state, sample)  # consumes it
    assert_same(tree, before)
    assert_same(after(other, restored, sample), expected)


def metrics_are_numbers_of_the_modules_that_were_trained(make: MakeCore, sample: Sample) -> None:
    core = make()
    metrics = core.step(core.init(0), sample).metrics
    assert metrics
    for module_id, values in metrics.items():
        assert values
        for name, value in values.items():
            assert isinstance(value, Tensor), (module_id, name)
            assert value.shape == (), (module_id, name)
            assert not value.requires_grad, (module_id, name)
            assert value.isfinite(), (module_id, name)


def modules_without_a_part_in_the_sample_stay_as_they_are(make: MakeCore, sample: Sample) -> None:
    core = make()
    module_id, *others = sample
    assert others, "this needs a sample for several modules"
    state = after(core, core.init(0), sample, steps=1)
    before = copied(core.get_params(state))
    output = core.step(state, {module_id: sample[module_id]})
    params = core.get_params(output.state)
    trained = output.metrics.keys()
    assert trained < params.keys()
    for each in params:
        assert differ(params[each], before[each]) == (each in trained), each


CORE_CHECKS: Sequence[Callable[[MakeCore, Sample], None]] = (
    a_seed_gives_the_same_state_every_time,
    a_step_changes_the_parameters,
    the_same_state_and_sample_give_the_same_result,
    nothing_is_remembered_beside_the_state,
    gradients_leave_the_state_and_the_sample_alone,
    a_step_leaves_sample_and_gradients_alone,
    params_that_were_given_stay_as_they_were,
    a_saved_state_goes_on_with_the_same_numbers,
    metrics_are_numbers_of_the_modules_that_were_trained,
    modules_without_a_part_in_the_sample_stay_as_they_are,
)


# -- learners --------------------------------------------------------------------------------------


def stepped(learner: Learner, samples: Sequence[Sample]) -> list[Any]:
    return [fetch_metrics(learner.step(sample)) for sample in samples]


def learners_of_one_seed_agree(make: MakeLearner, samples: Sequence[Sample]) -> None:
    one, other = make(0), make(0)
    assert stepped(one, samples) == stepped(other, samples)
    assert_same(one.get_weights(), other.get_weights())
    assert one.updates == len(samples)
    assert differ(one.get_weights(), make(1).get_weights())


def a_step_on_a_sample_and_on_the_next_of_a_source_agree(
    make: MakeLearner, samples: Sequence[Sample]
) -> None:
    given, sourced = make(0), make(0)
    sourced.source = iter(samples)
    for sample in samples:
        assert fetch_metrics(given.step(sample)) == fetch_metrics(sourced.step())
    assert_same(given.get_weights(), sourced.get_weights())
    for learner, error in ((sourced, StopIteration), (given, ValueError)):
        try:
            learner.step()
        except error:
            continue
        raise AssertionError(f"a step without a sample must raise {error.__name__}")


def params_stay_as_they_were_when_they_were_asked_for(
    make: MakeLearner, samples: Sequence[Sample]
) -> None:
    learner = make(0)
    params, weights = learner.get_params(), learner.get_weights()
    before = copied(params), copied(weights)
    stepped(learner, samples)
    assert_same(params, before[0])
    assert_same(weights, before[1])
    assert differ(learner.get_params(), params)


def a_restored_learner_goes_on_with_the_same_numbers(
    make: MakeLearner, samples: Sequence[Sample]
) -> None:
    learner, restored = make(0), make(9)
    stepped(learner, samples)
    # What is kept for further use is not saved, and both are to begin without it.
    learner.forget()
    tree, extras = learner.save()
    before = copied(tree)
    restored.restore(tree, extras)
    assert restored.updates == learner.updates
    assert_same(restored.get_weights(), learner.get_weights())
    assert stepped(restored, samples) == stepped(learner, samples)
    assert_same(restored.get_weights(), learner.get_weights())
    assert_same(tree, before, "what was saved")


LEARNER_CHECKS: Sequence[Callable[[MakeLearner, Sequence[Sample]], None]] = (
    learners_of_one_seed_agree,
    a_step_on_a_sample_and_on_the_next_of_a_source_agree,
    params_stay_as_they_were_when_they_were_asked_for,
    a_restored_learner_goes_on_with_the_same_numbers,
)
