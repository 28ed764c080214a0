"""What is tried before a run: connectors, updates, weights, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.beginnings import beginning_of
from support.rehearsing import learner_of, rehearse, stage_of
from support.small_cores import action_space_of, acts_in_choices, keeps_steps, needs_memory
from support.small_games import Tag

import juggler
from juggler.driver import module_placement as learners_here
from juggler.driver import rehearsal
from juggler.driver.agent_tables import FoundGroup
from juggler.driver.checkpoint.snapshots import checkpoint_tree
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.module_placement import must_fit_together
from juggler.driver.preflight import PreflightError, without_arrays
from juggler.driver.rehearsal import _try_actions, _try_connectors, begin, must_continue
from juggler.envrunner.environments.vector import make_vector_env
from juggler.envrunner.multi_agent.make_envs import make_multi_agent_envs
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.state_trees import StateMismatch
from juggler.learner.process.learner_program import CPU
from juggler.runtime.checkpoints.checkpoint import Checkpoint, write
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_learner_pipeline, build_runner_pipelines
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.runtime.wire.spaces import space_to_message


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
    learner = learner_of(config, AgentGroup((), *spaces))
    rounds = rehearsal._rounds(config, stage_of(config)(vector, 16))
    more = (each[DEFAULT_MODULE] for each in rounds)
    for _ in range(3):
        assert rehearsal.try_update(config, learner, next(more), more) == ""
    assert learner.updates == 3
    vector.close()


@pytest.mark.parametrize(("game", "is_judged"), [("Tag", True), ("DesertedTag", False)])
def test_a_loss_that_is_not_finite_is_judged_if_its_agent_acts_in_a_further_round(
    game: str, is_judged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_MORE_SECONDS", 0.0)  # for one further round
    keys = {"env": f"support.small_games:{game}", "fragment_steps": 7, "envs_per_runner": 1}
    agents = {agent: agent.partition("_")[0] for agent in Tag.possible_agents}
    modules = {"runner": {"algorithm": "support.own_algorithms:Infinite"}}
    config = RunConfig.from_flat({**keys, "agents": agents, "modules": modules})
    envs = make_multi_agent_envs(config.env_runner)
    groups = zip(("adversary", "runner"), envs.groups, strict=True)
    learners = {id: learner_of(config.of(id), group) for id, group in groups}

    def try_updates() -> None:
        rehearsal.try_updates(config, stage_of(config), envs, learners, lambda _: None, pytest.fail)

    if is_judged:
        with pytest.raises(ValueError, match="are finite, policy_loss is ") as failed:
            try_updates()
        assert vars(failed.value)["module_id"] == "runner"
    else:
        try_updates()
        assert learners["runner"].updates == 1
    envs.close()


def try_updates_of(**keys: Any) -> bool:
    """Rehearse a run on CartPole once its modules are built."""
    config = RunConfig.from_flat({"env": "CartPole-v1", "fragment_steps": 16, **keys})
    vector = make_vector_env(config.env_runner, just_one=True)
    group = AgentGroup((), vector.single_observation_space, vector.single_action_space)
    learners = {DEFAULT_MODULE: learner_of(config, group)}
    try:
        return rehearsal.try_updates(
            config, stage_of(config), vector, learners, lambda _: None, pytest.fail
        )
    finally:
        vector.close()


OWN = "support.own_algorithms"


def test_a_replay_gives_what_it_has_whatever_learning_waits_for_in_the_run() -> None:
    keys: dict[str, Any] = {"replay_begin": 50_000, "replay_batch_size": 24}
    with pytest.raises(RuntimeError, match="24 rows drawn"):
        try_updates_of(algorithm=f"{OWN}:Telling", **keys)


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
    monkeypatch.setattr(rehearsal, "_UPDATE_SECONDS", 0.1)
    assert not try_updates_of(module=f"{OWN}:Slow")


# A run that cannot go on with its weights is told so before its workers start.


BOX = spaces.Box(-10, 10, (4,), np.float32)
RND, SMALL = {"intrinsic": {"kind": "rnd"}}, {"hidden_sizes": [8]}


def config_of(algorithm: str, **keys: Any) -> RunConfig:
    needed: dict[str, Any] = {"algorithm": algorithm}
    if needs_memory(algorithm):
        needed["model"] = {"recurrent": "gru"}
    if algorithm in ("bc", "iql"):
        needed["dataset"] = "somewhere"
    return RunConfig.from_flat({**needed, **keys})


class World:
    """A run as it was and as it is resumed.

    Args:
        before: its configuration.
        sees, acts: spaces of its environment.
    """

    def __init__(self, before: RunConfig, sees: Any, acts: Any, module_id: str = "default") -> None:
        self.module_id = module_id
        built = build(before, sees, acts)
        state, extra = built.save()
        module = {"version": (1, 1), "extra": extra, "spaces": as_json(sees, acts)}
        tree = checkpoint_tree({module_id: state}, {})
        path = Path("runs/mine/checkpoints/000000001")
        saved = Checkpoint((1, 1), tree, {module_id: module}, {}, before.flat(), {}, path)
        self.before = without_arrays(saved)

    def go_on(self, now: RunConfig, sees: Any, acts: Any, agents: tuple[str, ...] = ()) -> None:
        group = FoundGroup(agents, space_to_message(sees), space_to_message(acts))
        must_continue(now, {self.module_id: build(now, sees, acts)}, [group], self.before)


def build(config: RunConfig, sees: Any, acts: Any) -> Any:
    return learner_of(config.of(config.module_ids[0]), AgentGroup((), sees, acts))


def as_json(sees: Any, acts: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    both = {"observation": sees, "action": acts}
    return {side: MessageToDict(space_to_message(space)) for side, space in both.items()}


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        *((algorithm, {}) for algorithm in ALGORITHMS),
        ("ppo", RND),
        ("impala", {"replay_share": 0.5, "weights_dtype": "bfloat16"}),
        ("ppo", {"connectors": {"env_to_module": ["mean_std_filter"]}}),
        ("ppo", {"connectors": {"learner": ["normalize_rewards"]}}),
        ("sac", {"optimizer": "rmsprop", "save_replay": True}),
        ("ppo", {"optimizers": {"value": {"parameters": ["value_*"], "optimizer": "rmsprop"}}}),
    ],
)
def test_a_run_goes_on_with_its_own_weights_and_with_no_others(
    algorithm: str, keys: dict[str, Any]
) -> None:
    before, acts = config_of(algorithm, **keys), action_space_of(algorithm)
    world = World(before, BOX, acts)
    world.go_on(before, BOX, acts)
    other = config_of(algorithm, **keys, model={**before.module.model, **SMALL})
    with pytest.raises(ConfigError) as refused:
        world.go_on(other, BOX, acts)
    assert "the run cannot continue from runs/mine/checkpoints/000000001: weights " in str(
        refused.value
    )
    assert ". Restore the files and the settings that it was made with, or" in str(refused.value)


def test_another_environment_is_told_by_its_spaces_and_the_module_that_sees_them() -> None:
    table = {"agents": {"adversary_0": "hunters"}}
    config, acts = config_of("ppo", **table), spaces.Discrete(2)
    world = World(config, BOX, acts, "hunters")
    says = r"^module 'hunters': .*: the observation space of its environment was Box\(-10.*, \(4,\)"
    with pytest.raises(ConfigError, match=says + r".*, and is now Box\(-10.*, \(5,\)"):
        world.go_on(config, spaces.Box(-10, 10, (5,)), acts, ("adversary_0",))
    with pytest.raises(ConfigError, match="the action space"):
        world.go_on(config, BOX, spaces.Discrete(3), ("adversary_0",))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [({}, RND, "its state is of 'ppo', and this"), (RND, {}, "its state is of 'ppo with rnd'")],
)
def test_an_intrinsic_reward_that_comes_or_goes_is_told(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    acts = spaces.Discrete(2)
    world = World(config_of("ppo", **before), BOX, acts)
    with pytest.raises(ConfigError, match=told):
        world.go_on(config_of("ppo", **now), BOX, acts)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"optimizer": "rmsprop"}, "its optimizer was another"),
        ({"optimizer": "rmsprop"}, {}, "its optimizer was another: 'moments/"),
        ({}, {"connectors": {"learner": ["normalize_rewards"]}}, "its state differs"),
    ],
)
def test_another_optimizer_or_pipeline_is_told_with_what_it_lacks(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    acts = spaces.Discrete(2)
    world = World(config_of("ppo", **before), BOX, acts)
    with pytest.raises(ConfigError) as refused:
        world.go_on(config_of("ppo", **now), BOX, acts)
    assert f"cannot continue from runs/mine/checkpoints/000000001: {told}" in str(refused.value)
    assert str(refused.value).count("Restore") == 1


def test_a_module_that_came_later_has_no_weights_to_go_on_with() -> None:
    config, acts = config_of("ppo"), spaces.Discrete(2)
    world = World(config, BOX, acts)
    world.module_id = "later"
    world.go_on(config, spaces.Box(-1, 1, (5,)), acts)


def test_a_module_whose_table_names_weights_of_another_network_is_told_before_a_run(
    tmp_path: Path,
) -> None:
    acts = action_space_of("ppo")
    state, extra = build(config_of("ppo", model=SMALL), BOX, acts).save()
    module = {"version": (1, 1), "extra": extra, "spaces": as_json(BOX, acts)}
    before = config_of("ppo", model=SMALL, agents={"cat": "old"}).flat()
    tree = checkpoint_tree({"old": state}, {})
    write(tmp_path / "checkpoints", Checkpoint((1, 1), tree, {"old": module}, {}, before, {}), 1)
    tables = {"agents": {"cat": "main"}, "modules": {"main": {"from": f"{tmp_path}:old"}}}
    for model, fits in ((SMALL, True), ({"hidden_sizes": [16]}, False)):
        config = config_of("ppo", model=model, **tables)
        built = {"main": build(config, BOX, acts)}
        if fits:
            begin(config, built, beginning_of(config))
            continue
        with pytest.raises(ValueError, match=r"^modules\.main: from = ") as failed:
            begin(config, built, beginning_of(config))
        assert vars(failed.value)["module_id"] == "main"
        said = str(failed.value)
        assert said.startswith(f"modules.main: from = '{tmp_path}:old': weights ")
        assert "from_parameters" not in said, "which is for from_checkpoint alone"


@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize("env", [{"gateway": "127.0.0.1:0"}, {"env": "dm_env_rpc://robots:5005"}])
def test_a_run_of_simulators_is_rehearsed_with_the_spaces_of_its_checkpoint(
    env: dict[str, Any],
) -> None:
    """Its learners are here, and its simulators may dial later."""
    before = config_of("ppo", **env)
    world = World(before, BOX, spaces.Discrete(2))
    assert rehearse(before, before=world.before) == ()
    with pytest.raises(PreflightError, match=r"cannot continue from .*: weights .* shape"):
        rehearse(config_of("ppo", **env, model=SMALL), before=world.before)


@pytest.mark.usefixtures("local_workers")
def test_each_module_of_simulators_goes_on_with_the_spaces_of_its_own_agents() -> None:
    tables = {"agents": {"hunter_*": "hunters", "*": "runner"}}
    before = config_of("ppo", **tables, gateway="127.0.0.1:0")
    world = World(before, BOX, spaces.Discrete(2), "runner")
    assert rehearse(before, before=world.before) == (), "the hunters' are unknown"
    other = {"modules": {"runner": {"model": SMALL}}}
    with pytest.raises(PreflightError, match=r"^module 'runner': the run cannot continue from"):
        rehearse(config_of("ppo", **tables, gateway="127.0.0.1:0", **other), before=world.before)


def test_a_learner_says_what_does_not_fit_where_nobody_could_know_it_before() -> None:
    acts = spaces.Discrete(2)
    state, extra = build(config_of("ppo"), BOX, acts).save()
    other = build(config_of("ppo", optimizer="rmsprop"), BOX, acts)
    said = (
        "^the checkpoint does not fit this module.*'moments/mean' is in the checkpoint, "
        ".*Restore the files and the settings"
    )
    with pytest.raises(StateMismatch, match=said):
        other.restore(state, extra)


# What learners of one host need together.


GPUS = ["cuda:0", "cuda:1"]


def config_of_learners(**keys: Any) -> RunConfig:
    return RunConfig.from_flat(keys)


def nobody_knows(gpu: str) -> None:
    pass


def test_the_replays_of_all_learners_of_a_host_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learners_here, "usable_memory", lambda: 10 * 10**9)
    one = config_of_learners(num_learners=3)
    must_fit_together(one, {"default": 3e9}, [CPU] * 3, nobody_knows)
    with pytest.raises(ConfigError, match=r"3 learners .* steps of 12.0 GB in"):
        must_fit_together(one, {"default": 4e9}, [CPU] * 3, nobody_knows)
    must_fit_together(one, {"default": 4e9}, [CPU, "cuda:0", CPU], nobody_knows)  # one is on a GPU
    several = config_of_learners(agents={"a": "one", "b": "two", "c": "three"}, num_learners=2)
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
        config_of_learners(algorithm="dqn", num_learners=2, save_replay=each)
        for each in (True, False)
    )
    must_fit_together(saved, {"default": 2.5e9}, [CPU] * 2, nobody_knows)
    with pytest.raises(ConfigError, match=r"steps of 6.0 GB in all \(3.0"):
        must_fit_together(saved, {"default": 3e9}, [CPU] * 2, nobody_knows)
    must_fit_together(unsaved, {"default": 5e9}, [CPU] * 2, nobody_knows)
    # Steps on GPUs are copied into the memory of the host, too.
    must_fit_together(saved, {"default": 5e9}, GPUS, nobody_knows)
    with pytest.raises(ConfigError, match=r"^replay_capacity: while .*, 12.0 GB are taken"):
        must_fit_together(saved, {"default": 6e9}, GPUS, nobody_knows)


def test_the_replays_of_all_learners_on_one_gpu_are_added_up() -> None:
    unsaved: dict[str, Any] = {"algorithm": "dqn", "save_replay": False}
    free = {"cuda:0": 10 * 10**9, "cuda:1": 7 * 10**9}
    group = config_of_learners(num_learners=3, **unsaved)
    must_fit_together(group, {"default": 5e9}, [*GPUS, "cuda:0"], free.get)
    with pytest.raises(
        ConfigError,
        match=r"^replay_capacity: the 2 replays on cuda:0 keep steps of 12.0 GB in all "
        r"\(6.0, 6.0\), and 10.0 GB of its memory are free. Lower it",
    ):
        must_fit_together(group, {"default": 6e9}, [*GPUS, "cuda:0"], free.get)
    must_fit_together(group, {"default": 6e9}, [*GPUS, CPU], free.get)
    several = config_of_learners(
        agents={"a": "one", "b": "two", "c": "three"}, num_learners=1, **unsaved
    )
    kept = {"one": 4e9, "two": 0.0, "three": 5e9}  # `two` has no replay, or has it on disk
    must_fit_together(several, kept, ["cuda:0"], free.get)
    with pytest.raises(ConfigError, match=r"2 replays on cuda:1 .* 9.0 GB in"):
        must_fit_together(several, kept, ["cuda:1"], free.get)
    must_fit_together(several, kept, ["cuda:1"], nobody_knows)


# Mistakes in users' connectors are reported before a run begins.


SEEN, ACTS = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)


class Wider(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return np.concatenate([observations, observations], 1)


class Silent(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return None


class InPlace(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        observations *= 2
        return observations


class Doubled(juggler.ObservationConnector):
    def __call__(self, observations: Any) -> Any:
        return observations * 2


class Summed(juggler.LearnerConnector):
    def __call__(self, columns: Any) -> Any:
        return columns | {"rewards": columns["rewards"].sum(1)}


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        (Wider, r"Wider: its observation is float32 of shape \[8\]"),
        (Silent, "Silent: its observation is None"),
        (InPlace, "InPlace changes the observations that it gets"),
    ],
)
def test_a_result_that_does_not_fit_names_the_connector(connector: Any, words: str) -> None:
    pipeline, _ = built(connector)
    with pytest.raises(ValueError, match=words):
        _try_connectors(pipeline, SEEN)


class Beyond(juggler.ActionConnector):
    def __call__(self, actions: Any) -> Any:
        return actions + 1


def test_actions_outside_of_their_space_are_the_fault_of_the_connector() -> None:
    config = ConnectorsConfig.parse({"module_to_env": [f"{__name__}:Beyond"]})
    _, pipeline = build_runner_pipelines(config, SEEN, ACTS)
    with pytest.raises(ValueError, match="connector Beyond: its action holds 2, which is not in"):
        _try_actions(pipeline, ACTS)


def built(*connectors: Any) -> Any:
    names = [f"{__name__}:{each.__name__}" for each in connectors]
    config = ConnectorsConfig.parse({"env_to_module": names})
    return build_runner_pipelines(config, SEEN, ACTS)


def test_a_good_connector_is_accepted_after_another() -> None:
    pipeline, _ = built(Doubled)
    _try_connectors(pipeline, SEEN)


def test_a_space_without_an_encoding_is_named() -> None:
    pipeline, _ = built(Doubled)
    with pytest.raises(UnsupportedSpace, match="Text"):
        _try_connectors(pipeline, spaces.Text(3))


def test_a_learner_connector_keeps_a_number_for_each_step() -> None:
    pipeline = build_learner_pipeline(
        ConnectorsConfig.parse({"learner": [f"{__name__}:Summed"]}), SEEN, ACTS
    )
    assert pipeline is not None
    with pytest.raises(ValueError, match=r"Summed gives column 'rewards' the shape \[3\]"):
        pipeline({"rewards": torch.zeros(3, 5), "live": torch.ones(3, 5)})  # [N, T]
