"""Attributes that are read through wrappers are what the outermost wrapper says."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pettingzoo")
from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import BaseWrapper, OrderEnforcingWrapper

from juggler.envrunner.multi_agent.games import reader


class Inner(AECEnv[str, int, int]):
    """Has agents from its reset on, and another list of them after each step."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.agent_selection = ["a", "b"], "a"

    def step(self, action: int) -> None:
        self.agents = self.agents[1:]


class Property(BaseWrapper[str, int, int]):
    """Counts how often its agents are read, and renames them."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.reads = 0

    @property
    def agents(self) -> list[str]:
        self.reads += 1
        return [f"{each}!" for each in self.env.agents]

    @agents.setter
    def agents(self, value: Any) -> None:
        raise AttributeError


class Lookup(BaseWrapper[str, int, int]):
    """Renames what it looks up."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return [f"{each}?" for each in found] if name == "agents" else found


class Overriding(BaseWrapper[str, int, int]):
    """Has agents of its own from its first step on."""

    def step(self, action: int) -> None:
        super().step(action)
        self.agents = ["mine"]


def wrapped(*kinds: Any) -> Any:
    env: Any = Inner()
    for kind in kinds:
        env = kind(env)
    env.reset()
    return env


@pytest.mark.parametrize(
    ("kinds", "before", "after"),
    [
        ((), ["a", "b"], ["b"]),
        ((BaseWrapper, OrderEnforcingWrapper), ["a", "b"], ["b"]),
        ((BaseWrapper, Property, OrderEnforcingWrapper), ["a!", "b!"], ["b!"]),
        ((Property, BaseWrapper), ["a!", "b!"], ["b!"]),
        ((BaseWrapper, Lookup, BaseWrapper), ["a?", "b?"], ["b?"]),
        ((Property, Lookup, BaseWrapper), ["a!?", "b!?"], ["b!?"]),
        ((BaseWrapper, Overriding, OrderEnforcingWrapper), ["a", "b"], ["mine"]),
    ],
)
def test_a_wrapper_that_has_an_attribute_of_its_own_is_asked_for_it(
    kinds: tuple[Any, ...], before: list[str], after: list[str]
) -> None:
    env = wrapped(*kinds)
    read = reader(env, "agents")
    assert read() == env.agents == before
    env.step(0)
    assert read() == env.agents == after


def test_wrappers_that_only_hand_a_lookup_on_are_passed_over() -> None:
    env = wrapped(BaseWrapper, BaseWrapper, OrderEnforcingWrapper)
    read = reader(env, "agent_selection")
    env.env.__dict__["env"] = None  # a lookup from wrapper to wrapper would end here
    assert read() == "a"
