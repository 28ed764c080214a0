"""The discriminator's losses and rewards against slow ones."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import TWO, VECTOR, MakeBatch
from support.learner_groups import join, update
from support.random_episodes import random_episodes, write
from support.small_cores import copied, slow_penalties

from juggler.driver.config import ConfigError, RunConfig
from juggler.learner.algorithms.bc import BcConfig
from juggler.learner.algorithms.bc.core import Bc
from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.imitation.discriminator import (
    DemonstratedSteps,
    Discriminator,
    Logits,
    Shown,
    gradient_penalties,
)
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.algorithms.r2d2 import R2d2Config
from juggler.learner.algorithms.r2d2.core import R2d2
from juggler.learner.config import ImitationConfig
from juggler.learner.core.around_core import OwnNetwork
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.hashing import mixed, uniform
from juggler.learner.core.learner_core import ALONE, Columns
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.returns import rows_of_transitions
from juggler.learner.data.collate import collate
from juggler.learner.data.replay.replay import IMPORTANCE_WEIGHTS
from juggler.learner.group.peers import state_hash
from juggler.learner.learner import Learner
from juggler.runtime.datasets.dataset import Dataset, DatasetError
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.models import ActorCritic, QNetwork
from juggler.testing import assert_same, check_core, check_learner

MODEL = {"hidden_sizes": [8]}
GAMMA = 0.9


def make_inner(name: str) -> GradientCore:
    if name == "dqn":
        config = DqnConfig(
            gamma=GAMMA,
            n_step=1,
            priority_exponent=0.6,
            replay_begin=0,
            replay_batch_size=8,
            replay_ratio=4.0,
        )
        return Dqn(partial(QNetwork, VECTOR, TWO, MODEL), config)
    make = partial(ActorCritic, VECTOR, TWO, MODEL)
    if name == "ppo":
        return Ppo(make, PpoConfig(gamma=GAMMA, minibatches=2, epochs=1))
    return Impala(make, ImpalaConfig(gamma=GAMMA))


@pytest.fixture
def shown(tmp_path: Path) -> str:
    """Three episodes, the second of which the environment ended."""
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    return str(write(tmp_path / "shown", random_episodes([5, 9, 7], VECTOR, TWO), VECTOR, TWO))


@pytest.fixture
def own(shown: str) -> ImitationConfig:
    return ImitationConfig(demonstrations=shown, model=MODEL, limit=1.5)


def network_of(state: dict[str, Any]) -> Logits:
    """The discriminator of a state, as a module of its own."""
    sizes = {"0": 4, "1": 2}  # of observations, and of one-hot actions
    space = spaces.Dict(
        {name: spaces.Box(-10, 10, (size,), np.float32) for name, size in sizes.items()}
    )
    network, rest = Logits(space, ModelConfig.parse(MODEL)), state["trained"]
    for parameter in network.parameters():
        parameter.data = rest[: parameter.numel()].view_as(parameter).clone()
        rest = rest[parameter.numel() :]
    return network


def one_hot(actions: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(actions.long(), 2).float()


class Slow:
    """The discriminator, one step at a time."""

    def __init__(self, name: str, state: dict[str, Any]) -> None:
        data = Dataset(name)
        episodes = [data.episode(index) for index in range(len(data))]
        self.seen = np.concatenate([np.asarray(each.observations)[:-1] for each in episodes])
        self.acted = np.concatenate([np.asarray(each.actions) for each in episodes])
        self.mean = self.seen.astype(np.float64).mean(0)
        self.deviation = self.seen.astype(np.float64).std(0) + 1e-4
        self.network = network_of(state)

    def logit(self, observation: np.ndarray, action: int) -> float:
        x = ((observation - self.mean) / self.deviation).clip(-10, 10)
        step = {"0": torch.from_numpy(x).float()[None], "1": one_hot(torch.tensor([action]))}
        with torch.no_grad():
            return float(self.network(step))


def changed_state(core: Discriminator) -> Any:
    """A state whose discriminator knows something."""
    state = core.init(0)
    trained = state["own"]["trained"]
    noise = torch.randn(trained.shape, generator=torch.Generator().manual_seed(1))
    state["own"]["trained"] = trained + 0.3 * noise
    return state


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_rewards_are_log_odds_and_an_end_has_those_of_the_absorbing_state(
    make_batch: MakeBatch, shown: str, own: ImitationConfig, name: str
) -> None:
    core = Discriminator(make_inner(name), own)
    state = changed_state(core)
    slow = Slow(shown, state["own"])
    columns: Columns = collate([make_batch(4, 9, seed=1)])
    ends = columns["terminated"]
    if name == "dqn":
        columns = rows_of_transitions(columns, n=1, gamma=GAMMA)
        ends = columns["discounts"] == 0
    changed = core.learned(state, columns, ALONE)[1]["rewards"]
    absorbing = float(slow.network.absorbing.detach().clamp(-1.5, 1.5))
    expected = np.zeros(changed.shape)
    for n, t in zip(*np.nonzero(columns["live"].numpy()), strict=True):
        logit = slow.logit(columns["observations"][n, t].numpy(), int(columns["actions"][n, t]))
        expected[n, t] = np.clip(logit, -1.5, 1.5)
        if ends[n, t]:
            expected[n, t] += GAMMA / (1 - GAMMA) * absorbing
    assert ends.any()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(changed.numpy(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 10.0])
def test_one_step_of_the_discriminator_is_adams_on_both_losses_and_the_penalty(
    make_batch: MakeBatch, shown: str, own: ImitationConfig, weight: float
) -> None:
    own = replace(own, minibatch_size=1024, gradient_penalty=weight)
    core = Discriminator(make_inner("impala"), own)
    state = changed_state(core)
    begun = state["own"]
    columns = collate([make_batch(4, 9, seed=1)])
    drawn: list[DemonstratedSteps] = []
    demonstrations = core._demonstrations

    class Noting(DemonstratedSteps):
        def drawn(self, places: torch.Tensor) -> DemonstratedSteps:
            drawn.append(demonstrations.drawn(places))
            return drawn[-1]

    core._demonstrations = Noting(*demonstrations)
    found = core.learned(state, columns, ALONE)
    slow = Slow(shown, begun)
    live, ends = columns["live"], columns["terminated"] & columns["live"]
    (shown_steps,) = drawn
    assert len(shown_steps.terminated) == live.numel()
    absorbing = torch.nn.Parameter(slow.network.absorbing.detach().double())
    layers = [each for each in slow.network.modules() if isinstance(each, torch.nn.Linear)]
    hidden, head = (deepcopy(each).double() for each in layers)
    parameters = [absorbing, *hidden.parameters(), *head.parameters()]

    def logits(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = head(torch.tanh(hidden(x))).squeeze(-1)
        return found

    def seen(observations: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = (observations.double() - torch.from_numpy(slow.mean)) / torch.from_numpy(slow.deviation)
        return torch.cat([x.clamp(-10, 10), one_hot(actions).double()], 1)

    def costs(observations: torch.Tensor, actions: torch.Tensor, sign: int) -> torch.Tensor:
        return -torch.log(torch.sigmoid(-sign * logits(seen(observations, actions))))

    policy = costs(columns["observations"][live], columns["actions"][live], 1).sum()
    policy = policy - ends.sum() * torch.log(1 - torch.sigmoid(absorbing))
    policy = policy / (live.sum() + ends.sum())
    real = costs(shown_steps.observations, shown_steps.actions, -1).sum()
    last = shown_steps.terminated.sum()
    real = real - last * torch.log(torch.sigmoid(absorbing))
    real = real / (len(shown_steps.terminated) + last)
    metrics = found[2]
    named = replace(core.config, imitation={"demonstrations": "some"}).metric_names()
    assert metrics.keys() == set(named) - set(core.config.metric_names())
    loss = float(metrics["discriminator_loss"])
    assert loss == pytest.approx(float((policy + real).detach()), rel=1e-4)
    # Each step of the policy is paired with the demonstration at its place in a random order.
    order = uniform(mixed(begun["key"]), (live.numel(),)).argsort()
    flat = columns["observations"].flatten(0, 1)[order], columns["actions"].flatten()[order]
    shares = uniform(mixed(begun["key"]) ^ 2, (live.numel(),)).double()
    chosen = live.flatten()[order]
    some, others = seen(*flat), seen(shown_steps.observations, shown_steps.actions)
    pairs = {"all": some}, {"all": others}
    penalties = gradient_penalties(lambda x: logits(x["all"]), *pairs, shares)[chosen]
    by_hand = slow_penalties(
        lambda x: float(logits(torch.from_numpy(x)).detach()),
        *(x[chosen].numpy() for x in (some, others, shares)),
    )
    np.testing.assert_allclose(penalties.detach().numpy(), by_hand, rtol=1e-4, atol=1e-8)
    assert float(metrics["gradient_penalty"]) == pytest.approx(weight * by_hand.mean(), rel=1e-4)
    adam = torch.optim.Adam(parameters, lr=own.lr)
    (policy + real + weight * penalties.mean()).backward()
    adam.step()
    expected = torch.cat([parameter.detach().flatten().float() for parameter in parameters])
    # Adam's first step is the sign of the gradient: where that is nearly 0, it is either.
    close = (found[0]["trained"] - expected).abs() < 1e-5
    assert close.float().mean() > 0.97


def test_priorities_are_those_of_the_rows_that_were_drawn(
    make_batch: MakeBatch, own: ImitationConfig
) -> None:
    inner = make_inner("dqn")
    core = Discriminator(inner, own)
    state = changed_state(core)
    rows = rows_of_transitions(collate([make_batch(4, 9, seed=1)]), n=1, gamma=GAMMA)
    rows[IMPORTANCE_WEIGHTS] = torch.ones(len(rows["live"]))
    shown = core.learned(state, rows, ALONE)[1]
    expected = inner.step(copied(state["inner"]), shown).priorities
    found = core.step(copied(state), rows).priorities
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected)
    order = torch.randperm(len(rows["live"]), generator=torch.Generator().manual_seed(0))
    permuted = {key: x[order] for key, x in rows.items() if isinstance(x, torch.Tensor) and x.ndim}
    again = core.step(copied(state), permuted).priorities
    assert again is not None
    torch.testing.assert_close(again, expected[order])


@pytest.mark.parametrize("name", ["impala", "ppo", "dqn"])
def test_it_conforms(
    make_batch: MakeBatch, own: ImitationConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Discriminator:
        return Discriminator(make_inner(name), own)

    samples = [collate([make_batch(4, 6, seed=seed)]) for seed in range(2)]
    check_core(make, samples[0])
    check_learner(lambda seed: Learner(make(), seed=seed), samples)
    core = make()
    state = core.init(0)
    shown = core.learned(state, samples[0], ALONE)[1]
    monkeypatch.setattr(OwnNetwork, "stepped", None)  # no network of its own is trained
    assert_same(core.shown(state, samples[0]), shown, "shown")
    core.grads(state, samples[0])


def test_what_cannot_imitate_says_so(own: ImitationConfig, shown: str) -> None:
    bc = Bc(partial(ActorCritic, VECTOR, TWO, MODEL), BcConfig())
    with pytest.raises(ValueError, match="makes no difference to bc"):
        Discriminator(bc, own)
    dqn = Dqn(partial(QNetwork, VECTOR, TWO, MODEL), DqnConfig(n_step=3))
    with pytest.raises(ValueError, match="set n_step = 1"):
        Discriminator(dqn, own)
    dqn = Dqn(partial(QNetwork, VECTOR, TWO, MODEL), DqnConfig(n_step=1, gamma=0.0))
    with pytest.raises(ValueError, match=r"imitation with gamma = 0: .*; set"):
        Discriminator(dqn, own)
    other = partial(ActorCritic, spaces.Box(-1, 1, (4,), np.float32), TWO, MODEL)
    with pytest.raises(DatasetError, match="have observations in Box"):
        Discriminator(Impala(other, ImpalaConfig()), own)
    with pytest.raises(DatasetError, match=r"imitation\.demonstrations = 'nowhere': there is no"):
        Discriminator(make_inner("impala"), replace(own, demonstrations="nowhere"))


def test_whole_rows_that_are_kept_may_have_summed_rewards_of_a_discriminator(
    make_batch: MakeBatch, own: ImitationConfig
) -> None:
    model = {**MODEL, "recurrent": "gru", "recurrent_size": 8}
    inner = R2d2(partial(QNetwork, VECTOR, TWO, model), R2d2Config(n_step=3))
    core = Discriminator(inner, own)
    state, columns = changed_state(core), collate([make_batch(4, 9, seed=1)])
    columns["states"] = {"module": {"hidden": torch.zeros(4, 8)}}
    output = core.step(state, columns)
    assert np.isfinite(list(fetch_metrics(output.metrics).values())).all()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"imitation": {"limit": 2.0}}, "imitation needs demonstrations"),
        ({"imitation": {"demonstration": "x"}}, "did you mean 'demonstrations'"),
        ({"imitation": {"demonstrations": "x", "lr": 0}}, r"imitation\.lr = 0"),
        (
            {"imitation": {"demonstrations": "x", "gradient_penalty": -1}},
            r"imitation\.gradient_penalty =",
        ),
        (
            {"imitation": {"demonstrations": "x"}, "algorithm": "bc", "dataset": "x"},
            "it never acts or earns rewards",
        ),
        (
            {"imitation": {"demonstrations": "x"}, "intrinsic": {"kind": "rnd"}},
            "leave one of them out",
        ),
        (
            {
                "imitation": {"demonstrations": "x"},
                "connectors": {"env_to_module": ["mean_std_filter"]},
            },
            "'mean_std_filter' in",
        ),
    ],
)
def test_a_wrong_configuration_names_the_key(given: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RunConfig.from_flat(given)


# A discriminator's inputs, and the gradient penalty that smooths it.


def test_every_step_is_shown_as_numbers_and_box_actions_within_their_bounds() -> None:
    generator = np.random.default_rng(0)
    position = spaces.Box(-np.inf, np.inf, (2, 3), np.float32)
    observations = spaces.Dict(
        {
            "action_mask": spaces.MultiBinary(2),
            "position": position,
            "room": spaces.Discrete(3, start=5),
            "switches": spaces.MultiBinary(4),
        }
    )
    acted = spaces.Box(np.array([-1, 0]), np.array([1, 3]), dtype=np.float32)
    x = generator.normal(3, 2, (7, 2, 3)).astype(np.float32)
    actions = generator.normal(0, 4, (7, 2)).astype(np.float32)
    rooms, switches = generator.integers(5, 8, 7), generator.integers(0, 2, (7, 4))
    seen = {
        "action_mask": torch.ones(7, 2),
        "position": torch.from_numpy(x),
        "room": torch.from_numpy(rooms),
        "switches": torch.from_numpy(switches),
    }
    demonstrations = DemonstratedSteps(seen, torch.from_numpy(actions), torch.zeros(7).bool())
    shown = Shown(observations, acted, demonstrations)
    given = torch.tensor([[-50.0, 50.0], [0.5, 2.0]])
    first = {key: each[:2] for key, each in seen.items()}
    found = shown(first, given)
    assert [found[key].shape[1:] for key in "0123"] == [
        shown.space[key].shape for key in shown.space
    ]
    x, kept = x.astype(np.float64), np.clip(actions, acted.low, acted.high).astype(np.float64)
    expected = {
        "0": ((x - x.mean(0)) / (x.std(0) + 1e-4)).clip(-10, 10)[:2],
        "1": np.eye(3)[rooms[:2] - 5],
        "2": switches[:2],
        "3": (np.array([[-1, 3], [0.5, 2]]) - kept.mean(0)) / (kept.std(0) + 1e-4),
    }
    for key, values in expected.items():
        np.testing.assert_allclose(found[key].numpy(), values, rtol=1e-4, atol=1e-5)


def test_rewards_of_demonstrations_may_be_anything_and_what_is_imitated_must_be_finite(
    tmp_path: Path,
) -> None:
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    acted = spaces.Box(-1, 1, (2,), np.float32)
    episodes = random_episodes([3, 4], VECTOR, acted)
    episodes[0].rewards[:] = np.nan
    episodes[0].observations[-1] = np.nan  # nothing was done there
    place = str(write(tmp_path / "shown", episodes, VECTOR, acted))
    assert len(DemonstratedSteps.read(place, VECTOR, acted).terminated) == 7
    for name in ("observations", "actions"):
        broken = random_episodes([3, 4], VECTOR, acted)
        getattr(broken[1], name)[2] = np.inf
        place = str(write(tmp_path / name, broken, VECTOR, acted))
        with pytest.raises(DatasetError, match=rf"episode 1 of .* not finite, in its {name}$"):
            DemonstratedSteps.read(place, VECTOR, acted)


def test_a_gradient_penalty_and_its_gradient_are_those_of_central_differences() -> None:
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(7, 5))
    out = generator.normal(size=5)
    rows = {name: generator.normal(size=(2, 6, size)) for name, size in (("a", 4), ("b", 3))}
    shares = generator.uniform(size=6)
    some, others = (np.concatenate([rows["a"][i], rows["b"][i]], 1) for i in (0, 1))

    def slow(weights: np.ndarray) -> float:
        found = slow_penalties(lambda x: np.tanh(x @ weights) @ out, some, others, shares)
        return float(found.sum())

    trained = torch.from_numpy(weights).requires_grad_()

    def values(x: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(torch.cat([x["a"], x["b"]], 1) @ trained) @ torch.from_numpy(out)

    first, second = ({name: torch.from_numpy(x[i]) for name, x in rows.items()} for i in (0, 1))
    total = gradient_penalties(values, first, second, torch.from_numpy(shares)).sum()
    assert float(total.detach()) == pytest.approx(slow(weights), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, trained)
    for place in ((0, 0), (3, 2), (6, 4)):
        step = np.zeros_like(weights)
        step[place] = 1e-4
        slope = (slow(weights + step) - slow(weights - step)) / 2e-4
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-3)


# Learners of a group that imitate: which demonstrations each of them draws.


def made_inner(name: str) -> GradientCore:
    if name == "ppo":
        config = PpoConfig(batch_size=64, minibatches=2, epochs=1)
        return Ppo(partial(ActorCritic, VECTOR, TWO, MODEL), config)
    kept = DqnConfig(
        n_step=1, replay_begin=0, replay_batch_size=16, replay_ratio=1.0, save_replay=False
    )
    return Dqn(partial(QNetwork, VECTOR, TWO, MODEL), kept)


@pytest.fixture
def many_shown(tmp_path: Path) -> ImitationConfig:
    pytest.importorskip("minari", reason="needs juggler[datasets]")
    shown = write(tmp_path / "shown", random_episodes([40, 60], VECTOR, TWO), VECTOR, TWO)
    return ImitationConfig(demonstrations=str(shown), model=MODEL, minibatch_size=16)


class Noting(DemonstratedSteps):
    """Notes which of them are drawn."""

    places: list[torch.Tensor]

    def drawn(self, places: torch.Tensor) -> DemonstratedSteps:
        self.places.append(places)
        return super().drawn(places)


def made_learner(name: str, many_shown: ImitationConfig) -> tuple[Learner, list[torch.Tensor]]:
    """A learner, and the places of what it will draw."""
    core = Discriminator(made_inner(name), many_shown)
    demonstrations = Noting(*core._demonstrations)
    demonstrations.places = []
    core._demonstrations = demonstrations
    return Learner(core, seed=0), demonstrations.places


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_learners_of_a_group_draw_different_demonstrations(
    make_batch: MakeBatch, many_shown: ImitationConfig, name: str
) -> None:
    made = [made_learner(name, many_shown) for _ in range(2)]
    group = [learner for learner, _ in made]
    join(group)
    for seed in range(3):
        update(group, [[make_batch(4, 8, seed=2 * seed + rank)] for rank in range(2)])
    drawn = [places for _, places in made]
    assert len(drawn[0]) == len(drawn[1]) > 2, "as often as one another"
    assert not any(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    update(group, [[make_batch(4, 8)], [make_batch(4, 8, seed=1).silenced()]])
    assert len(set(map(state_hash, group))) == 1, "and still have one state"


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_break_at_a_checkpoint_changes_no_draw_of_demonstrations(
    make_batch: MakeBatch, many_shown: ImitationConfig, name: str
) -> None:
    def go_on(made: list[tuple[Learner, list[torch.Tensor]]], first: int) -> None:
        for seed in range(first, first + 2):
            shards = [[make_batch(4, 8, seed=2 * seed + rank)] for rank in range(2)]
            update([learner for learner, _ in made], shards)

    straight, resumed = ([made_learner(name, many_shown) for _ in range(2)] for _ in range(2))
    join([learner for learner, _ in straight])
    go_on(straight, 0)
    saved = straight[0][0].save()
    for (learner, places), (other, _) in zip(straight, resumed, strict=True):
        learner.forget()
        places.clear()
        other.restore(*saved)
    join([learner for learner, _ in resumed])
    go_on(straight, 2)
    go_on(resumed, 2)
    for (one, places), (other, found) in zip(straight, resumed, strict=True):
        assert len(places) == len(found) > 1
        assert all(torch.equal(*pair) for pair in zip(places, found, strict=True))
        assert state_hash(one) == state_hash(other)
