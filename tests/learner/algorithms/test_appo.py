"""APPO against its equations, and old rows beside new ones."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.slow_losses import Linear, appo_loss, gradient, in_training, slow_gradients, weights_of
from support.small_cores import copied
from torch import Tensor

from juggler.learner.algorithms.appo import AppoConfig
from juggler.learner.algorithms.appo.core import Appo
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.core.gradient_core import TrainState
from juggler.learner.core.learner_core import ALONE, Columns, Seam, StepOutput
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.module_specs import build_module
from juggler.testing import check_learner


def make_core(module: Any = Linear, model: dict[str, Any] | None = None, **config: Any) -> Appo:
    make = partial(build_module, module, VECTOR, TWO, model or {})
    return Appo(make, AppoConfig(**config))


def named(core: Appo, vector: Tensor) -> dict[str, Tensor]:
    return core.flat.named(vector)


@pytest.mark.parametrize("reset_rows", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lambda_": 0.8, "rho_bar": 2.0, "rho_bar_pg": 1.5, "behaviour_clip": 1.1, "clip": 0.1},
        {"target_kl": 0.01, "kl_coefficient": 0.7, "reward_scale": 0.3},
    ],
)
def test_gradients_are_those_of_the_loss_written_out_step_by_step(
    make_batch: MakeBatch, reset_rows: bool, settings: dict[str, Any]
) -> None:
    """Where the parameters have moved on from the target network's."""
    core = make_core(entropy_coefficient=0.1, gamma=0.9, lr=0.1, target_period=10, **settings)
    state = core.init(seed=3)
    target = weights_of(named(core, state["parameters"]))
    for seed in range(3):
        state = core.step(state, collate([make_batch(4, 9, seed=seed)])).state
    batch = make_batch(5, 9, seed=5, reset_rows=reset_rows)
    assert len(batch.final_rows) > 1
    grads, aux = core.grads(state, collate([batch]))

    new = weights_of(named(core, state["parameters"]))
    assert np.abs(new["policy.weight"] - target["policy.weight"]).max() > 0.05
    beta = core.config.kl_coefficient if core.config.target_kl is not None else 0.0
    expected = gradient(lambda w: appo_loss(w, target, batch, core.config, beta), new)
    found = named(core, grads)
    assert aux.live_steps == batch.live_steps
    assert 0.0 < aux.metrics["clip_fraction"] < 1.0
    for name, slopes in expected.items():
        np.testing.assert_allclose(found[name], slopes, rtol=1e-4, atol=1e-5)


def test_the_target_network_is_renewed_every_so_many_steps(make_batch: MakeBatch) -> None:
    core = make_core(target_period=3, lr=0.1)
    state = core.init(seed=0)
    history = [state["parameters"].clone()]
    for seed in range(7):
        state = core.step(state, collate([make_batch(seed=seed)])).state
        history.append(state["parameters"].clone())
        target = state["extra"]["target"]
        assert torch.equal(target, history[(seed + 1) // 3 * 3])
    assert not torch.equal(history[0], history[3])


def test_the_weight_of_the_distance_follows_the_distance(make_batch: MakeBatch) -> None:
    def coefficients(lr: float, target_kl: float) -> list[float]:
        core = make_core(target_period=2, lr=lr, target_kl=target_kl, kl_coefficient=1.0)
        state = core.init(seed=0)
        found = []
        for seed in range(4):
            state = core.step(state, collate([make_batch(seed=seed)])).state
            found.append(float(state["extra"]["kl_coefficient"]))
        return found

    # It is adapted where the target network is renewed: after the second and the fourth step.
    assert coefficients(lr=0.3, target_kl=1e-6) == [1.0, 2.0, 2.0, 4.0]
    assert coefficients(lr=1e-4, target_kl=1.0) == [1.0, 0.5, 0.5, 0.25]


class Noting(Appo):
    """Notes which samples its steps are made on."""

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        self.noted = [*getattr(self, "noted", []), float(sample["rewards"][0, 0])]
        return super().step(state, sample, seam)


def test_a_learner_uses_each_batch_so_many_times(make_batch: MakeBatch) -> None:
    make = partial(build_module, Linear, VECTOR, TWO, {})
    core = Noting(make, AppoConfig(buffer_batches=4, batch_uses=2, lr=0.01))
    learner = Learner(core)
    batches = [make_batch(seed=seed, ends=0.0) for seed in range(12)]
    for number, batch in enumerate(batches):
        batch.rewards[0, 0] = number
        metrics = learner.update_from_episodes([batch])
        assert metrics["skipped"] == 0.0
    uses = Counter(core.noted)
    assert [uses[number] for number in range(12)] == [2] * 10 + [1] * 2
    assert core.noted[-4:] == [8, 10, 9, 11]
    assert learner.updates == 12
    assert learner.state["moments"]["updates"] == len(core.noted) == 22
    learner.forget()
    learner.update_from_episodes([batches[0]])
    assert core.noted[22:] == [0], "what was kept is not used any more"


def test_schedules_follow_the_environments_steps_and_not_the_uses(make_batch: MakeBatch) -> None:
    core = make_core(lr=[[0, 1e-3], [100, 0.0]], batch_uses=2)
    sample = collate([make_batch(4, 10, ends=0.0)])
    state, seen = core.init(seed=0), []
    for _ in range(4):
        output = core.step(copied(state), sample)
        state = output.state
        seen.append(float(output.metrics["lr"]))
    assert seen == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3])


# IMPALA and APPO with old rows beside new ones.


MEMORY = {"hidden_sizes": [8], "recurrent": "gru", "recurrent_size": 6}


class NotingImpala(Impala):
    """Notes what each step is made on, and from which state."""

    def step(
        self, state: TrainState, sample: Columns, seam: Seam = ALONE
    ) -> StepOutput[TrainState]:
        before = {**state, "parameters": state["parameters"].clone()}
        self.noted = [*getattr(self, "noted", []), (before, sample)]
        return super().step(state, sample, seam)


def make_mixed(kind: Any = Impala, model: dict[str, Any] | None = None, **config: Any) -> Any:
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
    core = make_mixed(NotingImpala, model, lr=0.05, gamma=0.9, replay_share=0.6, burn_in=burn_in)
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
    for name, found in core.flat.named(grads).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-3, atol=1e-5)


def learned_steps(batch: EpisodeBatch, burn_in: int) -> int:
    """Live steps but for those of a burn-in."""
    goes_on = (batch.segment_starts == 0) & (batch.segment_offsets > 0)
    return batch.live_steps - int(np.minimum(batch.segment_lengths[goes_on], burn_in).sum())


@pytest.mark.parametrize("kind", [Impala, Appo])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_schedules_count_new_steps_alone(
    make_batch: MakeBatch, kind: Any, micro_batches: int
) -> None:
    core = make_mixed(kind, lr=[[0, 1e-3], [1000, 0.0]], micro_batches=micro_batches)
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
    samples = [Learner(make_mixed()).collated([make_batch(3, 6, seed=seed)]) for seed in range(5)]
    check_learner(lambda seed: Learner(make_mixed(kind), seed=seed), samples)


def test_members_of_a_population_share_the_old_rows(make_batch: MakeBatch) -> None:
    alone = Learner(make_mixed())
    together = Learner(Population(make_mixed(), size=2, same_start=True))
    for seed in range(4):
        for learner in (alone, together):
            learner.update_from_episodes([make_batch(3, 6, seed=seed)])
    member = together.core.member(together.state, 1)
    torch.testing.assert_close(member, alone.state, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="replay_share"):
        Population(make_mixed(), hyperparameters={"replay_share": [0.1, 0.5]})
