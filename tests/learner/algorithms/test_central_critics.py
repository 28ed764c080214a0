"""Value functions with more inputs than their agents: learning and errors."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.scripted_agents import sampler_of
from support.small_games import HiddenBits

from juggler.envrunner.multi_agent.games import GamesInTurn, ParallelGame
from juggler.learner.algorithms.actor_critic.core import actor_critic_pass
from juggler.learner.algorithms.registry import build_learner
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.data.collate import collate
from juggler.learner.data.validation import BatchValidator
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch, batch_of_columns
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.models import ActorCritic, QNetwork
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.structures import tree_map

GAMMA = 0.5
OBSERVATION, ACTIONS = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)
STATES = [(0, 0), (0, 1), (1, 0), (1, 1)]
DIFFERENT = 1 / (1 - GAMMA)


@cache
def sampled(sees: str, recurrent: str = "none", steps: int = 4) -> EpisodeBatch:
    """Rows of 4 steps, with episodes of 3 across their borders."""
    games = [ParallelGame(HiddenBits(), i) for i in range(16)]
    envs = GamesInTurn(games, "bits", [] if sees == "observation" else [sees])

    class Acting(ActorCritic):
        def __init__(self, observation_space: Any, action_space: Any) -> None:
            super().__init__(observation_space, action_space, {"recurrent": recurrent})

    played_by = {"left": "all", "right": "all"}
    sampler = sampler_of(envs, played_by, steps=steps, module=Acting, critic_sees=sees)
    for _ in range(3):
        collected = sampler.sample({"all"}, {"all": Version(0, 0)}).modules["all"]
    batch = collected.batch  # type: ignore[union-attr]
    assert batch is not None
    assert batch.truncated.any()
    assert not batch.terminated.any()
    return batch


def critic_space(sees: str) -> spaces.Space[Any] | None:
    both = spaces.Box(0, 1, (2,), np.float32)
    return {"observation": None, "state": HiddenBits.state_space, "all_observations": both}[sees]


def learner(sees: str, algorithm: str = "ppo", model: Any = None, **keys: Any) -> Learner:
    config = {"algorithm": algorithm, "gamma": GAMMA, "lr": 1e-2, **keys}
    space = critic_space(sees)
    model = {"hidden_sizes": [32, 32], **(model or {})}
    return build_learner(config, None, OBSERVATION, ACTIONS, model, critic_space=space)


def values(trained: Learner, sees: str) -> list[float]:
    """V of the left agent in each of the four states."""
    bits = torch.tensor(STATES)  # [4, 2]
    seen: dict[str, Any] = {"observations": bits[:, :1].float()}
    if sees == "state":
        seen["critic_observations"] = bits.to(torch.int8)
    if sees == "all_observations":
        seen["critic_observations"] = bits.float()
    forward = trained.core.forward(trained.state)  # type: ignore[attr-defined]
    found: list[float] = forward(seen)["values"].tolist()
    return found


@pytest.mark.parametrize(
    ("algorithm", "sees"),
    [
        ("ppo", "state"),
        ("ppo", "all_observations"),
        ("impala", "state"),
        ("appo", "all_observations"),
    ],
)
def test_a_critic_that_sees_everything_learns_the_values_exactly(algorithm: str, sees: str) -> None:
    trained = learner(sees, algorithm, lr=[[0, 1e-2], [30_000, 1e-4]])
    for _ in range(250 if algorithm != "ppo" else 40):
        trained.update_from_episodes([sampled(sees)])
    expected = [0, DIFFERENT, DIFFERENT, 0]
    np.testing.assert_allclose(values(trained, sees), expected, atol=0.05)


def test_values_after_a_cut_are_of_the_episode_that_was_cut() -> None:
    columns = collate([sampled("state")])
    trained = learner("state")
    forward = trained.core.forward(trained.state)  # type: ignore[attr-defined]
    seen = actor_critic_pass(forward, columns)
    assert len(columns["final_rows"]) > 10
    different = 0
    at = zip(columns["final_rows"].tolist(), columns["final_steps"].tolist(), strict=True)
    for k, (n, t) in enumerate(at):
        # Bits are the same throughout an episode, and the module sees nothing but them.
        bits = columns["critic_observations"][n, t]  # [2]
        assert columns["final_critic_observations"][k].tolist() == bits.tolist()
        assert seen.next_values[n, t] == pytest.approx(seen.values[n, t].item(), abs=1e-6)
        if t + 1 < 4:
            different += bits.tolist() != columns["critic_observations"][n, t + 1].tolist()
    assert different, "the next episode must have other bits somewhere"


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_a_module_with_a_memory_has_a_critic_without_one(recurrent: str) -> None:
    batch = sampled("state", recurrent)
    columns = collate([batch])
    trained = learner("state", model={"recurrent": recurrent}, burn_in=1)
    trained.update_from_episodes([batch])
    forward = trained.core.forward(trained.state)  # type: ignore[attr-defined]
    with torch.no_grad():
        seen = actor_critic_pass(forward, columns)
    live = columns["live"]
    value_of: dict[tuple[int, ...], set[float]] = {}
    own, both = columns["observations"][live], columns["critic_observations"][live]
    shown = torch.cat([own.int(), both.int()], 1).tolist()
    for bits, value in zip(shown, seen.values[live].tolist(), strict=True):
        value_of.setdefault(tuple(bits), set()).add(round(value, 5))
    assert len(value_of) == 6  # each agent's bit is one of the two
    assert all(len(found) == 1 for found in value_of.values()), "what came before says nothing"
    assert "value_encoder" in forward.module.training_only


def test_columns_of_a_script_may_have_what_the_critic_saw() -> None:
    columns = collate([sampled("state")])
    one, other = learner("state"), learner("state")
    one.update_from_batch(columns)
    other.update_from_episodes([sampled("state")])
    torch.testing.assert_close(one.state, other.state, rtol=0, atol=0)
    less = {name: x for name, x in columns.items() if "critic" not in name}
    with pytest.raises(ValueError, match="critic_observations lack an array"):
        one.update_from_batch(less)
    uncut = {name: x for name, x in columns.items() if not name.startswith("final_")}
    uncut["truncated"] = torch.zeros_like(columns["truncated"])
    segments = [name for name in uncut if name.startswith("segment_")]
    made = batch_of_columns({name: x for name, x in uncut.items() if name not in segments})
    assert np.asarray(made.final_critic_observations).shape == (0, 2)


def test_a_batch_must_have_what_the_critic_saw_in_its_space() -> None:
    batch = sampled("state")
    checks = BatchValidator("all", OBSERVATION, ACTIONS, {}, HiddenBits.state_space)
    checks.checked(batch)
    without = sampled("observation")
    with pytest.raises(WireError, match="critic_observations lack an array"):
        checks.checked(without)
    with pytest.raises(WireError, match="critic_observations have an array"):
        BatchValidator("all", OBSERVATION, ACTIONS, {}).checked(batch)
    floats = tree_map(lambda x: x.astype(np.float32), batch.critic_observations)
    with pytest.raises(WireError, match="critic_observations of shape"):
        checks.checked(replace(batch, critic_observations=floats))
    tree = batch.to_tree()
    for name in ("last_critic_observations", "final_critic_observations"):
        with pytest.raises(WireError, match=f"column {name!r} holds no array"):
            EpisodeBatch.from_tree({key: x for key, x in tree.items() if key != name})
        with pytest.raises(WireError, match=name):
            EpisodeBatch.from_tree({**tree, name: np.zeros((1, 5), np.int8)})
    lonely = {key: x for key, x in tree.items() if key != "critic_observations"}
    with pytest.raises(WireError, match="critic_observations"):
        EpisodeBatch.from_tree(lonely)


class ByObservationsAlone(RLModule):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.both = torch.nn.Linear(1, 3)

    def _forward(self, batch: Any) -> dict[str, Any]:
        outputs = self.both(batch["observations"])  # [B, 3]
        return {"action_dist_inputs": outputs[:, :2], "values": outputs[:, 2]}


class OfItsOwn(ByObservationsAlone):
    """A critic as docs/modules.md describes it."""

    takes_critic_observations = True
    training_only = ("critic",)

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.critic = torch.nn.Linear(1 if self.critic_space is None else 3, 1)

    def _forward_train(self, batch: Any) -> dict[str, Any]:
        seen = torch.cat([batch["observations"], batch["critic_observations"].float()], -1)
        return {**self._forward(batch), "values": self.critic(seen).squeeze(-1)}


def test_a_module_of_ones_own_says_whether_its_critic_can_see_more() -> None:
    space = HiddenBits.state_space
    given: Any = {"algorithm": "ppo"}, OfItsOwn, OBSERVATION, ACTIONS, {}
    trained = build_learner(*given, critic_space=space)
    metrics = fetch_metrics(trained.update_from_episodes([sampled("state")]))
    assert np.isfinite(metrics["value_loss"])
    assert not any("critic" in name for name in trained.get_params())
    with pytest.raises(ValueError, match="the values of ByObservationsAlone"):
        build_learner(
            {"algorithm": "ppo"}, ByObservationsAlone, OBSERVATION, ACTIONS, {}, critic_space=space
        )


class OfActions(QNetwork):
    takes_critic_observations = True


def test_what_cannot_be_combined_is_told() -> None:
    with pytest.raises(ValueError, match="the values of QNetwork come only from"):
        learner("state", "pqn")
    space = HiddenBits.state_space
    with pytest.raises(ValueError, match="critic_sees with algorithm ="):
        build_learner({"algorithm": "pqn"}, OfActions, OBSERVATION, ACTIONS, {}, critic_space=space)
    with pytest.raises(ValueError, match="shared_value_layers = true is"):
        learner("state", model={"shared_value_layers": True})
    with pytest.raises(ValueError, match="the run's key critic_sees fills it"):
        learner("observation", model={"critic_space": "state"})
