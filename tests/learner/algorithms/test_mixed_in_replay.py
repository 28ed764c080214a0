"""IMPALA and APPO with old rows beside new ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.slow_losses import in_training, slow_gradients

from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.appo.core import Appo
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import TrainState
from juggler.learner.core.learner_core import ALONE, Columns, Seam, StepOutput
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module
from juggler.testing import check_learner

MEMORY = {"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 6}


class Noting(Impala):
    """Notes what each step is made on, and from which state."""

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        before = {**state, "parameters": state["parameters"].clone()}
        self.noted = [*getattr(self, "noted", []), (before, sample)]
        return super().step(state, sample, seam)


def make_core(kind: Any = Impala, model: dict[str, Any] | None = None, **config: Any) -> Any:
    make = partial(build_module, None, VECTOR, TWO, model or {"hidden_sizes": [8]})
    keys = AppoConfig if issubclass(kind, Appo) else ImpalaConfig
    return kind(make, keys(**{"replay_share": 0.5, **config}))


def batch_for(make_batch: MakeBatch, seed: int, model: Any, rows: int = 3) -> EpisodeBatch:
    rng = np.random.default_rng(seed)
    states: dict[str, Any] = {}
    if model:
        states["module"] = {"hidden": rng.standard_normal((rows, 6), dtype=np.float32)}
    return make_batch(rows, 6, seed=seed, states=states)


def row_of(batch: EpisodeBatch, row: int) -> dict[str, Any]:
    """One row of a batch as a batch of its own."""
    tree: dict[str, Any] = batch.to_tree()
    found = {}
    for name, column in tree.items():
        if name.startswith(("final_", "segment_")):
            of_row = tree["final_rows" if name.startswith("final_") else "segment_rows"] == row
            found[name] = (
                np.zeros_like(column[of_row]) if name.endswith("_rows") else column[of_row]
            )
        elif name == "states":
            found[name] = {
                key: {k: x[row : row + 1] for k, x in own.items()} for key, own in column.items()
            }
        else:
            found[name] = column[row : row + 1]
    return found


@pytest.mark.parametrize(
    ("model", "burn_in"), [(None, 0), (MEMORY, 0), (MEMORY, 2)], ids=["plain", "gru", "burn-in"]
)
def test_old_rows_are_learned_from_by_v_trace_under_the_newest_policy(
    make_batch: MakeBatch, model: Any, burn_in: int
) -> None:
    """A mixed sample's gradient follows the equations, row by row."""
    core = make_core(Noting, model, lr=0.05, gamma=0.9, replay_share=0.6, burn_in=burn_in)
    learner = Learner(core)
    batches = [batch_for(make_batch, seed, model) for seed in range(5)]
    for batch in batches:
        learner.update_from_episodes([batch])
    state, columns = core.noted[-1]
    candidates = [row_of(batch, row) for batch in batches for row in range(batch.rows)]
    chosen = []
    for row in range(len(columns["live"])):
        (found,) = (
            each
            for each in candidates
            if np.array_equal(each["observations"][0], columns["observations"][row].numpy())
        )
        chosen.append(EpisodeBatch.from_tree(found))
    assert len(chosen) > 3, "there are old rows"
    assert any(len(each.final_rows) for each in chosen[3:]), "with observations to bootstrap from"

    module = in_training(core, state, core._make_module)
    steps = [learned_steps(each, burn_in if model else 0) for each in chosen]
    expected = {
        name: sum(
            count * slow_gradients(module, each, core.config)[name]
            for count, each in zip(steps, chosen, strict=True)
            if count
        )
        / sum(steps)
        for name, _ in module.named_parameters()
    }
    grads, _ = core.grads(state, columns)
    for name, gradient in core.flat.named(grads).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5)


def learned_steps(batch: EpisodeBatch, burn_in: int) -> int:
    """Live steps but for those of a burn-in."""
    goes_on = (batch.segment_starts == 0) & (batch.segment_offsets > 0)
    return batch.live_steps - int(np.minimum(batch.segment_lengths[goes_on], burn_in).sum())


@pytest.mark.parametrize("kind", [Impala, Appo])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_schedules_count_new_steps_alone(
    make_batch: MakeBatch, kind: Any, micro_batches: int
) -> None:
    core = make_core(kind, lr=[[0, 1e-3], [1000, 0.0]], micro_batches=micro_batches)
    learner, arrived = Learner(core), 0
    uses = core.config.batch_uses if kind is Appo else 1
    for seed in range(12):
        batch = make_batch(4, 6, seed=seed)
        arrived += batch.live_steps
        metrics = fetch_metrics(learner.update_from_episodes([batch]))
    assert metrics["replayed_steps"] == pytest.approx(20, abs=8)
    assert metrics["replay_age"] >= 1
    steps = int(learner.state["steps"])
    assert steps == arrived if uses == 1 else arrived < steps < 2 * arrived


@pytest.mark.parametrize("kind", [Impala, Appo])
def test_learners_repeat_themselves_and_go_on_from_what_they_saved(
    make_batch: MakeBatch, kind: Any
) -> None:
    samples = [Learner(make_core()).collated([make_batch(3, 6, seed=seed)]) for seed in range(5)]
    check_learner(lambda seed: Learner(make_core(kind), seed=seed), samples)


def test_members_of_a_population_share_the_old_rows(make_batch: MakeBatch) -> None:
    alone = Learner(make_core())
    together = Learner(Population(make_core(), size=2, same_start=True))
    for seed in range(4):
        for learner in (alone, together):
            learner.update_from_episodes([make_batch(3, 6, seed=seed)])
    member = together.core.member(together.state, 1)
    torch.testing.assert_close(member, alone.state, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="replay_share"):
        Population(make_core(), hyperparameters={"replay_share": [0.1, 0.5]})
