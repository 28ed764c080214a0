"""Games that break rules, or never end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.scripted_games import ScriptedParallel, ScriptedTurns, ScriptedVector, drawn, play

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame, TurnBasedGame
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs, Turn
from juggler.envrunner.multi_agent.vector_turns import VectorTurns


def envs_of(make: Callable[..., Any], num_envs: int = 2, **config: Any) -> MultiAgentEnvs:
    return make_multi_agent_envs(
        EnvRunnerConfig(env="mine", envs_per_runner=num_envs, **config), make
    )


class Broken(ScriptedParallel):
    """A Parallel game whose results `change` modifies, from step three."""

    def __init__(self, change: Callable[[Any, list[Any]], None]) -> None:
        super().__init__(drawn(3, "parallel"))
        self.change = change
        self.steps = 0

    def step(self, actions: dict[str, Any]) -> Any:
        told = list(super().step(actions))
        self.steps += 1
        if self.steps > 2 and self.agents:
            self.change(self, told)
        return tuple(told)


def gone(game: Any) -> str:
    return next(agent for agent in game.possible_agents if agent not in game.agents)


def lose_an_agent(game: Any, told: list[Any]) -> None:
    game.agents = game.agents[1:]
    told[2] = dict.fromkeys(told[2], False)
    told[3] = dict.fromkeys(told[3], False)


BROKEN: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "an agent is unknown": (
        lambda game, told: game.agents.append("dan"),
        "agent 'dan' is not in possible_agents, ['ann', 'bob', 'cy']",
    ),
    "an agent is gone without an end": (
        lose_an_agent,
        "is gone from `agents`, and was neither terminated nor truncated",
    ),
    "the last observation is missing": (
        lambda game, told: told[2].update(dict.fromkeys(told[2], True)) or told[0].clear(),
        "is missing in the observations that it returned",
    ),
    "a reward is missing": (
        lambda game, told: told[1].clear(),
        "is missing in the rewards that it returned",
    ),
    "a reward is no number": (
        lambda game, told: told[1].update(dict.fromkeys(told[1], "much")),
        "must be a number, not 'much'",
    ),
    "an ending is a word": (
        lambda game, told: told[2].update(dict.fromkeys(told[2], "no")),
        "must be True or False, not 'no'",
    ),
    "a truncation is None": (
        lambda game, told: told[3].update(dict.fromkeys(told[3])),
        "must be True or False, not None",
    ),
    "an ending is missing": (
        lambda game, told: told[3].clear(),
        "is missing in the truncations that it returned",
    ),
    "the shape is wrong": (
        lambda game, told: told[0].update({game.agents[0]: np.zeros(2)}),
        "its observation is float64 of shape [2], but its observation_space says Box",
    ),
    "an observation is None": (
        lambda game, told: told[0].update({game.agents[0]: None}),
        "its observation is None, but its observation_space says Box",
    ),
    "the dtype is wrong": (
        lambda game, told: told[0].update({game.agents[0]: np.zeros(3, complex)}),
        "its observation is complex128 of shape [3], but its observation_space says Box",
    ),
    "a dict is missing": (
        lambda game, told: told.pop(),
        "it must return (observations, rewards, terminations, truncations, infos), five dicts",
    ),
    "there are no infos": (
        lambda game, told: told.__setitem__(4, None),
        "it must return (observations, rewards, terminations, truncations, infos), five dicts",
    ),
    "an info is None": (
        lambda game, told: told[4].update({game.agents[0]: None}),
        "the info of agent 'bob' must be a dict, and is of type NoneType",
    ),
    "the rewards are a list": (
        lambda game, told: told.__setitem__(1, [0.0, 0.0, 0.0]),
        "it must return (observations, rewards, terminations, truncations, infos), five dicts",
    ),
    "it raises": (lambda game, told: 1 / 0, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_a_step_returns_is_checked(what: str) -> None:
    change, said = BROKEN[what]
    envs = envs_of(lambda: Broken(change))
    with pytest.raises(EnvironmentFailed) as failed:
        play(envs, 0, 40)
    assert said in str(failed.value)
    assert failed.value.lasting == (what != "it raises")
    assert str(failed.value).startswith("environment ")
    assert failed.value.call == "step"
    assert "\n" not in str(failed.value)
    assert ("ZeroDivisionError" in failed.value.traceback) == (what == "it raises")


class Returning(ScriptedParallel):
    """A Parallel game in which an ended agent comes back."""

    def __init__(self, comes_back: bool) -> None:
        super().__init__(drawn(3, "parallel", 30))
        self.comes_back = comes_back
        self.ended: list[str] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.ended = []
        return super().reset(seed)

    def step(self, actions: dict[str, Any]) -> Any:
        told = super().step(actions)
        if self.ended and self.agents:
            if self.comes_back:
                self.agents.append(self.ended[0])
                told[0][self.ended[0]] = np.zeros(3)
            else:
                told[1][self.ended[0]] = 0.5
        done = [each for each in actions if told[2][each] or told[3][each]]
        self.ended += done
        return told


@pytest.mark.parametrize(
    ("comes_back", "said"),
    [(True, "came back after its episode"), (False, "got a reward after its episode ended")],
)
def test_an_agent_that_has_ended_neither_returns_nor_is_rewarded(
    comes_back: bool, said: str
) -> None:
    envs = envs_of(lambda: Returning(comes_back))
    with pytest.raises(EnvironmentFailed, match=rf"agent '(ann|bob|cy)' {said}"):
        play(envs, 0, 200)


class Undying(ScriptedTurns):
    def step(self, action: Any) -> None:
        if action is not None:
            super().step(action)


def test_an_agent_that_stays_on_turn_after_its_end_is_an_error_and_no_endless_loop() -> None:
    envs = envs_of(lambda: Undying(drawn(3, "turns")))
    with pytest.raises(EnvironmentFailed, match="is still on turn after its last step"):
        play(envs, 0, 40)


class Uninformed(ScriptedTurns):
    """A game of turns with wrong `infos` from the third step on."""

    def __init__(self, infos: Any) -> None:
        super().__init__(drawn(3, "turns", 20))
        self.wrong = infos

    def step(self, action: Any) -> None:
        super().step(action)
        if self.at == 3:
            self.infos = self.wrong


@pytest.mark.parametrize(
    ("infos", "said"),
    [
        (
            dict.fromkeys(("ann", "bob", "cy"), 1.0),
            r"the info of agent '\w+' must be a dict, and is of type float",
        ),
        (None, "its infos must be a dict by agent, not None"),
    ],
)
def test_infos_of_a_game_of_turns_are_dicts(infos: Any, said: str) -> None:
    envs = envs_of(lambda: Uninformed(infos))
    with pytest.raises(EnvironmentFailed, match=rf"environment \d .* failed in step: {said}"):
        play(envs, 0, 40)


class Deserted(ScriptedTurns):
    def step(self, action: Any) -> None:
        super().step(action)
        if self.at == 3:
            self.agents = []


def test_agents_that_vanish_with_their_game_are_named() -> None:
    envs = envs_of(lambda: Deserted(drawn(3, "turns", 20)))
    with pytest.raises(EnvironmentFailed, match="neither terminated nor truncated"):
        play(envs, 0, 40)


class Empty(ScriptedParallel):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        told = super().reset(seed)
        self.agents = []
        return told


class Bare(ScriptedParallel):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed)[0]


class Unbounded(ScriptedParallel):
    possible_agents = ()


class Changing(ScriptedParallel):
    calls = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        self.calls += 1
        return spaces.Box(-1, self.calls, (3,))


class Spaceless(ScriptedParallel):
    def action_space(self, agent: str) -> Any:
        return 3


class Raising(ScriptedParallel):
    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return {"ann": spaces.Discrete(2)}[agent]  # type: ignore[return-value]


class WronglyMasked(ScriptedParallel):
    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        seen, infos = super().reset(seed)
        return seen, {agent: {"action_mask": np.ones(2)} for agent in infos}


class Different(ScriptedParallel):
    made = 0

    def __init__(self) -> None:
        super().__init__(drawn(0, "parallel"))
        Different.made += 1
        if Different.made % 2 == 0:
            self.possible_agents = ("ann", "bob")  # type: ignore[assignment]


class Numbered(ScriptedParallel):
    possible_agents = (1, "1")  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Empty, "no agent is there: `agents` is"),
        (Bare, "it must return"),
        (Unbounded, "Unbounded must have"),
        (Changing, "an agent must always have the same space"),
        (Spaceless, "action_space('ann') must return a"),
        (Raising, "failed in constructor: KeyError: 'bob'"),
        (WronglyMasked, "the action mask for Discrete(3)"),
        (Numbered, "its agents must have different"),
    ],
)
def test_what_a_game_says_at_the_beginning_is_checked(make: Any, said: str) -> None:
    with pytest.raises((EnvironmentFailed, ValueError)) as failed:
        envs_of(lambda: make(drawn(0, "parallel")))
    assert said in str(failed.value)


def test_games_of_one_name_must_have_the_same_agents() -> None:
    with pytest.raises(EnvironmentFailed, match="and environment 0 has"):
        envs_of(Different)


def test_a_constructor_that_raises_is_named_and_closes_the_other_games() -> None:
    made: list[ScriptedParallel] = []

    def make() -> ScriptedParallel:
        if made:
            raise RuntimeError("no display")
        made.append(ScriptedParallel(drawn(0, "parallel")))
        return made[0]

    with pytest.raises(EnvironmentFailed, match=r"environment 1 .* no display"):
        envs_of(make)
    assert made[0].closed


def nothing_acts(env: ScriptedVector) -> None:
    env.acting = np.zeros_like(env.acting)


def ended_agents_act(env: ScriptedVector) -> None:
    env.acting = env.acting | env.terminated | env.truncated


VECTORS: dict[str, tuple[Callable[[ScriptedVector], Any], str]] = {
    "too few rewards": (
        lambda env: setattr(env, "rewards", env.rewards[:1]),
        "its rewards must be an array of numbers with shape [2, 3]",
    ),
    "flags of numbers": (
        lambda env: setattr(env, "terminated", env.terminated * 1),
        "its terminated must be an array of bool with shape [2, 3]",
    ),
    "observations of another shape": (
        lambda env: setattr(env, "seen", env.seen[..., :2]),
        "its observations are float64 of shape [2, 3, 2], and must be float64 of shape [2, 3, 3]",
    ),
    "agents without an end": (nothing_acts, "is gone, and was neither terminated nor truncated"),
    "agents after their end": (ended_agents_act, "came back after its episode ended"),
}


@pytest.mark.parametrize("what", VECTORS)
def test_what_a_vector_returns_is_checked(what: str) -> None:
    change, said = VECTORS[what]

    class Wrong(ScriptedVector):
        steps = 0

        def step(self, actions: Any) -> Any:
            super().step(actions)
            self.steps += 1
            if self.steps > 2:
                change(self)
            return self.seen, self.rewards, self.terminated, self.truncated, self.acting

    envs = VectorTurns(Wrong(2, [drawn(i, "parallel") for i in range(2)]), "wrong")
    with pytest.raises(EnvironmentFailed) as failed:
        play(envs, 0, 40)
    assert said in str(failed.value)
    assert failed.value.lasting


class Incomplete(ScriptedVector):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, [drawn(i, "parallel") for i in range(num_envs)])
        del self.action_space


class Few(ScriptedVector):
    def __init__(self, num_envs: int) -> None:
        super().__init__(1, [drawn(0, "parallel")])


class Namesakes(ScriptedVector):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, [drawn(i, "parallel") for i in range(num_envs)])
        self.agents = ("ann", "ann", "cy")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Incomplete, "Incomplete must have"),
        (Few, "Few has 1 environments where 2"),
        (Namesakes, "Namesakes must have agents with"),
    ],
)
def test_what_a_vector_has_is_checked(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        envs_of(make)


# Games without an end: a limit ends them, or a warning appears.


AGENTS = ["ann", "bob"]


class Endless:
    """Two agents act at once, forever; observations are step numbers."""

    possible_agents = AGENTS

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, np.inf, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(AGENTS), 0
        return self.seen(), {}

    def seen(self) -> dict[str, Any]:
        return dict.fromkeys(AGENTS, np.array([self.at], np.float32))

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        no = dict.fromkeys(AGENTS, False)
        return self.seen(), {"ann": 1.0, "bob": -0.5}, no, dict(no), {}


class EndsAlone(Endless):
    """Ann's episode ends with step 2."""

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, over, cut, infos = super().step(actions)
        if self.at == 2:
            over["ann"], self.agents = True, ["bob"]
        return seen, {agent: rewards[agent] for agent in actions}, over, cut, infos


