"""Action masks in infos of several agents reach the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from juggler.client import play_agents, playing
from juggler.client.space_values import Values

MASKS = {"a": [1, 0, 1], "b": [0, 1, 1]}


class Recorder:
    """Stands in for a session, and acts with the first legal action."""

    parameters: Mapping[str, float] = {}

    def next_seed(self) -> None:
        pass

    def __init__(self, agents: Mapping[str, tuple[Any, Any]]) -> None:
        self.values = {name: Values(playing.as_message(each[0])) for name, each in agents.items()}
        self.shown: list[tuple[str, Any]] = []
        self.infos: list[Any] = []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(
        self,
        shown: Mapping[str, Any],
        rewards: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        infos: Any = None,
        continues: bool = False,
    ) -> dict[str, Any]:
        self.infos.append(infos)
        self.continues = continues
        for name, each in shown.items():
            self.values[name].arrays(each, one=True)  # it fits its space
            self.shown.append((name, each))
        over = {name for name in shown if (terminated or {}).get(name)}
        return {
            name: int(np.argmax(each["action_mask"]))
            if isinstance(each, Mapping) and "action_mask" in each
            else 0
            for name, each in shown.items()
            if name not in over
        }


class AtOnce:
    """Two agents, one of which observes a Dict, for two steps."""

    possible_agents = ("a", "b")
    forgets = False

    def observation_space(self, agent: str) -> Any:
        seen = Box(-1, 1, (2,))
        return Dict({"seen": seen}) if agent == "b" else seen

    def action_space(self, agent: str) -> Any:
        return Discrete(3)

    def _shown(self) -> dict[str, Any]:
        return {"a": np.zeros(2, np.float32), "b": {"seen": np.zeros(2, np.float32)}}

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.t = list(self.possible_agents), 0
        return self._shown(), {name: {"action_mask": np.array(MASKS[name])} for name in MASKS}

    def step(self, actions: Any) -> Any:
        assert actions == {"a": 0, "b": 1}
        self.t += 1
        over = self.t == 2
        infos = {
            name: {} if over or self.forgets else {"action_mask": MASKS[name]} for name in MASKS
        }
        self.agents = [] if over else self.agents
        each = dict.fromkeys
        return self._shown(), each(MASKS, 1.0), each(MASKS, over), each(MASKS, False), infos


class InTurns(AtOnce):
    """The agents act in turns; only the one on turn has a mask."""

    def reset(self, seed: int | None = None) -> None:
        super().reset()
        self.infos = {"a": {"action_mask": MASKS["a"]}, "b": {}}
        self.agent_selection = "a"

    def last(self) -> Any:
        agent, over = self.agent_selection, self.t >= 2
        info = {} if over else {"action_mask": MASKS[agent]}
        return self._shown()[agent], 0.5, over, False, info

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        assert action == (None if self.t >= 2 else {"a": 0, "b": 1}[agent])
        if action is None:
            self.agents.remove(agent)
        self.t += 1
        self.agent_selection = "b" if agent == "a" else "a"


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def connect(address: str, agents: Any) -> Recorder:
        made.append(Recorder(agents))
        return made[-1]

    monkeypatch.setattr(playing, "connect_agents", connect)
    return made


@pytest.mark.parametrize(("env", "returned"), [(AtOnce(), 2.0), (InTurns(), 1.0)])
def test_masks_in_infos_are_parts_of_observations(
    sessions: list[Recorder], env: Any, returned: float
) -> None:
    assert play_agents(env, "nowhere", episodes=2) == [{"a": returned, "b": returned}] * 2
    (session,) = sessions
    for name, shown in session.shown:
        part = {"a": "observation", "b": "seen"}[name]
        assert shown.keys() == {part, "action_mask"}
    masks = {
        name: [list(s["action_mask"]) for n, s in session.shown if n == name] for name in MASKS
    }
    for name, found in masks.items():
        assert MASKS[name] in found
        assert [1, 1, 1] in found, "after its last step, an agent has no choice any more"


def test_infos_are_handed_on_after_each_step(sessions: list[Recorder]) -> None:
    play_agents(AtOnce(), "nowhere", episodes=1)
    play_agents(InTurns(), "nowhere", episodes=1)
    at_once, in_turns = sessions
    masks = {name: {"action_mask": mask} for name, mask in MASKS.items()}
    assert at_once.infos == [None, masks, {"a": {}, "b": {}}]
    assert in_turns.infos == [{"a": masks["a"]}, {"b": masks["b"]}, {"a": {}}, {"b": {}}]


def test_an_agent_that_acts_without_its_mask_is_named(sessions: list[Recorder]) -> None:
    env = AtOnce()
    env.forgets = True
    with pytest.raises(ValueError, match="action_mask"):
        play_agents(env, "nowhere", episodes=1)


@pytest.mark.parametrize("mask", [[1, 0, 2], [1, 1], [[1, 0, 1]], [0.5, 1, 1], [256, 0, 1], "101"])
def test_a_mask_that_is_none_is_named(sessions: list[Recorder], mask: Any) -> None:
    class Wrong(AtOnce):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            return *rest, {**infos, "b": {"action_mask": mask}}

    with pytest.raises(ValueError, match="action_mask of agent 'b'"):
        play_agents(Wrong(), "nowhere", episodes=1)


def test_infos_may_be_empty(sessions: list[Recorder]) -> None:
    class Plain(AtOnce):
        def reset(self, seed: int | None = None) -> Any:
            return super().reset()[0], {}

        def step(self, actions: Any) -> Any:
            return *super().step({"a": 0, "b": 1})[:4], {}

    assert play_agents(Plain(), "nowhere", episodes=1) == [{"a": 2.0, "b": 2.0}]
    (session,) = sessions
    assert all(isinstance(shown, np.ndarray) for name, shown in session.shown if name == "a")


class Numbered(AtOnce):
    """Agents are numbers, and dicts have keys of no agent."""

    possible_agents = (0, 1)  # type: ignore[assignment]

    def observation_space(self, agent: Any) -> Any:
        return Box(-1, 1, (2,))

    def reset(self, seed: int | None = None) -> Any:
        self.agents, self.t = [0, 1], 0
        return self._seen(), {0: {}, "common": {"action_mask": [1]}}

    def step(self, actions: Any) -> Any:
        assert actions == {0: 0, 1: 0}
        self.t += 1
        self.agents = [] if self.t == 2 else self.agents
        over = dict.fromkeys((*self.possible_agents, "__all__"), self.t == 2)
        return self._seen(), {0: 1.0, 1: 2.0, "common": 3.0}, over, over, {}

    def _seen(self) -> Any:
        return {agent: np.zeros(2, np.float32) for agent in self.possible_agents}


def test_agents_may_be_numbers_and_extra_keys_are_ignored(sessions: list[Recorder]) -> None:
    assert play_agents(Numbered(), "nowhere", episodes=2) == [{"0": 2.0, "1": 4.0}] * 2
    (session,) = sessions
    assert {name for name, _ in session.shown} == {"0", "1"}


def test_an_episode_continues_while_agents_are_left(sessions: list[Recorder]) -> None:
    class Relay(AtOnce):
        def step(self, actions: Any) -> Any:
            assert not self.t or sessions[0].continues
            self.t += 1
            self.agents = ["b"] if self.t == 1 else []
            seen = {"a": self._shown()["a"], "b": self._shown()["b"]}
            ends = {"a": True, "b": self.t == 2}
            infos = {"b": {"action_mask": MASKS["b"]}}
            return seen, dict.fromkeys(actions, 1.0), ends, dict.fromkeys(ends, False), infos

    play_agents(Relay(), "nowhere", episodes=1)
    assert not sessions[0].continues
