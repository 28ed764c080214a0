"""Modules that are not trained: their configuration and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from gymnasium import spaces

from juggler.driver.agent_tables import FoundGroup, with_agents
from juggler.driver.checkpoint.first_weights import (
    FirstCheckpoints,
    FrozenModule,
    frozen_modules,
    must_fit,
    with_digests,
)
from juggler.driver.config import ConfigError, RunConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, read, write
from juggler.runtime.checkpoints.weights import module_in, playing_tree, read_module, tree_digest
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.wire.spaces import space_to_message

SEES, ACTS = (
    space_to_message(spaces.Box(-1, 1, (2,), np.float32)),
    space_to_message(spaces.Discrete(3)),
)
GROUP = FoundGroup(("cat", "mouse"), SEES, ACTS)
LEARNED = {"mean_std_filter": Moments(np.array(3.0), np.ones(2), np.ones(2)).to_tree()}
TABLES: dict[str, Any] = {"agents": {"cat": "main", "mouse": "old"}}


def save(directory: Path, *module_ids: str) -> Path:
    """A run that has ended."""
    said = {"observation": MessageToDict(SEES), "action": MessageToDict(ACTS)}
    tree: dict[str, Any] = {
        each: {
            "parameters": {"scale": np.full((), k, np.float32)},
            "buffers": {"count": np.array(k)},
            "optimizer": {"step": np.array(9)},
        }
        for k, each in enumerate(module_ids)
    }
    learned = LEARNED if module_ids == ("default",) else {module_ids[-1]: LEARNED}
    modules = {each: {"version": [1, 4], "extra": {}, "spaces": said} for each in module_ids}
    tables = {"modules": {each: {"model": {"hidden_sizes": [8]}} for each in module_ids}}
    agents = {"agents": {f"agent_{each}": each for each in module_ids}}
    config = RunConfig.from_flat({**agents, **tables}).flat()
    config["connectors"] = {"env_to_module": ["mean_std_filter"]}
    made = Checkpoint((1, 4), {**tree, "connectors": learned}, modules, {}, config, said)
    write(directory / "checkpoints", made, 3)
    return directory


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return save(tmp_path / "before", "hunter", "prey")


def config_with(**old: Any) -> RunConfig:
    return RunConfig.from_flat({**TABLES, "modules": {"old": old}})


def frozen_in(config: RunConfig, run_dir: Path | None = None) -> FrozenModule:
    (module,) = frozen_modules(config, run_dir).values()
    return module


# -- what a configuration may say -----------------------------------------------------------------


def test_only_the_others_are_trained(before: Path) -> None:
    config = RunConfig.from_flat(
        {
            "agents": {"cat": ["main", "old"], "mouse": ["old", "random"]},
            "modules": {"old": {"train": False, "from": f"{before}:prey"}},
        }
    )
    assert config.module_ids == ("main",)
    assert config.others == ("old", "random")
    assert config.agents.frozen_ids == ("old",)
    assert config.played_by == {"cat": ("main", "old"), "mouse": ("old", "random")}


def test_a_list_of_modules_needs_equal_spaces_and_random_fits_all() -> None:
    groups = [GROUP, FoundGroup(("dog",), ACTS, ACTS)]
    tables = {"cat": ["a", "random"], "mouse": "a", "dog": ["b", "random"]}
    assert with_agents(RunConfig.from_flat({"agents": tables}), groups).module_ids == ("a", "b")
    tables["dog"] = ["b", "a"]
    with pytest.raises(ConfigError, match="'cat'"):
        with_agents(RunConfig.from_flat({"agents": tables}), groups)


def test_a_mapping_without_a_table_chooses_among_the_modules_that_have_tables() -> None:
    keys: dict[str, Any] = {"mapping": "my_file:pick", "modules": {"a": {}, "b": {}}}
    config = with_agents(RunConfig.from_flat(keys), [GROUP])
    assert config.played_by == dict.fromkeys(("cat", "mouse"), ("a", "b", "random"))
    assert config.agents.mapping == "my_file:pick"
    with pytest.raises(ConfigError, match="agents 'cat'"):
        with_agents(RunConfig.from_flat(keys), [GROUP, FoundGroup(("dog",), ACTS, ACTS)])
    with pytest.raises(ConfigError, match="there is no module to choose from"):
        with_agents(RunConfig.from_flat({"mapping": "my_file:pick"}), [GROUP])
    with pytest.raises(ConfigError, match="mapping: the environment"):
        with_agents(RunConfig.from_flat({"mapping": "my_file:pick"}), [FoundGroup((), SEES, ACTS)])


# -- what they play with --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{}", "there are several modules: name one of"),
        ("{}:mouse", "there is no module 'mouse', but there are"),
        ("{}/nowhere", "there is no such file or directory"),
    ],
)
def test_weights_that_are_not_there_are_one_sentence(before: Path, source: str, words: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        frozen_in(config_with(train=False, **{"from": source.format(before)}))
    assert str(wrong.value).startswith(f"modules.old: from = {source.format(before)!r}: ")
    assert words in str(wrong.value)


def test_spaces_that_do_not_fit_are_one_sentence(before: Path) -> None:
    config = config_with(train=False, **{"from": f"{before}:prey"})
    frozen = frozen_modules(config)
    must_fit(config, frozen, [GROUP])
    other = space_to_message(spaces.Discrete(4))
    with pytest.raises(ConfigError) as wrong:
        must_fit(config, frozen, [FoundGroup(("cat", "mouse"), SEES, other)])
    said = str(wrong.value)
    assert said.startswith("modules.old: module 'prey' of ")
    assert "cannot play agent 'mouse': its action space is Discrete(3), and the agent's is" in said


@pytest.mark.parametrize("module_ids", [("hunter", "prey"), ("default",), ("default", "x")])
def test_a_run_keeps_what_it_plays_with_once(tmp_path: Path, module_ids: tuple[str, ...]) -> None:
    save(tmp_path / "before", *module_ids)
    config = config_with(train=False, **{"from": f"{tmp_path / 'before'}:{module_ids[-1]}"})
    module = frozen_in(config)
    config = with_digests(config, {"old": module})
    assert config.agents.modules["old"]["digest"] == module.digest
    module.keep(tmp_path / "run")
    shutil.rmtree(tmp_path / "before")
    with pytest.raises(ConfigError, match="there is no such file"):
        frozen_in(config)
    kept = frozen_in(config, tmp_path / "run")
    assert (kept.digest, kept.source) == (module.digest, module.source)
    assert kept.acting_setup() == module.acting_setup()
    assert list(kept.checkpoint.tree[kept.source]) == ["parameters", "buffers"], "no optimizer"


def test_other_weights_than_the_run_has_played_with_are_refused(before: Path) -> None:
    table = {"train": False, "from": f"{before}:prey"}
    digest = frozen_in(config_with(**table)).digest
    assert frozen_in(config_with(**table, digest=digest)).digest == digest
    with pytest.raises(ConfigError, match="other weights were meant"):
        frozen_in(config_with(**{**table, "from": f"{before}:hunter"}, digest=digest))


def test_a_run_has_its_modules_that_are_not_trained_too(before: Path, tmp_path: Path) -> None:
    table = {"train": False, "from": f"{before}:prey"}
    module = frozen_in(config_with(**table))
    config = with_digests(config_with(**table), {"old": module})
    run = save(tmp_path / "run", "main")
    checkpoint = read(run)
    record = json.loads((checkpoint.path / "checkpoint.json").read_text())  # type: ignore[operator]
    assert "old" not in record["modules"]
    write(
        run / "checkpoints",
        Checkpoint((1, 5), checkpoint.tree, checkpoint.modules, {}, config.flat(), {}),
    )
    # Its directory has them not yet, so they come from where the run had them.
    found, source = module_in(read(run), "old")
    assert source == "prey"
    assert tree_digest(playing_tree(found, source)) == module.digest
    save(before, "prey", "hunter")  # the numbers of both are others now
    with pytest.raises(CheckpointError, match="its weights have changed"):
        module_in(read(run), "old")
    module.keep(run)
    found, source = read_module(f"{run}:old")
    assert tree_digest(playing_tree(found, source)) == module.digest


# -- a module that begins with weights and is trained ---------------------------------------------


def test_a_module_may_begin_with_weights_of_its_own(before: Path, tmp_path: Path) -> None:
    filters = {"connectors": {"env_to_module": ["mean_std_filter"]}}
    table = {"from": f"{before}:prey", **filters}
    config = RunConfig.from_flat({**TABLES, "modules": {"main": table}})
    beginning, warnings = FirstCheckpoints.of(config).beginning(config)
    assert set(beginning) == {"main"}, "the other begins with what the seed gives"
    main = beginning["main"]
    assert float(main.weights["scale"]) == 1
    assert main.whole
    np.testing.assert_equal(main.learned, LEARNED)
    assert not warnings
    said = f"modules.main: from = '{before}:prey'"
    assert (main.source, main.selectable) == (said, False)

    save(tmp_path / "other", "old", "main")
    config = RunConfig.from_flat(
        {**TABLES, "modules": {"main": table}, "from_checkpoint": str(tmp_path / "other")}
    )
    both, warnings = FirstCheckpoints.of(config).beginning(config)
    assert {name: float(each.weights["scale"]) for name, each in both.items()} == {
        "old": 0,
        "main": 1,
    }
    assert len(warnings) == 1, "the connectors of the one are others than there"
    assert {name: (each.source, each.selectable) for name, each in both.items()} == {
        "old": (f"from_checkpoint = '{tmp_path / 'other'}'", True),
        "main": (said, False),
    }