class EndlessTurns:
    """Agents in turn, forever, or Ann alone; each move pays 1."""

    possible_agents = AGENTS
    observation_space, action_space = Endless.observation_space, Endless.action_space

    def __init__(self, alone: bool = False) -> None:
        self.alone = alone

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.at = list(AGENTS), 0
        self.agent_selection = "ann"
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.infos: dict[str, Any] = {agent: {} for agent in AGENTS}

    def observe(self, agent: str) -> Any:
        return np.array([self.at], np.float32)

    def last(self) -> Any:
        agent = self.agent_selection
        return self.observe(agent), self._cumulative_rewards[agent], False, False, {}

    def step(self, action: Any) -> None:
        self.at += 1
        self._cumulative_rewards[self.agent_selection] = 0.0
        for agent in AGENTS:
            self._cumulative_rewards[agent] += 1.0
        if not self.alone or self.at < 2:
            self.agent_selection = AGENTS[self.at % 2]
        else:
            self.agent_selection = "ann"


def play_on(envs: GamesInTurn, steps: int) -> list[Turn]:
    turns = [envs.reset(0)]
    for _ in range(steps):
        acting = [len(group.acting) for group in turns[-1].groups]
        turns.append(envs.step([np.zeros(count, np.int64) for count in acting]))
    return turns


