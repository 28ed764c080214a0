"""The update that is tried before a run with an algorithm of one's own begins."""

from __future__ import annotations

from typing import Any

import pytest
from support.algorithms import acts_in_choices, keeps_steps, needs_memory
from support.tag_game import Tag

from juggler.driver import trial_modules, trial_updates
from juggler.driver.config import RunConfig
from juggler.driver.trial_modules import build_one
from juggler.driver.trial_updates import rounds_of_batches
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.multi_agent.making import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.runtime.episodes.version import DEFAULT_MODULE


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_of_no_algorithm_that_ships_would_be_refused(algorithm: str) -> None:
    env = "CartPole-v1" if acts_in_choices(algorithm) else "Pendulum-v1"
    keys: dict[str, Any] = {"algorithm": algorithm, "env": env, "fragment_steps": 16}
    keys["model"] = {"hidden_sizes": [8]}
    if keeps_steps(algorithm):
        keys |= {"replay_begin": 8, "replay_batch_size": 8, "replay_ratio": 1.0}
    if needs_memory(algorithm):
        keys["model"] = {"hidden_sizes": [8], "recurrent": "gru"}
    config = RunConfig.from_flat(keys)
    vector = make_vector_env(config.env_runner, just_one=True)
    spaces = vector.single_observation_space, vector.single_action_space
    built = build_one(config, AgentGroup((), *spaces), None, None, {})
    more = (
        round[DEFAULT_MODULE]
        for round in rounds_of_batches(config, vector, {DEFAULT_MODULE: built})
    )
    for _ in range(3):
        assert built.try_update(next(more), more) == ""
    assert built.learner.updates == 3
    vector.close()


@pytest.mark.parametrize(("game", "is_judged"), [("Tag", True), ("DesertedTag", False)])
def test_a_loss_that_is_not_finite_is_judged_if_its_agent_acts_in_a_further_round(
    game: str, is_judged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_updates, "_MORE_SECONDS", 0.0)  # for one further round
    keys = {"env": f"support.tag_game:{game}", "fragment_steps": 7, "envs_per_runner": 1}
    agents = {agent: agent.partition("_")[0] for agent in Tag.possible_agents}
    modules = {"runner": {"algorithm": "support.own_algorithms:Infinite"}}
    config = RunConfig.from_flat({**keys, "agents": agents, "modules": modules})
    envs = make_multi_agent_envs(config.env_runner)
    groups = zip(("adversary", "runner"), envs.groups, strict=True)
    built = {id: build_one(config.of(id), group, None, None, {}) for id, group in groups}

    def try_updates() -> None:
        trial_modules.try_updates(config, envs, built, lambda _: None, pytest.fail)

    if is_judged:
        with pytest.raises(Exception, match="runner") as failed:
            try_updates()
        assert "all of whose numbers are finite, policy_loss is " in str(failed.value.__cause__)
    else:
        try_updates()
        assert built["runner"].learner.updates == 1
    envs.close()
