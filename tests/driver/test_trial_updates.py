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


def try_updates_of(**keys: Any) -> bool:
    """What the rehearsal of a run on CartPole does once its modules are built."""
    config = RunConfig.from_flat({"env": "CartPole-v1", "fragment_steps": 16, **keys})
    vector = make_vector_env(config.env_runner, just_one=True)
    group = AgentGroup((), vector.single_observation_space, vector.single_action_space)
    built = trial_modules.build_each(config, {DEFAULT_MODULE: group}, {}, None, {}, lambda _: None)
    try:
        return trial_modules.try_updates(config, vector, built, lambda _: None, pytest.fail)
    finally:
        vector.close()


OWN = "support.own_algorithms"


def test_a_replay_gives_what_it_has_whatever_learning_waits_for_in_the_run() -> None:
    keys: dict[str, Any] = {"replay_begin": 50_000, "replay_batch_size": 24}
    with pytest.raises(RuntimeError, match="24 rows drawn"):
        try_updates_of(algorithm=f"{OWN}:Telling", **keys)


def test_so_does_a_replay_of_ones_own_even_if_that_is_less_than_a_sample() -> None:
    with pytest.raises(RuntimeError) as failed:
        try_updates_of(algorithm=f"{OWN}:Waiting", envs_per_runner=4)
    assert 0 < int(str(failed.value).split()[0]) <= 64


def test_priorities_of_another_shape_are_told_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"OfWrongPriorities.loss .* a tensor of shape \(256, 1\)"):
        try_updates_of(algorithm=f"{OWN}:Misjudging")


@pytest.mark.parametrize("algorithm", ["impala", "ppo"])
def test_values_of_another_shape_are_told_before_a_run_with_an_algorithm_that_ships(
    algorithm: str,
) -> None:
    said = (
        r"'values' in the output of ColumnOfValues.forward_train must be a tensor \[b\] .*\[.*, 1\]"
    )
    with pytest.raises(ValueError, match=said):
        try_updates_of(algorithm=algorithm, module=f"{OWN}:ColumnOfValues")


def test_an_encoder_of_ones_own_that_fails_in_training_alone_is_told_before_the_run() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        try_updates_of(algorithm="dqn", model={"encoder": f"{OWN}:TooFewNumbers"})


def test_a_module_of_ones_own_that_takes_long_to_learn_is_left_to_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial_modules, "_SECONDS", 1.0)
    assert not try_updates_of(module=f"{OWN}:Slow")


def test_no_update_is_made_where_all_code_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_updates.Built, "try_update", lambda *_: pytest.fail("it was made"))
    connectors = {"env_to_module": ["mean_std_filter"], "learner": ["clip_rewards"]}
    assert try_updates_of(algorithm="dqn", connectors=connectors)