def test_a_limit_truncates_all_agents_that_are_there() -> None:
    envs = GamesInTurn([ParallelGame(Endless(), 0, limit=3)], "Endless")
    turns = play_on(envs, 7)
    overs = [number for number, turn in enumerate(turns) if len(turn.over)]
    assert overs == [3, 6]
    for turn in (turns[3], turns[6]):
        (group,) = turn.groups
        assert group.ended.tolist() == [0, 1]
        assert group.terminated.tolist() == [False, False]
        assert np.asarray(group.last_observations).tolist() == [[3.0], [3.0]]
        assert group.last_rewards.tolist() == [1.0, -0.5]
        assert (turn.env_lengths.tolist(), turn.env_returns.tolist()) == ([3], [1.5])
        assert turn.agent_returns.tolist() == [[3.0, -1.5]]
        assert np.asarray(group.observations).tolist() == [[0.0], [0.0]], "the next episode"


def test_an_agent_that_has_ended_is_not_truncated_again() -> None:
    envs = GamesInTurn([ParallelGame(EndsAlone(), 0, limit=4)], "EndsAlone")
    turns = play_on(envs, 4)
    assert [turn.groups[0].ended.tolist() for turn in turns] == [[], [], [0], [], [1]]
    assert turns[2].groups[0].terminated.tolist() == [True]
    assert turns[4].groups[0].terminated.tolist() == [False]


