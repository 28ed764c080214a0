"""A policy from a checkpoint acts as evaluation does, also as ONNX."""

from __future__ import annotations

import faulthandler
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, cast

import gymnasium
import numpy as np
import onnxruntime
import pytest
import torch
from support import worlds

import juggler
from juggler.driver.checkpoint.snapshots import restores
from juggler.driver.config import RunConfig
from juggler.envrunner import envrunner_worker
from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.environments.vector import make_vector_env, reset_environments
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.envrunner.setup import ActingSetup, EnvRunnerSetup
from juggler.policies.policy import Policy
from juggler.runtime.acting.acting_graph import _EXPORTING
from juggler.runtime.actors.attachment import Contact, Detached
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.worker import _LeavingInbox, to_json
from juggler.runtime.checkpoints.checkpoint import read
from juggler.runtime.checkpoints.weights import playing_trees
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.install_commands import installing
from juggler.runtime.wire.structures import from_tree, to_tree, tree_map
from juggler.runtime.wire.trees import flatten, unflatten
from juggler.runtime.wire.v1 import training_pb2

EPISODES, SEED = 6, 4

RUNS: dict[str, dict[str, Any]] = {
    "vector": {"env": worlds.plain},
    "cartpole": {"env": "CartPole-v1", "env_kwargs": {"max_episode_steps": 60}},
    "pendulum": {
        "env": "Pendulum-v1",
        "env_kwargs": {"max_episode_steps": 30},
        "connectors": {"module_to_env": ["rescale_actions"]},
        "model": {"squash": True},
    },
    "lstm": {"env": worlds.plain, "model": {"recurrent": "lstm"}},
    "gru, what came before": {
        "env": worlds.motors,
        "model": {"recurrent": "gru"},
        "connectors": {"env_to_module": ["mean_std_filter", "previous_actions_and_rewards"]},
    },
    "stack behind a filter": {
        "env": worlds.motors,
        "connectors": {
            "env_to_module": ["mean_std_filter", {"use": "frame_stack", "k": 3}],
            "module_to_env": ["rescale_actions"],
            "learner": ["normalize_rewards"],
        },
    },
    "parts": {"env": worlds.parts, "connectors": {"env_to_module": ["mean_std_filter"]}},
    "parts as they were": {
        "env": worlds.parts,
        "connectors": {
            "env_to_module": ["flatten", "previous_actions_and_rewards", {"use": "frame_stack"}]
        },
    },
    "one-hot parts": {"env": worlds.parts, "connectors": {"env_to_module": ["one_hot"]}},
    "images": {
        "env": worlds.images,
        "connectors": {"env_to_module": [{"use": "frame_stack", "k": 2}]},
    },
    "masked": {"env": worlds.masked, "connectors": {"env_to_module": ["flatten"]}},
    "masked in infos": {
        "env": worlds.masked_in_info,
        "model": {"recurrent": "lstm"},
        "connectors": {"env_to_module": ["previous_actions_and_rewards"]},
    },
    "connectors of one's own": {
        "env": worlds.motors,
        "connectors": {
            "env_to_module": ["support.worlds:Halve"],
            "module_to_env": [{"use": "support.worlds:Backwards", "first": True}],
        },
    },
}


#: With all kinds of memory, of masks, and of connectors: they stand for the others in batches.
SOME = ("lstm", "stack behind a filter", "parts as they were", "masked in infos", "pendulum")


