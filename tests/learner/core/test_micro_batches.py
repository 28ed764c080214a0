"""Micro-batches: in however many parts a sample is computed, its gradient is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.states import copied
from torch import nn

from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.micro_batches import micro_batches
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.building import build_module
from juggler.runtime.modules.rl_module import RLModule

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
TWO = spaces.Discrete(2)
plain = partial(build_module, None, VECTOR, TWO, {"hidden_sizes": [8]})
lstm = partial(
    build_module, None, VECTOR, TWO, {"hidden_sizes": [8], "recurrent": "lstm", "recurrent_size": 5}
)


def uneven(make_batch: MakeBatch, module: RLModule, rows: int = 7) -> EpisodeBatch:
    """Rows that end and go on, one of them with one live step alone, and one with none."""
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


def test_a_part_holds_its_rows_and_no_others(make_batch: MakeBatch) -> None:
    batches = [make_batch(3, 6, seed=seed, ends=0.4) for seed in range(2)]
    parts = micro_batches(collate(batches), 2)
    for part, batch in zip(parts, batches, strict=True):
        alone = collate([batch])
        assert part.keys() == alone.keys()
        for name, column in alone.items():
            if name != "states":
                assert torch.equal(part[name], column), name


def test_nothing_live_at_all_is_no_gradient(make_batch: MakeBatch) -> None:
    core = Impala(plain, ImpalaConfig(micro_batches=2))
    state = core.init(0)
    nothing = make_batch(4, 3, ends=0.0, live=np.zeros((4, 3), bool))
    output = core.step(copied(state), collate([nothing]))
    assert torch.equal(output.state["parameters"], state["parameters"])
    assert output.metrics["skipped"] == 0


def test_a_run_takes_the_key(make_batch: MakeBatch) -> None:
    found = [
        fetch_metrics(
            build_learner(
                {"algorithm": "impala", "micro_batches": count}, None, VECTOR, TWO, {}
            ).update_from_episodes([make_batch(5, 6)])
        )
        for count in (1, 4)
    ]
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"], rel=1e-4)
    assert found[0] != found[1]  # computed in another way


def test_a_population_with_samples_of_its_members_own_refuses_them() -> None:
    core = Impala(plain, ImpalaConfig(micro_batches=2))
    with pytest.raises(ValueError, match="micro_batches = 2: vmap cannot"):
        Population(core, size=2, own_samples=True)
