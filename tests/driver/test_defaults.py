"""A run's choices for keys that were not given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from juggler.driver.agent_tables import FoundGroup
from juggler.driver.config import RunConfig
from juggler.driver.config_files import differing, load_config_and_keys, shipped_configs
from juggler.driver.defaults import settled, with_models
from juggler.learner.algorithms.registry import ALGORITHMS as SHIPPED
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_module_to_env
from juggler.runtime.wire.spaces import space_to_message

ALGORITHMS = ("impala", "ppo", "appo", "pqn", "dqn", "r2d2", "sac", "td3", "bc", "iql")
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (10, 10, 1), np.uint8)


ACTION = space_to_message(spaces.Discrete(2))
BOX_ACTION = space_to_message(spaces.Box(-1, 1, (1,), np.float32))


def group(*agents: str, space: spaces.Space[Any] = VECTOR, action: Any = ACTION) -> FoundGroup:
    return FoundGroup(agents, space_to_message(space), action)


def settle(space: spaces.Space[Any] = VECTOR, **given: Any) -> RunConfig:
    return settled(RunConfig.from_flat(given), given.keys(), [group(space=space)])[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_short_file_leaves_nothing_to_be_chosen_that_was_given(algorithm: str) -> None:
    everything = RunConfig.from_flat({"algorithm": algorithm, "num_env_runners": 3}).flat()
    short = differing(everything)
    assert len(short) < len(everything) / 2
    for action in (ACTION, BOX_ACTION):
        found, _ = settled(RunConfig.from_flat(short), short.keys(), [group(action=action)])
        assert found.flat() == everything


def test_a_vector_of_floats_is_filtered_and_nothing_else_is() -> None:
    assert settle(VECTOR).connectors.connectors["env_to_module"] == ["mean_std_filter"]
    as_it_is: list[spaces.Space[Any]] = [
        IMAGE,
        spaces.Discrete(5),
        spaces.MultiBinary(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(0, 5, (3,), np.int64),
        spaces.Dict({"at": VECTOR, "which": spaces.Discrete(2)}),
        spaces.Box(-1, 1, (5, 5), np.float32),
    ]
    for each in as_it_is:
        assert "env_to_module" not in settle(each).connectors.connectors, each


def test_rewards_are_normalized_with_the_runs_discount_unless_they_are_scaled_already() -> None:
    pieces = settle(gamma=0.9).connectors.connectors["learner"]
    assert pieces == [{"use": "normalize_rewards", "gamma": 0.9}]
    assert settle(reward_scale=1.0).connectors.connectors == {}
    assert settle(connectors={}).connectors.connectors == {}


def test_samples_grow_with_what_is_sampled_at_a_time() -> None:
    assert settle(envs_per_runner=64, fragment_steps=32).learner.batch_size == 64 * 32
    two, eight = (settle(num_env_runners=each).learner.batch_size for each in (2, 8))
    assert eight == 4 * two
    assert settle(num_learners=2).learner.batch_size == 2 * two
    large = settle(algorithm="ppo", batch_size=8192)
    assert large.flat()["minibatches"] == 8192 // 64


def test_a_memory_keeps_fragments_in_which_something_can_be_remembered() -> None:
    general = RunConfig().env_runner.fragment_steps
    assert settle(model={"recurrent": "lstm"}).env_runner.fragment_steps == general
    assert settle(burn_in=20).env_runner.fragment_steps == general


def test_an_age_that_has_no_effect_is_not_chosen() -> None:
    config = settle(algorithm="ppo", synchronous=True)
    assert config.learner.max_staleness == type(config.learner).max_staleness
    assert config.doubts() == []


def test_a_model_that_an_algorithm_needs_is_there_before_the_spaces_are_known() -> None:
    needs = RunConfig.from_flat({"algorithm": "r2d2"})
    assert with_models(needs, {"algorithm"}).module.model == {"recurrent": "lstm"}
    assert with_models(needs, {"algorithm", "model"}) is needs
    own = RunConfig.from_flat({"algorithm": "r2d2", "module": "my_module:Mine"})
    assert with_models(own, {"algorithm", "module"}) is own
    tables = {"agents": {"*": "main"}, "modules": {"main": {"algorithm": "r2d2"}}}
    several = with_models(RunConfig.from_flat(tables), tables.keys())
    assert several.agents.modules["main"]["model"] == {"recurrent": "lstm"}


def in_toml(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    pairs = ", ".join(f"{key} = {json.dumps(each)}" for key, each in value.items())
    return f"`{{{pairs}}}`"


def test_the_page_of_algorithms_has_what_is_chosen() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    section = page.partition("## What a run chooses")[2].partition("\n## ")[0]
    found: dict[tuple[str, str, str], str] = {}  # by key, condition and algorithm
    for table in section.split("\n\n"):
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in table.splitlines()
            if line.startswith("|")
        ]
        for first, *values in rows[2:]:
            name, _, condition = first.removeprefix("`").partition("`")
            for column, value in zip(rows[0][1:], values, strict=True):
                found[name, condition, column.strip("`")] = value
    expected = {}
    for name, algorithm in SHIPPED.items():
        tables = {
            f", where {kind} is observed": table for kind, table in algorithm.chosen_for.items()
        }
        boxed = tables.pop(", where a Box action is observed", {})
        tables |= {"": algorithm.chosen, ", where the action is a Box": boxed}
        for where, settings in tables.items():
            for key, value in settings.items():
                only = ", where `weights_interval` is 1 and `synchronous` is false"
                condition = only if key == "max_staleness" else where
                expected[key, condition, name] = in_toml(value)
    told = {place: value for place, value in found.items() if value}
    others = {place: value for place, value in told.items() if place not in expected}
    assert {place: told.get(place) for place in expected} == expected
    assert {key for key, _, _ in others} == {"batch_size", "minibatches"}


def test_impala_has_settings_of_its_own_by_what_is_observed() -> None:
    kinds: dict[str, spaces.Space[Any]] = {
        "a vector of floats": VECTOR,
        "an image": IMAGE,
        "a Discrete": spaces.Discrete(4),
    }
    impala = SHIPPED["impala"]
    assert kinds.keys() == impala.chosen_for.keys()
    for kind, space in kinds.items():
        settings = settle(space).flat()
        for key, value in {**impala.chosen, **impala.chosen_for[kind]}.items():
            assert settings[key] == value, key
    assert settle(VECTOR, lr=3e-3).learner.lr == 3e-3


BOUNDS = {
    "far": spaces.Box(5, 9, (1,), np.float32),
    "positive": spaces.Box(0, 1, (2,), np.float64),
    "uneven": spaces.Box(-100, 3, (2, 2), np.float32),
    "mixed": spaces.Box(np.array([-np.inf, 0, 5], np.float32), np.array([1, np.inf, 9], "f4")),
}
RESCALE = ["rescale_actions"]


def to_env(action: spaces.Space[Any] | None, **given: Any) -> Any:
    """What is chosen of connectors.module_to_env."""
    found = () if action is None else [group(action=space_to_message(action))]
    config, _ = settled(RunConfig.from_flat(given), given.keys(), found)
    return config.connectors.connectors.get("module_to_env")


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("algorithm", ["impala", "ppo", "appo", "bc", "iql"])
def test_a_policys_range_is_mapped_to_finite_bounds(algorithm: str, name: str) -> None:
    space = BOUNDS[name]
    for whole in (space, spaces.Dict({"move": spaces.Discrete(2), "push": space})):
        assert to_env(whole, algorithm=algorithm) == RESCALE
    built = build_module_to_env(ConnectorsConfig(module_to_env=RESCALE), VECTOR, space)
    both = space.bounded_below & space.bounded_above  # [...]
    sent = [built(np.full((1, *space.shape), x, np.float32))[0] for x in (-1, 0, 1)]
    for at, right in zip(sent, (space.low, (space.low + space.high) / 2, space.high), strict=True):
        np.testing.assert_allclose(at[both], right[both], rtol=1e-5)
        assert space.contains(at)
    back = built.undo(sent[2][None])[0]
    np.testing.assert_allclose(back[both], 1, rtol=1e-5)


def test_what_is_squashed_given_or_imitated_is_not_rescaled() -> None:
    far = BOUNDS["far"]
    for algorithm in ("sac", "td3"):
        assert to_env(far, algorithm=algorithm) is None
    for given in ({"model": {"squash": True}}, {"connectors": {}}):
        assert to_env(far, algorithm="ppo", **given) is None
    assert to_env(far, algorithm="ppo", imitation={"demonstrations": "there"}) is None


def test_actions_are_rescaled_with_own_algorithms_too_and_if_spaces_are_not_known() -> None:
    assert to_env(BOUNDS["far"], algorithm="support.own_algorithms:Many") == RESCALE
    assert to_env(BOUNDS["far"], algorithm="ppo", reward_scale=2.0) == RESCALE
    assert to_env(None, algorithm="ppo") == RESCALE
    assert to_env(None, algorithm="sac") is None


@pytest.mark.parametrize("before", [True, False])
def test_weights_of_another_run_act_as_they_did_there(before: bool) -> None:
    for action in (BOX_ACTION, space_to_message(BOUNDS["far"])):
        config, _ = settled(RunConfig(), (), [group(action=action)], {"default": before})
        found = config.connectors.connectors.get("module_to_env")
        assert found == (RESCALE if before and action != BOX_ACTION else None)
    agents = {"agents": {"a": "one", "b": "two"}, "modules": {"one": {}, "two": {}}}
    unknown, _ = settled(RunConfig.from_flat(agents), agents.keys(), (), {"one": before})
    assert unknown.connectors.connectors.get("module_to_env") == (RESCALE if before else None)
    both = [group("a", "b", action=space_to_message(BOUNDS["far"]))]
    config, _ = settled(RunConfig.from_flat(agents), agents.keys(), both, {"one": before})
    pieces = [config.of(each).connectors.connectors.get("module_to_env") for each in ("one", "two")]
    assert pieces == [RESCALE if before else None, RESCALE]


def test_what_ships_is_complete_and_a_file_of_ones_own_is_not(tmp_path: Path) -> None:
    for name in shipped_configs():
        config, given = load_config_and_keys(name)
        assert given == config.flat().keys()
    (tmp_path / "mine.toml").write_text('env = "Acrobot-v1"\nlr = 5e-4\n')
    assert load_config_and_keys(tmp_path / "mine.toml")[1] == {"env", "lr"}
    assert load_config_and_keys(tmp_path / "mine.toml", "ppo")[1] == {"env", "lr", "algorithm"}
    assert load_config_and_keys(None)[1] == set()
