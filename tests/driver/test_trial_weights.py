"""A run that cannot go on with its weights is told so before its workers start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.algorithms import action_space_of, needs_memory

from juggler.driver.agents_found import FoundGroup
from juggler.driver.checkpoint.restoring import checkpoint_tree
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.preflight import GoesOn, PreflightError, rehearse
from juggler.driver.record.checkpoints import write
from juggler.driver.rehearsal import must_go_on
from juggler.driver.trial_modules import ModuleFailed, begin, build_one
from juggler.driver.trial_updates import Built
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.core.state import StateMismatch
from juggler.learner.process.hosted_module import begin_with, go_on_with
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.wire.spaces import space_to_message

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
        state, extra = built.learner.save()
        module = {"version": (1, 1), "extra": extra, "spaces": as_json(sees, acts)}
        tree = checkpoint_tree({module_id: state}, {})
        path = Path("runs/mine/checkpoints/000000001")
        saved = Checkpoint((1, 1), tree, {module_id: module}, {}, before.flat(), {}, path)
        self.before = GoesOn.of(saved, Path("runs/mine"))

    def go_on(self, now: RunConfig, sees: Any, acts: Any, agents: tuple[str, ...] = ()) -> None:
        group = FoundGroup(agents, space_to_message(sees), space_to_message(acts))
        must_go_on(now, {self.module_id: build(now, sees, acts)}, [group], self.before)


def build(config: RunConfig, sees: Any, acts: Any) -> Built:
    return build_one(config.of(config.module_ids[0]), AgentGroup((), sees, acts), None, None, {})


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
    assert "the run cannot go on from runs/mine/checkpoints/000000001: weights " in str(
        refused.value
    )
    assert ". Restore the files and the settings that it was made with, or" in str(refused.value)


def test_another_environment_is_told_by_its_spaces_and_the_module_that_sees_them() -> None:
    table = {"agents": {"adversary_0": "hunters"}}
    config, acts = config_of("ppo", **table), spaces.Discrete(2)
    world = World(config, BOX, acts, "hunters")
    says = r"^module 'hunters': .*: the observation space of its environment was Box\(-10.*, \(4,\)"
    with pytest.raises(ConfigError, match=says + r".*, and now it is Box\(-10.*, \(5,\)"):
        world.go_on(config, spaces.Box(-10, 10, (5,)), acts, ("adversary_0",))
    with pytest.raises(ConfigError, match=r"the action space .*Discrete\(2\).*is Discrete\(3\)"):
        world.go_on(config, BOX, spaces.Discrete(3), ("adversary_0",))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, RND, "its state is of 'ppo', and with what is given it would be of 'ppo with rnd'. R"),
        (RND, {}, "its state is of 'ppo with rnd', and with what is given it would be of 'ppo'. R"),
    ],
)
def test_an_intrinsic_reward_that_comes_or_goes_is_told(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    acts = spaces.Discrete(2)
    world = World(config_of("ppo", **before), BOX, acts)
    with pytest.raises(ConfigError, match=told):
        world.go_on(config_of("ppo", **now), BOX, acts)


def test_another_network_is_told_by_the_module_that_has_it() -> None:
    table = {"agents": {"adversary_0": "hunters"}}
    before, acts = config_of("ppo", **table), spaces.Discrete(2)
    world, other = World(before, BOX, acts, "hunters"), config_of("ppo", **table, model=SMALL)
    with pytest.raises(ConfigError, match=r"^module 'hunters': .* have shape"):
        world.go_on(other, BOX, acts, ("adversary_0",))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"optimizer": "rmsprop"}, "its optimizer was another: 'moments/mean' is in"),
        ({"optimizer": "rmsprop"}, {}, "its optimizer was another: 'moments/"),
        (
            {},
            {"connectors": {"learner": ["normalize_rewards"]}},
            "its state differs: 'learner_pipelines/normalize_rewards' is here, and not in",
        ),
    ],
)
def test_another_optimizer_or_pipeline_is_told_with_what_it_lacks(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    acts = spaces.Discrete(2)
    world = World(config_of("ppo", **before), BOX, acts)
    with pytest.raises(ConfigError) as refused:
        world.go_on(config_of("ppo", **now), BOX, acts)
    assert f"cannot go on from runs/mine/checkpoints/000000001: {told}" in str(refused.value)
    assert str(refused.value).count("Restore") == 1


def test_other_spaces_that_the_same_weights_fit_are_let_through() -> None:
    config, acts = config_of("ppo"), spaces.Discrete(2)
    World(config, BOX, acts).go_on(config, spaces.Box(-1, 1, (4,)), acts)


def test_a_module_that_came_later_has_no_weights_to_go_on_with() -> None:
    config, acts = config_of("ppo"), spaces.Discrete(2)
    world = World(config, BOX, acts)
    world.module_id = "later"
    world.go_on(config, spaces.Box(-1, 1, (5,)), acts)


def test_a_module_whose_table_names_weights_of_another_network_is_told_before_a_run(
    tmp_path: Path,
) -> None:
    acts = action_space_of("ppo")
    state, extra = build(config_of("ppo", model=SMALL), BOX, acts).learner.save()
    module = {"version": (1, 1), "extra": extra, "spaces": as_json(BOX, acts)}
    before = config_of("ppo", model=SMALL, agents={"cat": "old"}).flat()
    tree = checkpoint_tree({"old": state}, {})
    write(tmp_path / "checkpoints", Checkpoint((1, 1), tree, {"old": module}, {}, before, {}), 1)
    tables = {"agents": {"cat": "main"}, "modules": {"main": {"from": f"{tmp_path}:old"}}}
    for model, fits in ((SMALL, True), ({"hidden_sizes": [16]}, False)):
        config = config_of("ppo", model=model, **tables)
        built = {"main": build(config, BOX, acts)}
        if fits:
            begin(config, built, lambda _: None)
            continue
        with pytest.raises(ModuleFailed) as failed:
            begin(config, built, lambda _: None)
        said = str(failed.value.__cause__)
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
    for change, said in (
        ({"model": SMALL}, "cannot go on from runs/mine/checkpoints/000000001: weights .* shape"),
        ({"optimizer": "rmsprop"}, "its optimizer was another: 'moments/mean' is in the"),
        (
            {"connectors": {"learner": ["normalize_rewards"]}},
            "/normalize_rewards' is here",
        ),
        ({"connectors": {"env_to_module": [{"use": "frame_stack", "k": 2}]}}, "weights .*sha"),
    ):
        with pytest.raises(PreflightError, match=said):
            rehearse(config_of("ppo", **env, **change), before=world.before)


@pytest.mark.usefixtures("local_workers")
def test_each_module_of_simulators_goes_on_with_the_spaces_of_its_own_agents() -> None:
    tables = {"agents": {"hunter_*": "hunters", "*": "runner"}}
    before = config_of("ppo", **tables, gateway="127.0.0.1:0")
    world = World(before, BOX, spaces.Discrete(2), "runner")
    assert rehearse(before, before=world.before) == (), "nobody knows those of the hunters"
    other = {"modules": {"runner": {"model": SMALL}}}
    with pytest.raises(PreflightError, match=r"^module 'runner': the run cannot go on from"):
        rehearse(config_of("ppo", **tables, gateway="127.0.0.1:0", **other), before=world.before)


def test_a_learner_says_what_does_not_fit_where_nobody_could_know_it_before() -> None:
    acts = spaces.Discrete(2)
    state, extra = build(config_of("ppo"), BOX, acts).learner.save()
    other = build(config_of("ppo", optimizer="rmsprop"), BOX, acts).learner
    said = (
        "^module 'runner': the run cannot go on from its checkpoint: .*'moments/mean' is "
        "in the checkpoint, .*Restore the files and the settings"
    )
    with pytest.raises(StateMismatch, match=said):
        go_on_with(other, state, extra, "runner")


def test_a_player_that_is_reset_to_one_with_another_network_is_told_what_does_not_fit() -> None:
    acts = spaces.Discrete(2)
    small, large = (
        build(config_of("ppo", **keys), BOX, acts).learner for keys in ({"model": SMALL}, {})
    )
    before = small.get_weights()
    said = (
        "^league: hunter, reset to the weights of stone: weights '.*' have "
        r"shape \(64, 4\); expected \(8, 4\). They are of another network"
    )
    words = "league: hunter, reset to the weights of stone"
    with pytest.raises(ValueError, match=said):
        begin_with(small, large.get_weights(), words, whole=True, selectable=False)
    for name, array in before.items():
        np.testing.assert_array_equal(small.get_weights()[name], array)
