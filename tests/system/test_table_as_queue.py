"""IMPALA on a table whose oldest rows are drawn first, each once, is IMPALA on its queue."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.commands import status_of
from support.place import assert_books_balance

SETTINGS = """
env = "CartPole-v1"
synchronous = true
seed = 7
progress = "off"
num_env_runners = 2
envs_per_runner = 3
fragment_steps = 8
batch_size = 144
checkpoint_updates = 4
stop_steps = 1100
"""

#: Each update has 144 steps, in 18 rows of 8.
ON_TABLE = """
from juggler.learner.algorithms.impala import ImpalaAlgorithm
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.data.replay.episode_rows import rows_of_episodes
from juggler.learner.data.replay.replay import Replay


class OnTable(Impala):
    def source_of_new(self):
        return Replay(
            rows_of_episodes, episodes=True, capacity=10_000,
            size=18, ratio=1.0, selector="fifo", max_times_sampled=1, saved=False,
        )


class ImpalaOnQueue(ImpalaAlgorithm):
    pass


class ImpalaOnTable(ImpalaAlgorithm):
    core = OnTable
"""


@pytest.mark.slow  # in threads, workers would share the generator that draws first weights
@pytest.mark.usefixtures("one_forkserver")
def test_impala_on_a_table_equals_impala_on_its_queue_bit_for_bit(in_a_directory: Path) -> None:
    Path("on_table.py").write_text(ON_TABLE)
    Path("run.toml").write_text(SETTINGS)
    # Both are an algorithm of one's own, so that a run chooses the same settings for both.
    kinds = {"queue": "ImpalaOnQueue", "table": "ImpalaOnTable"}
    for name, kind in kinds.items():
        algorithm = f"on_table:{kind}"
        assert status_of("train", "run.toml", "--algorithm", algorithm, "--run-dir", name) == 0
        assert_books_balance(in_a_directory / name)
    of = [in_a_directory / name / "checkpoints" / "000000008" for name in ("queue", "table")]
    one, other = (load_file(each / "state.safetensors") for each in of)
    of_table = {key for key in other if key.startswith("replay/")}
    assert of_table == {"replay/seed", "replay/beginnings"}, "the table itself is not saved"
    assert one.keys() == other.keys() - of_table
    assert any(key.startswith("default") for key in one)
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    first, second = (json.loads((each / "checkpoint.json").read_text())["counters"] for each in of)
    for counters in (first, second):
        assert counters["sampled"] == counters["trained"] + counters["in_flight"] + sum(
            counters["dropped"].values()
        )
    assert first["trained"] == second["trained"] > 1000
    line = (in_a_directory / "table" / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"replay_rows_waiting"' in line
