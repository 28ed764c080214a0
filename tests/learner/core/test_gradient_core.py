"""What a gradient core does with a loss and its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import TWO, VECTOR
from support.small_cores import MODULE, SAMPLE, MakeBatch, SquaredValues, make_core
from torch import Tensor, nn

import juggler
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.around_core import OwnNetwork
from juggler.learner.core.forward import NamedColumns
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import ALONE
from juggler.learner.core.population import Population
from juggler.learner.core.sequences import with_recurring_shapes
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.tracing import TraceCache


class Tied(nn.Module):
    """Two layers with the same weights, as users' encoders may have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum(1)


def test_parameters_that_a_network_has_twice_are_one() -> None:
    network, x = OwnNetwork("tied", Tied), torch.randn(5, 3)
    own = network.beginning(0)
    assert own["trained"].shape == (9 + 3 + 3,)
    weights, *biases = own["trained"].split([9, 3, 3])
    weights = weights.view(3, 3)
    expected = ((x @ weights.T + biases[0]) @ weights.T + biases[1]).sum(1)
    torch.testing.assert_close(network(own, own["trained"], x), expected)
    after, _ = network.stepped(
        own, lambda trained: [(network(own, trained, x).sum(), torch.tensor(5))], 1e-3, ALONE
    )
    assert not torch.equal(after["trained"], own["trained"])


@pytest.mark.parametrize("given", [{"default": lambda: None}, MODULE()])
def test_a_core_that_is_given_no_function_says_what_it_takes(given: Any) -> None:
    with pytest.raises(TypeError, match="Impala: give one function that"):
        juggler.Impala(given, juggler.ImpalaConfig())


def test_a_core_refuses_the_config_of_another_algorithm() -> None:
    for config in (PpoConfig(), juggler.LearnerConfig()):
        with pytest.raises(TypeError, match=r"Impala: config is of type .* ImpalaConfig"):
            Impala(MODULE, config)  # type: ignore[arg-type]
    Impala(MODULE, juggler.AppoConfig())  # derived from ImpalaConfig
    SquaredValues(MODULE, PpoConfig())
    with_any = type("WithAny", (Impala,), {"__annotations__": {"config": Any}})
    with_any(MODULE, juggler.ImpalaConfig())


@pytest.mark.parametrize("given", [juggler.Impala, MODULE, MODULE()])
def test_a_learner_or_population_of_what_is_no_core_says_what_it_takes(given: Any) -> None:
    with pytest.raises(TypeError, match="give a core, such as"):
        juggler.Learner(given)
    with pytest.raises(ValueError, match="cannot be in a population: it is not a GradientCore"):
        Population(given, size=2)


# A core of a user's own says which parameters an optimizer step changes.


class OnlyBiases(SquaredValues):
    """Learns with biases alone."""

    def moving(self, state: juggler.TrainState, live_steps: Tensor) -> Tensor:
        return torch.tensor([name.endswith("bias") for name in self.flat.sizes])  # [K]


class Counting(OnlyBiases):
    counts_each = True


def learner(core: type[OnlyBiases], optimizer: str = "adam") -> juggler.Learner:
    config = juggler.LearnerConfig(lr=0.1, optimizer=optimizer)
    return juggler.Learner(core(MODULE, config), seed=0)


@pytest.mark.parametrize(("core", "optimizer"), [(Counting, "adam"), (OnlyBiases, "rmsprop")])
def test_the_others_stay_as_they_are(core: type[OnlyBiases], optimizer: str) -> None:
    learns = learner(core, optimizer)
    sizes = learns.core.flat.sizes  # type: ignore[attr-defined]
    before = learns.state["parameters"].clone().split(list(sizes.values()))  # [P] in K parts
    for _ in range(3):
        learns.step(SAMPLE)
    after = learns.state["parameters"].split(list(sizes.values()))
    pairs = zip(sizes, before, after, strict=True)
    moved = [name for name, old, new in pairs if not torch.equal(old, new)]
    assert moved
    assert all(name.endswith("bias") for name in moved)


def test_adam_counts_the_steps_of_each_or_says_how_to_have_them_counted() -> None:
    with pytest.raises(ValueError, match="set counts_each = True in that class"):
        learner(OnlyBiases).step(SAMPLE)


# What a `loss` returns is checked, and an error says what to return instead.


class Mine(SquaredValues):
    """Returns what `change` makes of the loss."""

    change: Callable[[juggler.Loss], Any] = staticmethod(lambda loss: loss)

    def loss(
        self, forward: juggler.Forward, columns: juggler.Columns, state: juggler.TrainState
    ) -> juggler.Loss:
        changed: juggler.Loss = self.change(super().loss(forward, columns, state))
        return changed


def mine(change: Callable[[juggler.Loss], Any]) -> Mine:
    core = Mine(MODULE, juggler.LearnerConfig())
    core.change = change
    return core


