"""The table `shared`: which modules share parts, and where they are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from juggler.driver.agents_config import AgentsConfig
from juggler.driver.agents_found import FoundGroup, with_agents
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.hosting import Hosting

FOUR: dict[str, Any] = {"agents": {name: name for name in "abcd"}}
PAIR = {"encoder.*": ["d", "b"]}


def error(**values: Any) -> str:
    with pytest.raises(ConfigError) as wrong:
        RunConfig.from_flat(values)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


def of_run(learners: int, trained: Iterable[str] = "abcd", **values: Any) -> Hosting:
    return Hosting(RunConfig.from_flat({**FOUR, "num_learners": learners, **values}), trained)


def hosting(learners: int, processes: int, **values: Any) -> list[list[str]]:
    """The modules of so many processes, in a run that begins with `learners` of them."""
    return [of_run(learners, **values).modules_of(index) for index in range(processes)]


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
    assert hosting(2, 3, shared=PAIR) == [["a", "c"], ["b", "d"], ["a", "c"]]
    five = [["a"], ["b", "d"], ["c"], ["a"], ["b", "d"]]
    assert hosting(5, 5, shared=PAIR) == five
    counts = of_run(5, shared=PAIR)
    assert [counts.processes_of(module_id) for module_id in "abcd"] == [2, 2, 1, 2]


def test_a_module_has_as_many_processes_to_itself_as_its_table_says() -> None:
    of_b = {"modules": {"b": {"num_learners": 2}}}
    assert hosting(5, 7, **of_b) == [["a"], ["b"], ["c"], ["d"], ["b"], ["a"], ["b"]]
    more = hosting(8, 8, **of_b)
    assert more[5:] == [["a"], ["c"], ["d"]], "the others have what is left"
    with_a_pair = hosting(5, 5, shared=PAIR, modules={"a": {"num_learners": 2}})
    assert with_a_pair == [["a"], ["b", "d"], ["c"], ["a"], ["b", "d"]]
    counts = {"a": 1, "b": 3, "c": 1, "d": 2}
    every = {"modules": {each: {"num_learners": count} for each, count in counts.items()}}
    assert hosting(7, 7, **every) == [["a"], ["b"], ["c"], ["d"], ["b"], ["d"], ["b"]]
    assert of_run(7, **every).processes_of("b") == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"num_learners": 3},
            "modules.b has 2, and at least one for each of 'a', 'c' and 'd': that is 5",
        ),
        ({"num_learners": 3}, "the run has 3; set num_learners = 5 outside of the tables"),
        ({"agents": {"*": "b"}, "num_learners": 1}, "that is 2, and the run has 1"),
        ({"agents": {"*": "b"}, "num_learners": 3}, "some would train nothing"),
        ({"shared": {"x.*": ["a", "b"]}, "num_learners": 9}, "are trained by the same processes"),
        ({"agents": {}, "league": {"builder": "rllib"}, "num_learners": 9}, "with league"),
    ],
)
def test_learners_of_a_module_that_the_run_does_not_have_are_one_sentence(
    values: dict[str, Any], words: str
) -> None:
    assert words in error(**{**FOUR, "modules": {"b": {"num_learners": 2}}, **values})


def test_a_run_has_as_many_learners_as_its_modules_need_unless_it_says_how_many() -> None:
    of_b = {**FOUR, "modules": {"b": {"num_learners": 2}}}
    assert RunConfig.from_flat(of_b).driver.learners == 5
    assert RunConfig.from_flat({**of_b, "num_learners": 6}).driver.learners == 6


def test_a_further_module_goes_where_the_fewest_are_and_no_other_moves() -> None:
    hosting = of_run(4, shared=PAIR)  # three groups, the first of which two processes train
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
    again = of_run(4, ["b", "c", "d", "other"], shared=PAIR)
    assert again.modules_of(0) == hosting.modules_of(0) == ["other"]


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