@pytest.mark.parametrize("limit", [4, 5])
def test_a_limit_gives_agents_that_are_not_on_turn_what_they_have_yet_to_hear(limit: int) -> None:
    envs = GamesInTurn([TurnBasedGame(EndlessTurns(), 0, limit)], "EndlessTurns")
    turns = play_on(envs, limit)
    (group,) = turns[limit].groups
    assert group.ended.tolist() == [0, 1]
    assert group.terminated.tolist() == [False, False]
    assert np.asarray(group.last_observations).tolist() == [[limit], [limit]]
    # The last player to move has one move's reward, the other player two moves' rewards.
    assert group.last_rewards.tolist() == ([2.0, 1.0] if limit % 2 == 0 else [1.0, 2.0])
    assert turns[limit].over.tolist() == [0]
    assert turns[limit].env_lengths.tolist() == [limit]
    assert turns[limit].agent_returns.tolist() == [[limit, limit]], "the first move pays both, too"


def test_a_limit_needs_to_know_what_agents_have_yet_to_hear() -> None:
    class Silent(EndlessTurns):
        def last(self) -> Any:
            return self.observe("ann"), 0.0, False, False, {}

        def step(self, action: Any) -> None:
            self.__dict__.pop("_cumulative_rewards", None)

    envs = GamesInTurn([TurnBasedGame(Silent(), 0, 2)], "Silent")
    with pytest.raises(EnvironmentFailed, match="max_episode_steps needs the"):
        play_on(envs, 2)