def made(keys: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    if callable(keys["env"]):
        return keys["env"]()
    return gymnasium.make(keys["env"], **keys["env_kwargs"])


def played_alone(env: gymnasium.Env[Any, Any], act: Callable[..., Any]) -> list[float]:
    """Returns of episodes in one environment, with act(observation, begins, reward, info)."""
    returns = []
    for episode in range(EPISODES):
        seed = None if episode else environment_seeds(SEED, 1)[0]
        observation, info = env.reset(seed=seed)
        total, reward, begins, over = 0.0, 0.0, True, False
        while not over:
            action = act(observation, begins, reward, info)
            observation, reward, terminated, truncated, info = env.step(action)
            total, begins, over = total + float(reward), False, terminated or truncated
        returns.append(total)
    return returns


@pytest.mark.parametrize("name", RUNS)
def test_a_single_environment_sees_the_same_actions(name: str, tmp_path: Path) -> None:
    keys = RUNS[name]
    path = worlds.written(tmp_path, **keys)
    policy = juggler.load_policy(path)
    state = None

    def act(observation, begins, reward, info):
        nonlocal state
        action, state = policy.act(
            observation, None if begins else state, reward=reward, mask=info.get("action_mask")
        )
        return action

    expected = juggler.evaluate(path, EPISODES, SEED).returns
    assert played_alone(made(keys), act) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("name", SOME)
def test_a_batch_of_environments_sees_the_same_actions(name: str, tmp_path: Path) -> None:
    keys, rows = RUNS[name], 3
    path = worlds.written(tmp_path, **keys, envs_per_runner=rows)
    policy = juggler.load_policy(path)
    env = make_vector_env(RunConfig.from_flat(read(path).config).env_runner)
    observations, state = reset_environments(env, SEED), None
    rewards, first = np.zeros(rows), np.ones(rows, np.bool_)  # [N] both
    totals = np.zeros(rows)  # [N]
    returns: list[list[float]] = [[] for _ in range(rows)]
    while min(map(len, returns)) < EPISODES // rows:
        actions, state = policy.act(observations, state, reward=rewards, first=first)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        first = terminated | truncated  # [N]
        totals += rewards
        for row in np.flatnonzero(first):
            returns[row].append(float(totals[row]))
        totals[first] = 0
    env.close()
    found = [each for row in returns for each in row[: EPISODES // rows]]
    assert found == juggler.evaluate(path, EPISODES, SEED).returns
    assert policy.remembers is (state is not None)


class _Attached:
    """An evaluator's stream to a driver that listens to nothing."""

    worker_id, run_id, incarnation = "evaluator-0", "", ""

    def progresses(self) -> None:
        pass


@pytest.mark.parametrize("name", SOME)
def test_the_evaluator_of_a_run_plays_a_checkpoint_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, memory and the connectors' statistics, for anything played before."""
    keys = RUNS[name]
    # All tests after it would step back, too.
    monkeypatch.setattr(envrunner_worker, "step_back", lambda _: None)
    path = worlds.written(tmp_path, **keys, envs_per_runner=EPISODES)
    config = RunConfig.from_flat(read(path).config)
    acting = ActingSetup(
        module=config.module,
        connectors=config.connectors.connectors,
        algorithm=config.learner.algorithm,
        off_policy=True,
        row_age=1,
    )
    setup = EnvRunnerSetup(env_runner=config.env_runner, modules={DEFAULT_MODULE: acting})
    evaluator = EnvRunner(cast(Any, _Attached()), Mailbox(), Contact(""))
    evaluator._setup(0, training_pb2.Setup(config=to_json(setup), seed=9))
    version = Version(*read(path).version).message()
    command = training_pb2.Evaluate(episodes=EPISODES, seed=SEED, version=version)
    expected = juggler.evaluate(path, EPISODES, SEED)
    for _ in range(2):
        for module_id, tree in playing_trees(read(path)).items():
            for part in restores(module_id, tree, {}):
                evaluator._restore(2, part)
        found = evaluator._evaluate(1, command)
        np.testing.assert_allclose(found.episode_returns, expected.returns, rtol=1e-6)
        assert list(found.episode_lengths) == expected.lengths
        assert found.version.update == read(path).version[1]
    evaluator.close()


#: An export takes seconds. That of one run stands for the others in the fast tests.
FAST_EXPORT = "masked in infos"


def _exported() -> list[Any]:
    return [
        name if name == FAST_EXPORT else pytest.param(name, marks=pytest.mark.long) for name in RUNS
    ]


@pytest.mark.parametrize("name", _exported())
def test_an_onnx_model_of_it_gives_the_same_actions(name: str, tmp_path: Path) -> None:
    keys = RUNS[name]
    path = worlds.written(tmp_path, **keys)
    policy = juggler.load_policy(path)
    session = onnxruntime.InferenceSession(policy.export_onnx(path.parent / "policy.onnx"))
    act = OnnxActor(session, policy)
    expected = juggler.evaluate(path, EPISODES, SEED).returns
    np.testing.assert_allclose(played_alone(made(keys), act), expected, rtol=1e-4, atol=1e-4)


class OnnxActor:
    """What a program does that has nothing but the model."""

    def __init__(self, session: Any, policy: Policy) -> None:
        self.session = session
        self.space, self.action_space = policy.observation_space, policy.action_space
        self.state = {
            each.name: np.zeros(
                [1, *each.shape[1:]],
                {"tensor(float)": np.float32, "tensor(double)": np.float64}.get(
                    each.type, each.type.partition("(")[2].rstrip(")")
                ),
            )
            for each in session.get_inputs()
            if each.name.startswith("state/")
        }

    def __call__(self, observation, begins, reward, info):
        if "action_mask" in info:
            observation = {"observation": observation, "action_mask": info["action_mask"]}
        tree = to_tree(self.space, observation)
        batch = tree_map(lambda leaf: np.asarray(leaf)[None], tree)
        given = {"/".join(("observation", *path)): array for path, array in flatten(batch)}
        given |= {"first": np.array([begins]), "reward": np.array([reward], np.float32)}
        given |= self.state
        wanted = {each.name for each in self.session.get_inputs()}
        outputs = self.session.run(None, {name: given[name] for name in wanted})
        named = dict(zip([each.name for each in self.session.get_outputs()], outputs, strict=True))
        self.state = {
            name.removeprefix("next_"): array
            for name, array in named.items()
            if name.startswith("next_")
        }
        arrays = [
            (tuple(name.split("/")[1:]), array[0])
            for name, array in named.items()
            if name.partition("/")[0] == "action"
        ]
        return from_tree(self.action_space, unflatten(arrays))


def model_of(path: Path, **arguments: Any) -> onnxruntime.InferenceSession:
    policy = juggler.load_policy(path, **arguments)
    return onnxruntime.InferenceSession(policy.export_onnx(path.parent / "policy.onnx"))


def test_a_model_takes_batches_of_any_size_and_names_what_it_takes(tmp_path: Path) -> None:
    path = worlds.written(
        tmp_path, worlds.motors, connectors={"env_to_module": [{"use": "frame_stack", "k": 2}]}
    )
    model, policy = model_of(path), juggler.load_policy(path)
    assert {each.name for each in model.get_inputs()} == {
        "observation",
        "first",
        "state/connectors/frame_stack",
    }
    assert {each.name for each in model.get_outputs()} == {
        "action",
        "next_state/connectors/frame_stack",
    }
    for rows in (1, 2, 7):
        seen = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
        given = {
            "observation": seen,
            "first": np.ones(rows, np.bool_),
            "state/connectors/frame_stack": np.zeros((rows, 1, 4), np.float32),
        }
        (action,) = model.run(["action"], given)
        np.testing.assert_allclose(action, policy.act(seen)[0], rtol=1e-5, atol=1e-5)


def test_the_mean_of_probable_returns_chooses_in_a_model_too(tmp_path: Path) -> None:
    model = {"atoms": 11, "v_min": -1.0, "v_max": 1.0, "dueling": True}
    path = worlds.written(tmp_path, "CartPole-v1", algorithm="dqn", model=model)
    seen = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    (action,) = model_of(path).run(["action"], {"observation": seen})
    assert set(action.tolist()) == {0, 1}
    np.testing.assert_array_equal(action, juggler.load_policy(path).act(seen)[0])


def test_a_connector_in_numpy_alone_is_named(tmp_path: Path) -> None:
    connectors = {"env_to_module": ["support.worlds:Sorted"]}
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain, connectors=connectors))
    with pytest.raises(ValueError, match="takes_tensors"):
        policy.export_onnx(tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


class InNumPy(juggler.ActorCritic):
    """What torch cannot look into."""

    def _forward(self, batch):
        seen = batch["observations"]
        return super()._forward({"observations": torch.from_numpy(np.sort(seen.numpy()))})


def test_a_module_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    path = worlds.written(tmp_path, worlds.plain, InNumPy, module="__main__:InNumPy")
    policy = juggler.load_policy(path, module=InNumPy)
    policy.act(np.zeros(4))
    with pytest.raises(ValueError, match="InNumPy"):
        policy.export_onnx(tmp_path / "policy.onnx")
    policy.act(np.zeros(4))


class Heavy(juggler.ActionDistribution):
    """A user's distribution around one of torch, with checked arguments."""

    def __init__(self, inputs):
        location, log_scale = inputs.chunk(2, -1)
        self.each = torch.distributions.Laplace(location, log_scale.exp())

    def log_prob(self, actions):
        return self.each.log_prob(actions).sum(-1)

    def entropy(self):
        return self.each.entropy().sum(-1)

    def kl(self, other):
        return torch.distributions.kl_divergence(self.each, other.each).sum(-1)

    def mode(self):
        return self.each.mode

    def sample(self, noise):
        return self.each.icdf(noise)


class HeavySpec(juggler.DistributionSpec):
    def __call__(self, inputs):
        return Heavy(inputs)


class HeavyTailed(juggler.ActorCritic):
    def action_distribution(self):
        size = self.action_space.shape[0]
        return HeavySpec(inputs_size=2 * size, noise_size=size)


def test_a_distribution_around_one_of_torch_can_be_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other packages may have turned it off, as Stable-Baselines3 does.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    path = worlds.written(tmp_path, "Pendulum-v1", HeavyTailed, module="__main__:HeavyTailed")
    seen = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    (action,) = model_of(path, module=HeavyTailed).run(["action"], {"observation": seen})
    expected = juggler.load_policy(path, module=HeavyTailed).act(seen)[0]
    np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
    with _EXPORTING, pytest.raises(ValueError, match="scale"):  # no other thread exports meanwhile
        torch.distributions.Laplace(0.0, -1.0)  # checks as before


class Branching(juggler.ActorCritic):
    def _forward(self, batch):
        seen = batch["observations"]
        return super()._forward({"observations": 2 * seen if seen.sum() > 0 else seen})


def test_a_module_that_branches_on_values_is_told_where_and_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = worlds.written(tmp_path, worlds.plain, Branching, module="__main__:Branching")
    policy = juggler.load_policy(path, module=Branching)
    place = r"torch\.where \(test_same_as_evaluation\.py, line \d+, in _forward\)"
    with pytest.raises(ValueError, match=f"Branching cannot be exported: .*{place}") as failed:
        policy.export_onnx(tmp_path / "policy.onnx")
    assert capfd.readouterr() == ("", ""), "no graphs of torch"
    assert "".join(traceback.format_exception(failed.value)).count("Traceback") == 2


def test_a_worker_can_be_told_to_leave_while_it_exports(tmp_path: Path) -> None:
    inbox, exporting = _LeavingInbox(watched=True), []

    class Told(juggler.ActorCritic):
        """Another thread tells the worker so whenever a step is taken."""

        def _forward(self, batch):
            exporting.append(torch.compiler.is_exporting())
            other = Thread(target=inbox.put, args=(Detached("terminated"),))
            other.start()
            other.join()
            faulthandler.cancel_dump_traceback_later()  # else this process ends
            return super()._forward(batch)

    path = worlds.written(tmp_path, worlds.plain, Told, module="__main__:Told")
    juggler.load_policy(path, module=Told).export_onnx(tmp_path / "policy.onnx")
    assert any(exporting)
    assert len(inbox.gather()) == len(exporting)


def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = juggler.load_policy(worlds.written(tmp_path, worlds.plain))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ValueError, match=re.escape(f"onnxscript: {installing('onnx')}")):
        policy.export_onnx(tmp_path / "policy.onnx")
