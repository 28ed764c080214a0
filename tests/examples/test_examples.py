"""The examples train, end by themselves, and what they trained is good."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import juggler
from juggler.runtime.checkpoints.checkpoint import read
from juggler.testing import check_core, sample_for

EXAMPLES = Path(__file__).parents[2] / "examples"
RunPython = Callable[..., str]


def summary_and_run(directory: Path) -> tuple[dict[str, Any], Path]:
    """Of the only run in a directory."""
    (run_dir,) = (directory / "runs").iterdir()
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary, run_dir


def evaluated(output: str) -> float:
    """The mean return in "20 episodes: return -4.6 ± 1.8"."""
    return float(output.partition("episodes: return ")[2].split()[0])


def test_they_train_for_an_update_and_play_what_it_made_of_their_modules(
    tmp_path: Path, run_shortly: RunPython
) -> None:
    names = ("custom_environment", "tensor_environments", "custom_module")
    output = run_shortly(*(EXAMPLES / f"{name}.py" for name in names))
    assert output.count("20 episodes: return ") == 3, output
    ends = [
        json.loads(path.read_text())["reason_for_stop"]
        for path in (tmp_path / "runs").glob("*/summary.json")
    ]
    assert ends == ["stop_steps"] * 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("custom_environment", marks=pytest.mark.slow),
        pytest.param("tensor_environments", marks=pytest.mark.long),
    ],
)
def test_an_environment_of_ones_own_is_learned(
    tmp_path: Path, run_python: RunPython, name: str
) -> None:
    output = run_python(EXAMPLES / f"{name}.py")
    summary, _ = summary_and_run(tmp_path)
    assert summary["solved"], output
    assert "copied from" not in output, "steps stay on the device"
    assert evaluated(output) > -10, "a thermostat that knows nothing gets about -25"


@pytest.mark.slow
def test_an_algorithm_of_ones_own_is_trained_with(tmp_path: Path, run_python: RunPython) -> None:
    output = run_python(EXAMPLES / "own_algorithm.py")
    summary, run_dir = summary_and_run(tmp_path)
    assert summary["solved"], output
    assert evaluated(output) > 200, "without a policy, the pole falls after 22 steps"
    config = read(run_dir).config
    assert config["algorithm"] == "__main__:MyAlgorithm"
    assert config["grad_clip"] == 10.0, "a default of its own"


@pytest.mark.long
def test_an_algorithm_that_is_derived_from_dqn_is_trained_with(
    tmp_path: Path, run_python: RunPython
) -> None:
    output = run_python(EXAMPLES / "own_dqn.py")
    summary, run_dir = summary_and_run(tmp_path)
    assert summary["solved"], output
    assert evaluated(output) > 150, "without a policy, the pole falls after 22 steps"
    read_back = read(run_dir)
    assert read_back.config["algorithm"] == "__main__:MunchausenDqn"
    state: Any = read_back.tree["default"]
    assert float(state["buffers"]["epsilon"]) == pytest.approx(0.05), "the schedule went on"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("custom_encoder", "encoder.waves.weight"),
        ("custom_module", "normalize.weight"),
        ("custom_distribution", "policy_head.weight"),
        ("custom_connector", "policy_head.weight"),
        ("extended_module", "encoder.1.layers.1.weight"),
    ],
)
def test_a_part_of_ones_own_is_trained_with(
    tmp_path: Path, run_python: RunPython, name: str, parameter: str
) -> None:
    output = run_python(EXAMPLES / f"{name}.py")
    summary, run_dir = summary_and_run(tmp_path)
    assert summary["solved"], output
    assert evaluated(output) > 100, "without a policy, the pole falls after 22 steps"
    state: Any = read(run_dir).tree["default"]
    assert parameter in state["parameters"]


@pytest.mark.long
def test_a_language_model_learns_to_repeat_words(tmp_path: Path, run_python: RunPython) -> None:
    output = run_python(EXAMPLES / "language_model.py")
    summary, _ = summary_and_run(tmp_path)
    assert summary["solved"], output
    assert evaluated(output) > 2.8, "guessing gets 0.75 of 3"


@pytest.mark.long
def test_two_modules_with_one_encoder_learn_in_one_run(run_python: RunPython) -> None:
    *updates, last, shared = run_python(EXAMPLES / "shared_encoder.py").splitlines()
    first = updates[0].split()
    assert first[:2] == ["update", "0"]
    assert max(float(first[3]), float(first[5])) < 0.6, updates
    end = last.split()
    assert min(float(end[3]), float(end[5])) > 0.95, last
    assert shared == "one encoder: True"


# The loss of the example that is derived from DQN, against one written out in NumPy.


EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_dqn.py"))
VECTOR, THREE = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
MAKE = partial(juggler.QNetwork, VECTOR, THREE, {"hidden_sizes": [8]})


def make_core(**keys: Any) -> juggler.Dqn:
    core: juggler.Dqn = EXAMPLE["MunchausenCore"](MAKE, EXAMPLE["MunchausenConfig"](**keys))
    return core


def test_it_conforms() -> None:
    check_core(make_core, sample_for(MAKE()))


def test_it_has_no_bonus_of_several_steps() -> None:
    with pytest.raises(ValueError, match="n_step = 3"):
        make_core(n_step=3)
