"""Updates on prepared columns, in parts and passes per call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import MakeBatch
from support.learner_groups import join, update

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.learner_core import Columns
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate, shard
from juggler.learner.learner import Learner
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.wire.structures import tree_map
from juggler.testing import assert_same

VECTOR, TWO = spaces.Box(-10, 10, (4,), np.float32), spaces.Discrete(2)
algorithms = pytest.mark.parametrize("algorithm", ["impala", "ppo", "appo"])
passes = pytest.mark.parametrize(
    "passes",
    [{}, {"minibatch_size": 15}, {"num_epochs": 2}, {"minibatch_size": 7, "num_epochs": 3}],
)


def make(algorithm: str, *, cell: str | None = None, piped: bool = False, **config: Any) -> Learner:
    pieces: dict[str, Any] = {"env_to_module": ["frame_stack"]} if piped else {}
    return build_learner(
        {"algorithm": algorithm, "lr": 0.01, **config},
        None,
        VECTOR,
        TWO,
        {"hidden_sizes": [8], **({"recurrent": cell} if cell else {})},
        connectors=ConnectorsConfig.parse(pieces),
    )


def arrays(columns: Any) -> Any:
    return tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, columns)


@algorithms
@passes
def test_on_collated_episodes_it_is_the_update_from_these_episodes(
    make_batch: MakeBatch, algorithm: str, passes: dict[str, Any]
) -> None:
    """Bitwise over several updates, from arrays and tensors in turn."""
    one, other = make(algorithm), make(algorithm)
    for seed in range(3):
        # Of different lengths: the shorter rows are filled up.
        episodes = [make_batch(4, 6, seed=seed), make_batch(3, 5, seed=seed + 10)]
        columns: Any = collate(episodes)
        batch = columns if seed % 2 else arrays(columns)
        expected = one.update_from_episodes(episodes, **passes)
        found = other.update_from_batch(batch, **passes)
        assert fetch_metrics(found) == fetch_metrics(expected)
    assert_same(other.save()[0], one.save()[0])
    assert one.updates == other.updates == 3


@algorithms
def test_so_it_is_without_what_can_be_worked_out(make_batch: MakeBatch, algorithm: str) -> None:
    one, other = make(algorithm), make(algorithm)
    nothing = np.zeros((4, 6), np.bool_)
    batch = make_batch(4, 6, truncated=nothing)
    names = ("final_", "segment_", "states")
    columns = {name: x for name, x in batch.to_tree().items() if not name.startswith(names)}
    one.update_from_episodes([batch])
    other.update_from_batch(columns)
    assert_same(other.save()[0], one.save()[0])


@pytest.mark.parametrize("keys", [{"piped": True}, {"cell": "lstm"}], ids=str)
def test_so_it_is_with_what_connectors_and_a_module_remember(
    make_batch: MakeBatch, keys: dict[str, Any]
) -> None:
    one, other = make("impala", **keys), make("impala", **keys)
    states = tree_map(lambda x: np.stack([x] * 4), one.example_states())
    batch = make_batch(4, 6, states=states)
    one.update_from_episodes([batch])
    other.update_from_batch(collate([batch]))
    assert_same(other.save()[0], one.save()[0])
    if "cell" in keys:
        columns = {k: x for k, x in collate([batch]).items() if not k.startswith("segment_")}
        with pytest.raises(ValueError, match="a module with a state needs the segments"):
            other.update_from_batch(columns)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"live": None}, "batch: there is no column 'live'"),
        ({"action_logp": None}, "no column 'action_logp': float32"),
        ({"rewards": np.zeros((3, 6))}, "'?rewards'? must be float32, not float64"),
        ({"rewards": np.zeros((2, 6), np.float32)}, r"actions|observations|rewards"),
        ({"actions": np.full((3, 6), 5)}, "batch: actions hold a number"),
        ({"actions": np.zeros((3, 6), np.float32)}, r"actions of shape .* do not fit the space"),
        ({"observations": np.zeros((3, 6, 5), np.float32)}, "observations"),
        ({"states": {"module": {"h": np.zeros((3, 2))}}}, "have an array at 'module/h'"),
    ],
)
def test_a_column_that_does_not_fit_is_named_and_nothing_has_changed(
    make_batch: MakeBatch, change: dict[str, Any], words: str
) -> None:
    learner = make("ppo")
    before = learner.save()[0]
    columns = {**collate([make_batch()]), **change}
    batch = {name: x for name, x in columns.items() if x is not None}
    with pytest.raises(ValueError, match=words) as wrong:
        learner.update_from_batch(batch)
    assert "\n" not in str(wrong.value)
    assert_same(learner.save()[0], before)
    assert learner.updates == 0


class Noting(Learner):
    """Notes the columns that come to the hook."""

    def before_gradients(self, sample: Columns) -> Columns:
        self.seen = sample
        return sample


def test_columns_of_other_names_come_to_a_hook_as_tensors_from_arrays_too(
    make_batch: MakeBatch,
) -> None:
    learner = Noting(make("impala").core)
    backwards = np.arange(3.0)[::-1]
    own = {"weights": backwards, "nested": {"one": np.array(2)}, "given": torch.ones(2)}
    learner.update_from_batch({**collate([make_batch()]), **own})
    assert learner.seen["weights"].tolist() == [2.0, 1.0, 0.0]
    assert learner.seen["nested"]["one"] == torch.tensor(2)
    assert learner.seen["given"] is own["given"]


@pytest.mark.parametrize(
    ("column", "kind"), [("left", "str"), ([1.0], "list"), (np.array(["left"]), r"an array of <U4")]
)
def test_a_column_of_another_name_that_holds_no_numbers_is_named(
    make_batch: MakeBatch, column: Any, kind: str
) -> None:
    learner = make("impala")
    batch = {**collate([make_batch()]), "side": column}
    with pytest.raises(ValueError, match=f"column 'side' must be a tensor.*, not {kind}"):
        learner.update_from_batch(batch)
    assert learner.updates == 0


def test_what_is_no_batch_is_refused(make_batch: MakeBatch) -> None:
    learner = make("impala")
    with pytest.raises(ValueError, match="no batch: give columns by name"):
        learner.update_from_batch({})
    with pytest.raises(ValueError, match="there is no column 'observations'"):
        learner.update_from_batch({"left": collate([make_batch()])})
    episodes: Any = {"left": [make_batch()]}
    with pytest.raises(ValueError, match="dict is no list of episodes: a"):
        learner.update_from_episodes(episodes)
    with pytest.raises(ValueError, match="list is no sample: give columns by name"):
        learner.step([make_batch()])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["minibatch_size", "num_epochs"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_passes_are_whole_numbers_above_0(make_batch: MakeBatch, name: str, value: Any) -> None:
    learner = make("ppo")
    for call in (learner.update_from_batch, learner.update_from_episodes):
        with pytest.raises(ValueError, match=f"{name} = {value}: must be a whole number"):
            call([make_batch()], **{name: value}, async_update=True)  # type: ignore[operator]


def test_an_argument_that_no_update_has_is_named(make_batch: MakeBatch) -> None:
    learner: Any = make("ppo")
    with pytest.raises(TypeError, match="'epochs' is not an argument: known"):
        learner.update_from_episodes([make_batch()], epochs=2)
    assert learner.updates == 0


def test_ppos_own_passes_may_be_others_for_a_call(make_batch: MakeBatch) -> None:
    batch = make_batch(8, 16)
    size = -(-batch.live_steps // 3)
    one, other = make("ppo", epochs=2, minibatches=3), make("ppo")
    expected = one.update_from_episodes([batch])
    found = other.update_from_episodes([batch], minibatch_size=size, num_epochs=2)
    assert fetch_metrics(found) == fetch_metrics(expected)
    assert_same(other.save()[0], one.save()[0])
    assert other.config.epochs == 4, "the next call is as the config says again"


def test_rows_of_impala_stay_whole_and_count_once(make_batch: MakeBatch) -> None:
    rows = [make_batch(2, 6, seed=seed) for seed in range(3)]
    one, other = make("impala"), make("impala")
    for _ in range(2):
        for row in rows:
            one.update_from_episodes([row])
    live = sum(row.live_steps for row in rows)
    other.update_from_episodes(rows, minibatch_size=-(-live // 3), num_epochs=2)
    assert other.updates == 1
    (a, _), (b, _) = one.save(), other.save()
    ones: Any
    others: Any
    ones, others = a["default"], b["default"]
    for name, x in ones["parameters"].items():
        np.testing.assert_allclose(others["parameters"][name], x, rtol=1e-5, atol=1e-7)
    assert others["steps"] == live
    assert ones["steps"] == 2 * live


@algorithms
@passes
def test_a_group_makes_of_shards_of_columns_what_one_makes_of_all(
    make_batch: MakeBatch, algorithm: str, passes: dict[str, Any]
) -> None:
    """Where rows are cut, IMPALA's and APPO's parts differ."""
    batch = collate([make_batch(8, 6)])
    together = [make(algorithm) for _ in range(2)]
    join(together)
    update(together, shard(batch, 2), **passes)
    assert_same(together[0].get_weights(), together[1].get_weights())
    if algorithm == "ppo" or "minibatch_size" not in passes:
        alone = make(algorithm)
        alone.update_from_batch(batch, **passes)
        found: Any = together[0].get_weights()
        expected: Any = alone.get_weights()
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=2e-3, atol=2e-5)


def test_a_group_does_not_hang_where_one_has_fewer_rows_than_parts(make_batch: MakeBatch) -> None:
    together = [make("impala") for _ in range(2)]
    join(together)
    shares = [[make_batch(1, 6, ends=0.0)], [make_batch(6, 6, ends=0.0)]]
    update(together, shares, minibatch_size=8)
    assert_same(together[0].get_weights(), together[1].get_weights())
