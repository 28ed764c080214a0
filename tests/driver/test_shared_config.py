"""The table `shared`: which modules share parts, and where they are trained."""

from __future__ import annotations

from typing import Any

import pytest

from juggler.driver.agents_config import AgentsConfig
from juggler.driver.agents_found import FoundGroup, with_agents
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.learner_group.placement import Hosting, modules_of_process, processes_of_module

FOUR: dict[str, Any] = {"agents": {name: name for name in "abcd"}}
PAIR = {"encoder.*": ["d", "b"]}


def error(**values: Any) -> str:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


@pytest.mark.parametrize(
    ("shared", "together"),
    [
        ({}, [("a",), ("b",), ("c",), ("d",)]),
        (PAIR, [("a",), ("b", "d"), ("c",)]),
        ({"x.*": ["d", "a"], "y.*": ["c", "b"]}, [("a", "d"), ("b", "c")]),
        ({"x.*": ["d", "a"], "y.*": ["b", "d"]}, [("a", "b", "d"), ("c",)]),
    ],
)
def test_modules_that_share_parts_directly_or_through_others_are_trained_together(
    shared: dict[str, list[str]], together: list[tuple[str, ...]]
) -> None:
    config = RunConfig.from_flat({**FOUR, "shared": shared})
    assert list(config.trained_together) == together
    assert ("shared" in config.flat()) == bool(shared)
    assert RunConfig.from_flat(config.flat()) == config
    assert config.of("b").agents == AgentsConfig()


def test_a_process_hosts_all_modules_that_share_parts_or_none_of_them() -> None:
    together = RunConfig.from_flat({**FOUR, "shared": PAIR}).trained_together
    two = [modules_of_process(index, 2, together) for index in range(3)]
    assert two == [["a", "c"], ["b", "d"], ["a", "c"]]
    five = [modules_of_process(index, 5, together) for index in range(5)]
    assert five == [["a"], ["b", "d"], ["c"], ["a"], ["b", "d"]]
    counts = [processes_of_module(module_id, 5, together) for module_id in "abcd"]
    assert counts == [2, 2, 1, 2]


def test_a_further_module_goes_where_the_fewest_are_and_no_other_moves() -> None:
    together = RunConfig.from_flat({**FOUR, "shared": PAIR}).trained_together
    hosting = Hosting(4, together)  # three groups, the first of which two processes train
    hosting.add("new")
    assert [hosting.modules_of(index) for index in range(4)] == [
        ["a", "new"],
        ["b", "d"],
        ["c"],
        ["a", "new"],
    ]
    assert hosting.processes_of("new") == 2
    hosting.add("other", here=[1, 3])
    assert hosting.modules_of(1) == ["b", "d"]
    assert "other" in hosting.modules_of(0), "one of the processes that are here"
    hosting.remove("a")
    hosting.remove("new")
    trained = ["b", "c", "d", "other"]
    assert Hosting.of(4, together, trained).modules_of(0) == hosting.modules_of(0) == ["other"]


def test_a_table_of_modules_that_are_not_there_names_the_nearest() -> None:
    text = error(agents={"x": "hunter", "y": "prey"}, shared={"*": ["hunter", "pray"]})
    assert "shared: '*': there is no module 'pray': did you mean 'prey'" in text
    assert "name at least two modules" in error(**FOUR, shared={"*": ["a"]})
    assert "name at least two modules, each once" in error(**FOUR, shared={"*": ["a", "b", "a"]})
    assert "cannot be a module's id" in error(**FOUR, shared={"*": ["a", "b/c"]})
    assert "shared with gateway" in error(
        env="CartPole-v1", gateway="127.0.0.1:0", shared={"*": ["a", "b"]}
    )


def test_the_table_is_kept_where_the_agents_are_found_in_the_environment() -> None:
    config = RunConfig.from_flat({"env": "x:Y", "shared": {"encoder.*": ["cat", "mouse"]}})
    assert config.agents.has_patterns
    groups = [FoundGroup((name,), None, None) for name in ("cat_0", "mouse_0")]
    found = with_agents(config, groups)
    assert found.agents.shared == config.agents.shared
    assert found.trained_together == (("cat", "mouse"),)
    others = [FoundGroup((name,), None, None) for name in ("dog_0", "mouse_0")]
    with pytest.raises(ConfigError, match=r"shared: 'encoder\.\*': there is no module 'cat'"):
        with_agents(config, others)
    with pytest.raises(ConfigError, match="shared: the environment x:Y has one agent"):
        with_agents(config, [FoundGroup((), None, None)])
    with pytest.raises(ConfigError, match="shared: nothing here says which agents"):
        with_agents(config, ())
