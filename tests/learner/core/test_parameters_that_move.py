"""A core of a user's own says which parameters an optimizer step changes."""

from __future__ import annotations

import pytest
import torch
from support.squared_values import MODULE, SAMPLE, SquaredValues
from torch import Tensor

import juggler


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
