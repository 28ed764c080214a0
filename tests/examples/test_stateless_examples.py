"""The examples of cores and learners do what they say."""

from __future__ import annotations

import inspect
import re
import runpy
from functools import partial

import pytest
import torch
from test_examples import EXAMPLES, RunPython

from juggler import Dqn, DqnConfig, QNetwork, Replay, StepOutput
from juggler.learner.core.learner_core import LearnerCore


@pytest.mark.long
def test_of_sixteen_learning_rates_on_one_stream_some_learn_and_the_least_do_not(
    run_python: RunPython,
) -> None:
    output = run_python(EXAMPLES / "learning_rates.py")
    returns = [float(each) for each in re.findall(r"return +([\d.]+)", output)]
    assert len(returns) == 16
    assert max(returns[:4]) < 60, "1e-5 is too little"
    assert max(returns) > 200, output


@pytest.mark.long
def test_a_reward_for_what_is_new_leads_to_the_treasure(run_python: RunPython) -> None:
    output = run_python(EXAMPLES / "intrinsic_reward.py")
    plain, curious = output.splitlines()
    assert plain.startswith("impala ")
    assert curious.startswith("impala with bonus ")
    assert float(plain.split()[-1]) < 0.1
    assert float(curious.split()[-1]) > 0.9


def test_a_core_around_another_adds_one_over_the_root_of_visits() -> None:
    example = runpy.run_path(str(EXAMPLES / "intrinsic_reward.py"))

    class Recording(LearnerCore):  # type: ignore[type-arg]
        name, trains_on, config = "recording", frozenset(), None  # type: ignore[assignment]

        def init(self, seed):  # type: ignore[no-untyped-def]
            return {}

        def step(self, state, sample, seam=None):  # type: ignore[no-untyped-def]
            self.rewards = sample["rewards"]
            return StepOutput(state, {})

    inner = Recording()
    core = example["Curious"](inner, features=2, scale=2.0)
    columns = {
        "observations": torch.eye(2)[torch.tensor([[0, 0, 1, 0]])],  # [1, 4, 2]
        "live": torch.tensor([[True, True, True, False]]),
        "rewards": torch.tensor([[1.0, 0.0, 0.0, 0.0]]),
    }
    state = core.init(seed=0)
    state = core.step(state, columns).state
    # Each feature counts as seen once before: √(1 / 3), √(1 / 2), and nothing for the unseen one.
    expected = torch.tensor([[1 + 2 / 3**0.5, 2 / 3**0.5, 2 / 2**0.5, 0.0]])
    torch.testing.assert_close(inner.rewards, expected)
    core.step(state, columns)
    torch.testing.assert_close(inner.rewards[0, 1], torch.tensor(2 / 5**0.5))


def test_a_core_around_another_keeps_what_the_other_learns_from() -> None:
    example = runpy.run_path(str(EXAMPLES / "intrinsic_reward.py"))
    make = partial(QNetwork, example["OBSERVATIONS"], example["ACTIONS"], {})
    core = example["Curious"](Dqn(make, DqnConfig(n_step=1)), features=2, scale=2.0)
    assert isinstance(core.data_source(), Replay), "a copy of the example has this, too"


@pytest.mark.long
def test_a_learner_around_another_library_learns(run_python: RunPython) -> None:
    output = run_python(EXAMPLES / "external_optimizer.py")
    returns = [float(each) for each in re.findall(r"return ([\d.]+)", output)]
    assert returns[-1] > 100, output
    learner = runpy.run_path(str(EXAMPLES / "external_optimizer.py"))["MomentumLearner"]
    overridden = {name for name, _ in inspect.getmembers(learner) if name in vars(learner)}
    public = {name for name in overridden if not name.startswith("_")}
    assert public == {"step", "get_params", "save", "restore"}
