"""What a `loss` returns is checked, and an error says what to return instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.squared_values import MODULE, SAMPLE, SquaredValues
from torch import Tensor

import juggler
from juggler.learner.core.forward import NamedColumns


class Mine(SquaredValues):
    """Returns what `change` makes of the loss."""

    change: Callable[[juggler.Loss], Any] = staticmethod(lambda loss: loss)

    def loss(
        self,
        forward: juggler.Forward,
        columns: juggler.Columns,
        state: juggler.TrainState,
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
    (lambda loss: None, "of type NoneType: return juggler.Loss"),
    (lambda loss: loss._replace(total=MANY + loss.total), r"total is a tensor of shape \(4, 8\)"),
    (lambda loss: loss._replace(total=0.5), "total is 0.5: return the mean over live steps"),
    (lambda loss: loss._replace(total=loss.total.detach()), "total takes no gradient"),
    (lambda loss: loss._replace(live_steps=32), "live_steps is 32: return the number of live"),
    (lambda loss: loss._replace(live_steps=torch.tensor(1.0)), "live_steps is a tensor of shape"),
    (lambda loss: loss._replace(metrics=[]), "metrics is of type list: return a dict"),
    (with_metric(0.5), r"metrics\['odd'\] is 0.5: return a tensor of shape \(\)"),
    (with_metric(MANY), r"metrics\['odd'\] is a tensor of shape \(4, 8\)"),
    (lambda loss: loss._replace(means={"kl": torch.tensor(0.0)}), r"the means \['kl'\], and the"),
    (
        lambda loss: loss._replace(priorities=torch.zeros(ROWS, 1)),
        rf"priorities is a tensor of shape \({ROWS}, 1\) and torch.float32, of a sample of {ROWS} "
        rf"rows: return a number for each row, a tensor of shape \({ROWS},\)",
    ),
    (lambda loss: loss._replace(priorities=loss.total), r"priorities is a tensor of shape \(\)"),
    (lambda loss: loss._replace(priorities=[1.0] * ROWS), "priorities is of type list"),
]


@pytest.mark.parametrize(("change", "said"), CASES, ids=[said for _, said in CASES])
def test_what_is_no_loss_is_named_with_what_to_return_instead(
    change: Callable[[juggler.Loss], Any], said: str
) -> None:
    core = mine(change)
    with pytest.raises(ValueError, match=f"^Mine.loss returned .*{said}"):
        core.grads(core.init(0), SAMPLE)


def test_a_loss_that_is_one_is_learned_from_and_so_is_that_of_a_population() -> None:
    core = mine(lambda loss: loss)
    output = core.step(core.init(0), SAMPLE)
    assert output.metrics["grad_norm"] > 0
    population = juggler.Population(core, size=2)
    metrics = population.step(population.init(0), SAMPLE).metrics
    assert all(metrics[f"grad_norm[{index}]"] > 0 for index in range(2))


def test_the_loss_of_a_population_is_checked_too() -> None:
    population = juggler.Population(mine(with_metric(0.5)), size=2)
    with pytest.raises(ValueError, match=r"metrics\['odd'\] is 0.5"):
        population.step(population.init(0), SAMPLE)


class Mistyped(Mine):
    """Asks for a column that there is not."""

    def loss(
        self,
        forward: juggler.Forward,
        columns: juggler.Columns,
        state: juggler.TrainState,
    ) -> juggler.Loss:
        assert "advantages" not in columns
        return super().loss(forward, {**columns, "rewards": columns["reward"]}, state)


def test_a_column_that_there_is_not_is_named_with_the_nearest_one() -> None:
    core = Mistyped(MODULE, juggler.LearnerConfig())
    with pytest.raises(KeyError, match=r"there is no column 'reward': did you mean 'rewards'\?"):
        core.grads(core.init(0), SAMPLE)


def test_functions_of_torch_map_over_columns_as_over_a_dict() -> None:
    rewards = torch.arange(6.0).view(2, 3)  # [N, T]
    columns = NamedColumns({"live": torch.ones(2, 3), "rewards": rewards})
    sums = torch.func.vmap(lambda row: (row["rewards"] * row["live"]).sum())(columns)  # [N]
    assert sums.tolist() == [3.0, 12.0]