def test_the_key_of_a_configuration_is_such_a_limit() -> None:
    config = EnvRunnerConfig(env="mine:Endless", envs_per_runner=2, max_episode_steps=5)
    envs = make_multi_agent_envs(config, Endless)
    assert isinstance(envs, GamesInTurn)
    assert [turn.over.tolist() for turn in play_on(envs, 5)] == [[]] * 5 + [[0, 1]]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_episode_steps": 0}, "must be at least 1"),
        ({"max_episode_steps": 5, "gateway": "h:1"}, "have them truncate their episodes"),
        ({"max_episode_steps": 5, "env": "envpool:Pong-v5"}, "have them truncate their episodes"),
        (
            {"max_episode_steps": 5, "env_kwargs": {"max_episode_steps": 5}},
            "is in env_kwargs, too: leave out",
        ),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="max_episode_steps") as refused:
        EnvRunnerConfig(**keys).validate()
    assert words in str(refused.value)


def test_games_that_are_stepped_as_arrays_have_a_limit_of_their_own() -> None:
    config = EnvRunnerConfig(env="juggler:CartPoles", max_episode_steps=5)
    with pytest.raises(ValueError, match="CartPoles steps all of its"):
        make_multi_agent_envs(config)


REMEDY = "max_episode_steps = 1000 truncates all agents after that many steps"


def test_people_are_told_of_an_agent_that_does_not_end() -> None:
    games = [ParallelGame(Endless(), 0, 40), ParallelGame(EndsAlone(), 1)]
    envs = GamesInTurn(games, "EndsAlone")
    play_on(envs, 79)
    assert envs.overdue(80) == ""
    play_on(envs, 80)
    assert envs.overdue(80) == (
        "waits for agent 'bob' of environment 1 (EndsAlone), which has not ended within 80 steps "
        f"of one episode: {REMEDY}"
    )
    assert envs.overdue(81) == ""


def test_people_are_told_of_an_agent_that_is_never_on_turn_again() -> None:
    envs = GamesInTurn([TurnBasedGame(EndlessTurns(alone=True), 0)], "EndlessTurns")
    play_on(envs, 19)
    assert envs.overdue(20) == ""
    play_on(envs, 22)
    assert envs.overdue(20) == (
        "waits for agent 'bob' of environment 0 (EndlessTurns), which has neither acted nor ended "
        f"in the last 20 steps of one episode: {REMEDY}"
    )


def test_an_episode_is_very_long_only_beside_those_before() -> None:
    envs = GamesInTurn([ParallelGame(Endless(), 0, 100)], "Endless")
    play_on(envs, 199)
    assert envs.overdue(50) == ""
