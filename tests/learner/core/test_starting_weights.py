"""Learners that go on with weights from elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gymnasium import spaces
from support.batches import MakeBatch

from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import QNetwork
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.testing import assert_same

SPACES = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)
ALGORITHMS = pytest.mark.parametrize("algorithm", ["impala", "ppo", "appo"])


def make(algorithm: str = "impala", *, seed: int = 0, hidden: int = 8, **config: Any) -> Learner:
    model = {"hidden_sizes": [hidden]}
    return build_learner({"algorithm": algorithm, **config}, None, *SPACES, model, seed=seed)


def saved(learner: Learner) -> dict[str, Any]:
    tree: Any = learner.save()[0]["default"]
    return tree


def weights(learner: Learner) -> dict[str, Any]:
    """All parameters and buffers, the value function's too."""
    tree = saved(learner)
    return {**tree["parameters"], **tree["buffers"]}


@ALGORITHMS
def test_a_new_learner_with_them_is_one_that_was_drawn_so(
    algorithm: str, make_batch: MakeBatch
) -> None:
    """Bit for bit, including the algorithm's state and later updates."""
    other, learner = make(algorithm, seed=5), make(algorithm, seed=0)
    learner.set_weights(weights(other), whole=True)
    if algorithm == "ppo":  # its key to minibatches is the learner's own
        other.state["extra"] = learner.state["extra"]
    assert_same(learner.save()[0], other.save()[0])
    for seed in range(3):
        for each in (learner, other):
            each.update_from_episodes([make_batch(seed=seed)])
    assert_same(learner.save()[0], other.save()[0])


@ALGORITHMS
def test_in_the_middle_of_training_all_but_the_counts_begins_anew(
    algorithm: str, make_batch: MakeBatch
) -> None:
    learner, other = make(algorithm), make(algorithm, seed=5)
    for seed in range(3):
        learner.update_from_episodes([make_batch(seed=seed)])
    steps = int(saved(learner)["steps"])
    learner.set_weights(weights(other), whole=True)
    assert learner.updates == 3
    assert saved(learner)["steps"] == steps > 0
    assert_same(saved(learner)["moments"], saved(other)["moments"])
    if algorithm == "appo":
        assert_same(saved(learner)["extra"]["target"], saved(other)["parameters"])
        assert learner.data.add({}) == [{}], "no sample of before is learned from again"


def test_what_is_not_named_stays_and_what_another_algorithm_trained_will_do() -> None:
    learner, other = make("appo"), make("ppo", seed=5)
    before, given = weights(learner), weights(other)
    chosen = {name: array for name, array in given.items() if name.startswith("encoder.")}
    learner.set_weights(chosen)
    after = weights(learner)
    assert chosen
    for name, array in after.items():
        assert np.array_equal(array, given[name] if name in chosen else before[name]), name
    assert_same(saved(learner)["extra"]["target"], saved(learner)["parameters"])


def test_where_no_weights_are_given_nothing_changes(make_batch: MakeBatch) -> None:
    learner = make()
    learner.update_from_episodes([make_batch(2, 8)])
    before = saved(learner)
    learner.set_weights({}, whole=False)
    assert_same(saved(learner), before)


def test_what_is_sent_in_bfloat16_will_do_too() -> None:
    other, learner = make(seed=5, weights_dtype="bfloat16"), make()
    learner.set_weights(other.get_weights())
    (name, sent), *_ = other.get_weights().items()  # type: ignore[union-attr]
    assert sent.dtype == ml_dtypes.bfloat16
    found: Any = learner.get_weights()
    assert np.array_equal(found[name], sent.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encodr.0.bias": np.zeros(8, np.float32)}, "no weights 'encodr.0.bias': did you mean"),
        ({"encoder.0.bias": np.zeros(9, np.float32)}, r"have shape \(9,\); expected \(8,\)"),
        ({"encoder.0.bias": np.zeros(8)}, "are torch.float64; expected torch.float32"),
        ({"encoder.0.bias": {}}, "'encoder.0.bias' are a dict, not an array"),
        ({"encoder.0.bias": np.full(8, np.nan, np.float32)}, "'encoder.0.bias' have NaN"),
        ({"encoder.0.bias": None}, "weights are missing for 'encoder.0.bias'"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_has_changed(
    change: dict[str, Any], words: str
) -> None:
    learner = make()
    before = learner.save()[0]
    given = {**weights(make(seed=5)), **change}
    given = {name: array for name, array in given.items() if array is not None}
    with pytest.raises(StateMismatch, match=words):
        learner.set_weights(given, whole=True)
    assert_same(learner.save()[0], before)


def test_one_tensor_under_two_names_must_be_given_once_or_the_same() -> None:
    def tied() -> RLModule:
        module: Any = build_module(None, *SPACES, {"hidden_sizes": [8]})
        module.value_encoder = module.encoder
        return module

    learner = Learner(Impala(tied, ImpalaConfig()), seed=0)
    one = np.ones(8, np.float32)
    learner.set_weights({"encoder.0.bias": one})
    learner.set_weights({"encoder.0.bias": one, "value_encoder.0.bias": one})
    with pytest.raises(StateMismatch, match=r"'value_encoder.0.bias' and"):
        learner.set_weights({"encoder.0.bias": one, "value_encoder.0.bias": 2 * one})


def test_a_core_without_the_means_says_so() -> None:
    class Without(Impala):
        def with_weights(self, *args: Any, **keys: Any) -> Any:
            return super(GradientCore, self).with_weights(*args, **keys)

    core = Without(partial(build_module, None, *SPACES, {}), ImpalaConfig())
    with pytest.raises(ValueError, match="impala has no `with_weights`"):
        Learner(core).set_weights({})


# Kept steps after a learner's reset, or after weights from elsewhere.


VECTOR, TWO = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)


def make_core(**config: Any) -> Dqn:
    make = partial(QNetwork, VECTOR, TWO, {"hidden_sizes": [8]})
    return Dqn(make, DqnConfig(**config))


@pytest.mark.parametrize("how", ["reset", "set_weights"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_learner_that_begins_with_other_weights_learns_from_none_of_its_old_steps(
    make_batch: MakeBatch, how: str, saved: bool
) -> None:
    """And one that is resumed meanwhile draws the same afterwards."""

    def begin(learner: Learner) -> None:
        if how == "reset":
            learner.reset(7)
        else:
            learner.set_weights(Learner(make_core(), seed=7).get_weights(), whole=True)

    keys = {"replay_begin": 30, "replay_batch_size": 8, "save_replay": saved}
    one, other = (Learner(make_core(**keys)) for _ in range(2))
    other.data = make_core(**keys).data_source(seed=1)  # of a process that has another seed
    for seed in range(3):
        one.update_from_episodes([make_batch(4, 6, seed=seed)])
    other.restore(*one.save())
    one.forget()
    for learner in (one, other):
        begin(learner)
        assert not learner.data.books().get("replay_rows")
    batches = [make_batch(4, 6, seed=seed) for seed in (8, 9)]
    assert batches[0].live_steps < 30 <= sum(batch.live_steps for batch in batches)
    told = [[learner.update_from_episodes([each]) for each in batches] for learner in (one, other)]
    assert told[0][0] == {} != told[0][1]
    assert one.data.books()["replay_rows"] == sum(batch.live_steps for batch in batches)
    np.testing.assert_equal(one.get_weights(), other.get_weights())
