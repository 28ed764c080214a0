"""What learners of one host need together, and what only one of them can do."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.driver import learners_here
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.learners_here import must_be_alone, must_fit_together
from juggler.learner.process.devices import CPU

GPUS = ["cuda:0", "cuda:1"]
QUEUE = {"algorithm": "dqn", "max_times_sampled": 1, "replay_ratio": 1.0}


def config_of(**keys: Any) -> RunConfig:
    return RunConfig.from_flat(keys)


def nobody_knows(gpu: str) -> None:
    pass


def test_steps_that_are_drawn_so_often_are_for_one_learner_of_a_module() -> None:
    must_be_alone(config_of(**QUEUE))
    must_be_alone(config_of(algorithm="dqn", num_learners=2))
    with pytest.raises(ConfigError, match=r"^max_times_sampled = 1 with 2 learners: .* set it"):
        must_be_alone(config_of(**QUEUE, num_learners=2))
    two: dict[str, Any] = {"agents": {"a": "one", "b": "two"}}
    must_be_alone(config_of(**QUEUE, **two, num_learners=2))  # one for each
    with pytest.raises(ConfigError, match=r"^modules.one: max_times_sampled = 1 with 2 learners"):
        must_be_alone(config_of(**QUEUE, **two, num_learners=3))
    tables = {"one": {"algorithm": "dqn", "max_times_sampled": 3, "replay_ratio": 2.0}}
    with pytest.raises(ConfigError, match=r"^modules.one: max_times_sampled = 3 with 2 learners"):
        must_be_alone(config_of(**two, modules=tables, num_learners=4))


def test_the_replays_of_all_learners_of_a_host_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learners_here, "usable_memory", lambda: 10 * 10**9)
    one = config_of(num_learners=3)
    must_fit_together(one, {"default": 3e9}, [CPU] * 3, nobody_knows)
    with pytest.raises(
        ConfigError,
        match=r"3 learners .* steps of 12.0 GB in all \(4.0, 4.0, 4.0\), and 10.0 GB",
    ):
        must_fit_together(one, {"default": 4e9}, [CPU] * 3, nobody_knows)
    must_fit_together(one, {"default": 4e9}, [CPU, "cuda:0", CPU], nobody_knows)  # one is on a GPU
    several = config_of(agents={"a": "one", "b": "two", "c": "three"}, num_learners=2)
    kept = {"one": 4e9, "two": 1e9, "three": 5e9}
    must_fit_together(several, kept, [CPU] * 2, nobody_knows)
    with pytest.raises(ConfigError, match=r"in all \(10.0, 1.0\)"):
        must_fit_together(several, {**kept, "three": 6e9}, [CPU] * 2, nobody_knows)
    monkeypatch.setattr(learners_here, "usable_memory", lambda: None)  # the system does not say
    must_fit_together(one, {"default": 1e15}, [CPU] * 3, nobody_knows)
    monkeypatch.setattr(learners_here, "usable_memory", lambda: 0)  # all of it is taken
    with pytest.raises(ConfigError, match=r"and 0.0 GB of this host's memory are free"):
        must_fit_together(one, {"default": 1e6}, [CPU] * 3, nobody_knows)


def test_the_copies_of_a_checkpoint_are_counted_where_it_holds_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One learner of a module makes one, and the driver takes it."""
    monkeypatch.setattr(learners_here, "usable_memory", lambda: 10 * 10**9)
    saved, unsaved = (
        config_of(algorithm="dqn", num_learners=2, save_replay=each) for each in (True, False)
    )
    must_fit_together(saved, {"default": 2.5e9}, [CPU] * 2, nobody_knows)
    with pytest.raises(
        ConfigError,
        match=r"steps of 6.0 GB in all \(3.0, 3.0\); while .* made, 6.0 GB are taken by copies .* "
        r"10.0 GB .* or set save_replay = false$",
    ):
        must_fit_together(saved, {"default": 3e9}, [CPU] * 2, nobody_knows)
    must_fit_together(unsaved, {"default": 5e9}, [CPU] * 2, nobody_knows)
    # Steps on GPUs are copied into the memory of the host, too.
    must_fit_together(saved, {"default": 5e9}, GPUS, nobody_knows)
    with pytest.raises(ConfigError, match=r"^replay_capacity: while .*, 12.0 GB are taken"):
        must_fit_together(saved, {"default": 6e9}, GPUS, nobody_knows)


def test_the_replays_of_all_learners_on_one_gpu_are_added_up() -> None:
    unsaved: dict[str, Any] = {"algorithm": "dqn", "save_replay": False}
    free = {"cuda:0": 10 * 10**9, "cuda:1": 7 * 10**9}
    group = config_of(num_learners=3, **unsaved)
    must_fit_together(group, {"default": 5e9}, [*GPUS, "cuda:0"], free.get)
    with pytest.raises(
        ConfigError,
        match=r"^replay_capacity: the 2 replays on cuda:0 keep steps of 12.0 GB in all "
        r"\(6.0, 6.0\), and 10.0 GB of its memory are free. Lower it",
    ):
        must_fit_together(group, {"default": 6e9}, [*GPUS, "cuda:0"], free.get)
    must_fit_together(group, {"default": 6e9}, [*GPUS, CPU], free.get)
    several = config_of(agents={"a": "one", "b": "two", "c": "three"}, num_learners=1, **unsaved)
    kept = {"one": 4e9, "two": 0.0, "three": 5e9}  # `two` has no replay, or has it on disk
    must_fit_together(several, kept, ["cuda:0"], free.get)
    with pytest.raises(ConfigError, match=r"2 replays on cuda:1 .* 9.0 GB in all \(4.0, 5.0\)"):
        must_fit_together(several, kept, ["cuda:1"], free.get)
    must_fit_together(several, kept, ["cuda:1"], nobody_knows)


def test_a_gpu_with_a_single_replay_is_not_asked() -> None:
    def asked(gpu: str) -> int:
        raise AssertionError(gpu)

    config = config_of(algorithm="dqn", save_replay=False, num_learners=2)
    must_fit_together(config, {"default": 1e9}, GPUS, asked)
