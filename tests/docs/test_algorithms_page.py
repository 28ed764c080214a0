"""docs/algorithms.md: every cell of its table, with updates on what was sampled."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.small_cores import NUMBER, acts_in_choices, keeps_steps, needs_memory

from juggler.driver.config import RunConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.registry import ALGORITHMS, find_algorithm
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.module_specs import build_module
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.testing import AnythingEnv

Space = gymnasium.Space[Any]

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ROWS, STEPS = 4, 8
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)
SMALL = {"hidden_sizes": [8], "initializer": "default"}

#: By column: observations, actions, and what the default module is built with.
CELLS: dict[str, tuple[Space, Space, dict[str, Any]]] = {
    "fully connected": (VECTOR, TWO, {}),
    "image": (spaces.Box(0, 255, (20, 20, 3), np.uint8), TWO, {}),
    "recurrent": (VECTOR, TWO, {"recurrent": "lstm", "recurrent_size": 6}),
    "Dict observations": (spaces.Dict({"at": VECTOR, "goal": spaces.Discrete(4)}), TWO, {}),
    "masks": (
        spaces.Dict({"at": VECTOR, "action_mask": spaces.MultiBinary(3)}),
        spaces.Discrete(3),
        {},
    ),
    "discrete": (VECTOR, spaces.Discrete(3, start=1), {}),
    "several choices": (VECTOR, spaces.MultiDiscrete([2, 3]), {}),
    "continuous": (VECTOR, spaces.Box(-1, 1, (2,), np.float32), {}),
}
#: Columns about actions; in the others, an algorithm acts in any space that it supports.
OF_ACTIONS = ("masks", "discrete", "several choices", "continuous")


def _table() -> dict[tuple[str, str], str]:
    """What stands in the cells, by algorithm and column."""
    section = PAGE.read_text().partition("## What goes with what")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("|")]
    head = next(place for place, row in enumerate(rows) if "fully connected" in row)
    columns = [each.strip() for each in rows[head].strip("|").split("|")]
    found = {}
    for row in rows[head + 2 :]:
        first, *cells = (each.strip() for each in row.strip("|").split("|"))
        found.update(
            {
                (first.strip("`"), column): cell
                for column, cell in zip(columns[1:], cells, strict=True)
            }
        )
    return found


class Runner:
    """Samples with the weights of a learner's module."""

    def __init__(
        self, make: Callable[[], RLModule], observations: Space, actions: Space, seed: int
    ) -> None:
        config = EnvRunnerConfig(envs_per_runner=ROWS, fragment_steps=STEPS, vectorize="sync")
        env = make_vector_env(config, partial(AnythingEnv, observations, actions))
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig(), observations, actions
        )
        module = make()
        strip_to_acting(module)
        self.policy = Actor(module, ROWS, STEPS, seed, module_to_env, connectors)
        self._sampler = Sampler(env, self.policy, STEPS, seed)

    def sample(self) -> EpisodeBatch:
        return self._sampler.sample((0, 0)).batch


def _learner(name: str, make: Callable[[], RLModule], **keys: Any) -> Learner:
    import importlib

    algorithm = find_algorithm(name)
    package, _, attribute = algorithm.core.partition(":")
    core = getattr(importlib.import_module(package), attribute)
    if keeps_steps(name):
        # Few updates; a row of what needs a memory has several steps, so that fewer come to one.
        ratio = 4.0 if needs_memory(name) else 1.0
        keys = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": ratio, **keys}
    elif name == "ppo":
        keys = {"epochs": 2, "minibatches": 2, **keys}
    return Learner(core(make, algorithm.config(**keys)), seed=1)


@pytest.mark.parametrize(("algorithm", "column"), [*_table()])
def test_a_cell_of_the_table_is_as_it_says(algorithm: str, column: str) -> None:
    observations, actions, model = CELLS[column]
    if column not in OF_ACTIONS and not acts_in_choices(algorithm):
        actions = NUMBER
    if needs_memory(algorithm) and column != "fully connected":
        model = {**CELLS["recurrent"][2], **model}
    module, model = find_algorithm(algorithm).module, {**SMALL, **model}
    make = partial(build_module, module, observations, actions, model, check_specs=True)
    if _table()[algorithm, column] == "no":
        with pytest.raises((UnsupportedSpace, ValueError)):
            _learner(algorithm, make)
        return
    assert _table()[algorithm, column] == "yes"
    learner = _learner(algorithm, make, lr=1e-2)
    runner = Runner(make, observations, actions, 0)
    before = learner.get_weights()
    for update in range(2):
        runner.policy.load(learner.get_weights())
        episodes = [runner.sample()]
        if update == 0:
            _assert_policies_agree(algorithm, make, learner, episodes)
        values = fetch_metrics(learner.update_from_episodes(episodes))
        assert np.isfinite(list(values.values())).all()
        assert values["skipped"] == 0.0
    for name, array in learner.get_weights().items():
        if array.dtype.kind == "f":  # other arrays are what a module knows of its spaces
            assert not np.array_equal(array, before[name]), name


def _assert_policies_agree(
    algorithm: str, make: Callable[[], RLModule], learner: Learner, episodes: list[EpisodeBatch]
) -> None:
    """Check that learner and runner agree: their KL is 0."""
    if algorithm in ("pqn", "bc") or keeps_steps(algorithm):
        return  # they correct for no policy, and their module returns values in training
    keys: dict[str, Any] = {"epochs": 1, "minibatches": 1} if algorithm == "ppo" else {}
    other = _learner(algorithm, make, **keys)
    other.restore(learner.save()[0], learner.save()[1])
    values = fetch_metrics(other.update_from_episodes(episodes))
    assert values["kl"] == pytest.approx(0.0, abs=1e-5)


def test_the_table_has_every_algorithm_and_column() -> None:
    table = _table()
    assert {algorithm for algorithm, _ in table} == ALGORITHMS.keys()
    assert {column for _, column in table} == CELLS.keys()
    assert len(table) == len(ALGORITHMS) * len(CELLS)


def test_the_page_says_how_large_a_pass_is() -> None:
    from juggler.learner.core.forward import CHUNK

    assert re.search(r"passes of at most (\d+)", PAGE.read_text())[1] == str(CHUNK)  # type: ignore[index]


def test_the_defaults_that_differ_from_acmes_are_those_of_the_configuration() -> None:
    page = PAGE.with_name("from-acme.md").read_text()
    found = 0
    for algorithm, row in re.findall(r"^\| `(\w+)` \| (`.*) \|$", page, re.M):
        if algorithm not in ALGORITHMS:
            continue
        defaults = RunConfig.from_flat({"algorithm": algorithm}).flat()
        for key, here, acme in re.findall(r"`(\w+)` ([^;]+) \(([^()]+)\)", row):
            default = defaults.get(key)
            said = "none" if default is None else str(default).replace("(", "[").replace(")", "]")
            assert here.partition(":")[0] == said, key
            assert acme.partition(" ")[0] != said, key
            found += 1
    assert found > 20