def with_metric(value: Any) -> Callable[[juggler.Loss], juggler.Loss]:
    return lambda loss: loss._replace(metrics={"odd": value})


MANY: Tensor = torch.zeros(4, 8)
ROWS = len(SAMPLE["live"])

CASES: list[tuple[Callable[[juggler.Loss], Any], str]] = [
    (lambda loss: loss.total, r"a tensor of shape \(\) and torch.float32: return juggler.Loss\("),
    (lambda loss: None, "a value of type NoneType: return juggler.Loss"),
    (lambda loss: loss._replace(total=MANY + loss.total), r"total is a tensor of shape \(4, 8\)"),
    (lambda loss: loss._replace(total=0.5), "total is 0.5: return the mean over live steps"),
    (lambda loss: loss._replace(total=loss.total.detach()), "total takes no gradient"),
    (lambda loss: loss._replace(live_steps=32), "live_steps is 32: return the number of live"),
    (lambda loss: loss._replace(live_steps=torch.tensor(1.0)), "live_steps is a tensor of shape"),
    (lambda loss: loss._replace(metrics=[]), "metrics is a value of type list: return a dict"),
    (with_metric(0.5), r"metrics\['odd'\] is 0.5: return a tensor of shape \(\)"),
    (with_metric(MANY), r"metrics\['odd'\] is a tensor of shape \(4, 8\)"),
    (lambda loss: loss._replace(means={"kl": torch.tensor(0.0)}), r"the means \['kl'\], and the"),
    (
        lambda loss: loss._replace(priorities=torch.zeros(ROWS, 1)),
        rf"priorities is a tensor of shape \({ROWS}, 1\) and torch.float32: return a number for "
        rf"each of {ROWS} rows, a tensor of shape \({ROWS},\)",
    ),
    (lambda loss: loss._replace(priorities=loss.total), r"priorities is a tensor of shape \(\)"),
    (lambda loss: loss._replace(priorities=[1.0] * ROWS), "priorities is a value of type list"),
]


@pytest.mark.parametrize(("change", "said"), CASES, ids=[said for _, said in CASES])
def test_what_is_no_loss_is_named_with_what_to_return_instead(
    change: Callable[[juggler.Loss], Any], said: str
) -> None:
    core = mine(change)
    with pytest.raises(ValueError, match=f"^Mine.loss returned .*{said}"):
        core.grads(core.init(0), SAMPLE)


def test_a_metric_with_the_name_of_the_optimizers_is_not_replaced_by_it() -> None:
    core = mine(lambda loss: loss._replace(metrics={"lr": loss.total.detach()}))
    with pytest.raises(ValueError, match="the optimizer has a metric 'lr'; choose"):
        core.step(core.init(0), SAMPLE)


class Mistyped(Mine):
    """Asks for a column that there is not."""

    def loss(
        self, forward: juggler.Forward, columns: juggler.Columns, state: juggler.TrainState
    ) -> juggler.Loss:
        assert "advantages" not in columns
        return super().loss(forward, {**columns, "rewards": columns["reward"]}, state)


def test_a_column_that_there_is_not_is_named_with_the_nearest_one() -> None:
    core = Mistyped(MODULE, juggler.LearnerConfig())
    with pytest.raises(KeyError, match="there is no column 'reward': did"):
        core.grads(core.init(0), SAMPLE)


def test_functions_of_torch_map_over_columns_as_over_a_dict() -> None:
    rewards = torch.arange(6.0).view(2, 3)  # [N, T]
    columns = NamedColumns({"live": torch.ones(2, 3), "rewards": rewards})
    sums = torch.func.vmap(lambda row: (row["rewards"] * row["live"]).sum())(columns)  # [N]
    assert sums.tolist() == [3.0, 12.0]


# Where a loss is traced, columns of any length have the same shapes, and the same gradients.


ROW_COUNT, STEPS = 32, 32


def sample_of(make_batch: MakeBatch, seed: int, ends: float = 0.02) -> Any:
    state = {"hidden": torch.ones(ROW_COUNT, 8)}  # [N, 8]
    batch = make_batch(ROW_COUNT, STEPS, seed=seed, ends=ends)
    return {**collate([batch]), "states": {"module": state}}


def truncated_episodes(sample: Any) -> int:
    return len(sample[c.FINAL_ROWS])


