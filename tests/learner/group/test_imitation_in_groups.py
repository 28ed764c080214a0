"""Learners of a group that imitate: which demonstrations each of them draws."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from support.batches import TWO, VECTOR, MakeBatch
from support.learner_groups import join, update
from support.random_episodes import random_episodes, write

from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.imitation.discriminator import DemonstratedSteps, Discriminator
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.config import ImitationConfig
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.group.peers import state_hash
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import ActorCritic, QNetwork

pytest.importorskip("minari", reason="needs juggler[datasets]")

MODEL = {"hidden_sizes": [8]}


def inner(name: str) -> GradientCore:
    if name == "ppo":
        config = PpoConfig(batch_size=64, minibatches=2, epochs=1)
        return Ppo(partial(ActorCritic, VECTOR, TWO, MODEL), config)
    kept = DqnConfig(
        n_step=1, replay_begin=0, replay_batch_size=16, replay_ratio=1.0, save_replay=False
    )
    return Dqn(partial(QNetwork, VECTOR, TWO, MODEL), kept)


@pytest.fixture
def own(tmp_path: Path) -> ImitationConfig:
    shown = write(tmp_path / "shown", random_episodes([40, 60], VECTOR, TWO), VECTOR, TWO)
    return ImitationConfig(demonstrations=str(shown), model=MODEL, minibatch_size=16)


class Noting(DemonstratedSteps):
    """Notes which of them are drawn."""

    places: list[torch.Tensor]

    def drawn(self, places: torch.Tensor) -> DemonstratedSteps:
        self.places.append(places)
        return super().drawn(places)


def make(name: str, own: ImitationConfig) -> tuple[Learner, list[torch.Tensor]]:
    """A learner, and the places of what it will draw."""
    core = Discriminator(inner(name), own)
    demonstrations = Noting(*core._demonstrations)
    demonstrations.places = []
    core._demonstrations = demonstrations
    return Learner(core, seed=0), demonstrations.places


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_learners_of_a_group_draw_different_demonstrations(
    make_batch: MakeBatch, own: ImitationConfig, name: str
) -> None:
    made = [make(name, own) for _ in range(2)]
    group = [learner for learner, _ in made]
    join(group)
    for seed in range(3):
        update(group, [[make_batch(4, 8, seed=2 * seed + rank)] for rank in range(2)])
    drawn = [places for _, places in made]
    assert len(drawn[0]) == len(drawn[1]) > 2, "as often as one another"
    assert not any(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    assert len(set(map(state_hash, group))) == 1, "and still have one state"


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_break_at_a_checkpoint_changes_no_draw_of_demonstrations(
    make_batch: MakeBatch, own: ImitationConfig, name: str
) -> None:
    def go_on(made: list[tuple[Learner, list[torch.Tensor]]], first: int) -> None:
        for seed in range(first, first + 2):
            shards = [[make_batch(4, 8, seed=2 * seed + rank)] for rank in range(2)]
            update([learner for learner, _ in made], shards)

    straight, resumed = ([make(name, own) for _ in range(2)] for _ in range(2))
    join([learner for learner, _ in straight])
    go_on(straight, 0)
    saved = straight[0][0].save()
    for (learner, places), (other, _) in zip(straight, resumed, strict=True):
        learner.forget()
        places.clear()
        other.restore(*saved)
    join([learner for learner, _ in resumed])
    go_on(straight, 2)
    go_on(resumed, 2)
    for (one, places), (other, found) in zip(straight, resumed, strict=True):
        assert len(places) == len(found) > 1
        assert all(torch.equal(*pair) for pair in zip(places, found, strict=True))
        assert state_hash(one) == state_hash(other)