def test_numbers_of_truncated_episodes_come_again_and_take_little_room(
    make_batch: MakeBatch,
) -> None:
    before, after = set(), set()
    for seed in range(20):
        sample = sample_of(make_batch, seed)
        before.add(truncated_episodes(sample))
        columns = with_recurring_shapes(sample)
        count = len(columns[c.FINAL_ROWS])
        after.add(count)
        assert 0 <= count - truncated_episodes(sample) < ROW_COUNT * STEPS / 64
        assert {len(columns[name]) for name in c.FINALS if name in columns} == {count}
        assert not columns.keys() & set(c.SEGMENTS)
        assert sample.keys() >= set(c.SEGMENTS), "a sample stays as it is"
    assert len(before) > 4 * len(after)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_the_same_up_to_rounding(make_batch: MakeBatch, name: str) -> None:
    core = make_core(name)
    state, sample = core.init(seed=1), sample_of(make_batch, seed=3)
    assert truncated_episodes(sample) % (ROW_COUNT * STEPS // 64), "it is rounded up"
    found = []
    for traces in (None, TraceCache(1, math.inf)):
        core._traces = traces
        grads, _ = core.grads(state, sample)
        found.append(grads)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_one_trace_serves_samples_with_many_numbers_of_truncated_episodes(
    make_batch: MakeBatch, name: str
) -> None:
    core = make_core(name)
    core._traces = TraceCache(1, math.inf)
    state = core.init(seed=1)
    samples = [sample_of(make_batch, seed) for seed in range(20)]
    for sample in samples:
        core.grads(state, sample)
    assert len(set(map(truncated_episodes, samples))) > 4 * len(core._traces._calls)


# Micro-batches: in however many parts a sample is computed, its gradient is the same.


plain = partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [8]})
lstm = partial(
    build_module, None, VECTOR, TWO, {"hidden_sizes": [8], "recurrent": "lstm", "recurrent_size": 5}
)


def uneven(make_batch: MakeBatch, module: RLModule, rows: int = 7) -> EpisodeBatch:
    """Rows that end and continue, with one live step, and none."""
    rng = np.random.default_rng(0)
    live = np.ones((rows, 6), bool)
    live[1, 1:], live[4] = False, False
    terminated = np.zeros_like(live)
    truncated = np.zeros_like(live)
    terminated[0, 3] = truncated[2, 2] = truncated[2, 5] = truncated[6, 0] = True
    state = module.get_initial_state()
    states: dict[str, Any] = {}
    if state:
        states["module"] = _drawn(state, rows, rng)
    return make_batch(
        rows, 6, seed=3, live=live, terminated=terminated, truncated=truncated, states=states
    )


def _drawn(tree: Any, rows: int, rng: np.random.Generator) -> Any:
    if isinstance(tree, dict):
        return {key: _drawn(each, rows, rng) for key, each in tree.items()}
    return rng.standard_normal((rows, *tree.shape), dtype=np.float32)


def check_the_same(make_core: Callable[[int], GradientCore], sample: Any, count: int) -> None:
    whole, parted = make_core(1), make_core(count)
    state = whole.init(seed=2)
    expected, aux = whole.grads(state, sample)
    found, other = parted.grads(state, sample)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert other.live_steps == aux.live_steps
    assert other.metrics.keys() == aux.metrics.keys()
    for name in ("policy_loss", "value_loss", "entropy", "kl"):
        torch.testing.assert_close(other.metrics[name], aux.metrics[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 7, 100])
@pytest.mark.parametrize(
    ("make", "settings"),
    [(plain, {}), (lstm, {}), (lstm, {"burn_in": 2})],
    ids=["feed-forward", "lstm", "lstm with a burn-in"],
)
def test_the_gradient_is_that_of_the_whole(
    make_batch: MakeBatch, make: Any, settings: dict[str, Any], count: int
) -> None:
    def make_core(micro_batches: int) -> Impala:
        return Impala(make, ImpalaConfig(micro_batches=micro_batches, **settings))

    batch = uneven(make_batch, make())
    check_the_same(make_core, collate([batch]), count)


@pytest.mark.parametrize("make", [plain, lstm], ids=["feed-forward", "lstm"])
def test_each_minibatch_of_an_algorithm_is_computed_in_parts(
    make_batch: MakeBatch, make: Any
) -> None:
    def make_core(micro_batches: int) -> Ppo:
        return Ppo(
            make,
            PpoConfig(micro_batches=micro_batches, epochs=2, minibatches=2, optimizer_epsilon=1e-2),
        )

    sample = collate([uneven(make_batch, make())])
    check_the_same(make_core, sample, 3)
    whole, parted = make_core(1), make_core(3)
    expected, found = (core.step(core.init(0), sample) for core in (whole, parted))
    torch.testing.assert_close(found.state["parameters"], expected.state["parameters"])
    assert not torch.equal(whole.init(0)["parameters"], expected.state["parameters"])


def test_buffers_go_from_one_part_to_the_next(make_batch: MakeBatch) -> None:
    def make() -> RLModule:
        module = plain()
        module.policy_head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
        return module

    core = Impala(make, ImpalaConfig(micro_batches=3))
    state = core.step(core.init(0), collate([make_batch(6, 5)])).state
    (count,) = [x for name, x in state["buffers"].items() if "num_batches" in name]
    assert count == 3


def test_a_population_with_samples_of_its_members_own_refuses_them() -> None:
    core = Impala(plain, ImpalaConfig(micro_batches=2))
    with pytest.raises(ValueError, match="micro_batches = 2: vmap cannot"):
        Population(core, size=2, own_samples=True)
