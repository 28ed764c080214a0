"""SAC's loss against one written out step by step, with a gradient for each of its three parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.float64 import Doubled
from support.states import copied

from juggler.learner.algorithms.sac.config import SacConfig
from juggler.learner.algorithms.sac.core import Sac
from juggler.learner.core.hashing import content_key, uniform
from juggler.learner.core.metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.data.collate import collate
from juggler.learner.learner import Learner
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.modules.errors import UnsupportedSpace
from juggler.runtime.modules.models import ActorCritic
from juggler.runtime.modules.soft_actor_critic import SoftActorCritic

MakeBatch = Callable[..., EpisodeBatch]
VECTOR = spaces.Box(-10, 10, (4,), np.float32)
BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 5], np.float32))
THREE = spaces.Discrete(3)
SMALL = {"hidden_sizes": [8]}


def make_core(actions: Any = BOX, module: Any = SoftActorCritic, **config: Any) -> Sac:
    make = partial(module, VECTOR, actions, SMALL)
    return Sac(make, SacConfig(**config))


def rows(actions: Any, count: int = 6) -> dict[str, Any]:
    """Transitions as a replay draws them; the third one terminated."""
    generator = torch.Generator().manual_seed(3)
    taken = torch.randint(0, 3, (count, 1), generator=generator)
    if actions is BOX:
        low, high = torch.from_numpy(BOX.low), torch.from_numpy(BOX.high)
        taken = low + (high - low) * torch.rand((count, 1, 2), generator=generator)
    discounts = torch.full((count, 1), 0.9)
    discounts[2] = 0.0
    return {
        "importance_weights": torch.linspace(0.2, 1.0, count),
        "observations": torch.randn((count, 1, 4), generator=generator),
        "actions": taken,
        "live": torch.ones((count, 1), dtype=torch.bool),
        "rewards": torch.randn((count, 1), generator=generator),
        "discounts": discounts,
        "last_observations": torch.randn((count, 4), generator=generator),
    }


def box_policy(
    module: Doubled, seen: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions [B, 2] and log-probabilities [B], of the formulas."""
    mean, log_std = module({"observations": seen})["action_dist_inputs"].chunk(2, -1)
    u = mean + log_std.exp() * noise
    low, width = (torch.from_numpy(x).double() for x in (BOX.low, BOX.high - BOX.low))
    normal = torch.distributions.Normal(mean, log_std.exp())
    slopes = 1 - torch.tanh(u) ** 2  # of actions between -1 and 1
    actions = low + width * (1 + torch.tanh(u)) / 2
    return actions, (normal.log_prob(u) - slopes.log()).sum(-1)


def expected(
    core: Sac, state: Any, sample: dict[str, Any], actions: Any, temperature: float
) -> tuple[dict[str, float], dict[str, torch.Tensor], torch.Tensor]:
    """The parts of the loss, the gradients of all parameters by name, and the priorities [N], in
    float64."""
    count = len(sample["live"])
    flat = state["parameters"], state["extra"]["target"]
    module, target = (Doubled(SoftActorCritic(VECTOR, actions, SMALL), each) for each in flat)
    noise = torch.zeros((2, count, 2), dtype=torch.float64)
    if actions is BOX:
        key = state["extra"]["key"] ^ content_key(sample["actions"])
        numbers = uniform(key, (2, count, 2, 2)).double()
        noise = (-2 * numbers[:, :, 0].log()).sqrt() * torch.cos(2 * math.pi * numbers[:, :, 1])
    sample = {name: x.double() if x.is_floating_point() else x for name, x in sample.items()}
    now, then = sample["observations"][:, 0], sample["last_observations"]

    def soft(critic: Doubled, seen: torch.Tensor, draw: torch.Tensor) -> Any:
        if actions is THREE:
            inputs = module({"observations": seen})["action_dist_inputs"]
            chances = inputs.softmax(-1)
            values = critic({"observations": seen})["q_values"].amin(1)
            return (chances * values).sum(-1), -(chances * chances.log()).sum(-1)
        taken, log_probs = box_policy(module, seen, draw)
        values = critic({"observations": seen, "actions": taken})["q_values"]
        return values.amin(-1), -log_probs

    with torch.no_grad():
        value, entropy = soft(target, then, noise[0])
        following = value + temperature * entropy
        goals = sample["rewards"][:, 0] * core.config.reward_scale
        goals = goals + sample["discounts"][:, 0] * following
    if actions is THREE:
        every = module({"observations": now})["q_values"]
        values = every[torch.arange(count), :, sample["actions"][:, 0]]
    else:
        given = {"observations": now, "actions": sample["actions"][:, 0]}
        values = module(given)["q_values"]
    errors = goals[:, None] - values  # [N, 2]
    of_values = (sample["importance_weights"] * 0.5 * (errors**2).sum(-1)).mean()
    value, entropy = soft(module, now, noise[1])
    of_policy = -(value + temperature * entropy).mean()
    wanted = 0.5 * math.log(3) if actions is THREE else -2.0
    of_temperature = module.module.log_temperature * (entropy.detach() - wanted).mean()
    parts = {"critics": of_values, "policy": of_policy, "log_temperature": of_temperature}
    gradients = {}
    for name, parameter in module.module.named_parameters():
        part = name.partition(".")[0]
        of = parts.get(part, of_policy)
        (gradients[name],) = torch.autograd.grad(of, parameter, retain_graph=True)
    priorities = errors.detach().abs().mean(-1)  # [N]
    return {name: float(part.detach()) for name, part in parts.items()}, gradients, priorities


@pytest.mark.parametrize("actions", [BOX, THREE], ids=["box", "discrete"])
def test_each_part_of_the_loss_trains_its_own_parameters(actions: Any) -> None:
    core = make_core(actions, reward_scale=0.7)
    state = core.init(0)
    state["extra"]["target"] = core.init(5)["parameters"]
    group, sample = core.flat, rows(actions)
    flat = group.named(state["parameters"].clone())
    flat["log_temperature"].fill_(math.log(0.3))
    state["parameters"] = torch.cat([each.reshape(-1) for each in flat.values()])
    grads, aux = core.grads(state, sample)
    losses, gradients, priorities = expected(core, state, sample, actions, 0.3)
    metrics = aux.metrics
    assert float(metrics["value_loss"]) == pytest.approx(losses["critics"], rel=1e-5)
    assert float(metrics["policy_loss"]) == pytest.approx(losses["policy"], rel=1e-5)
    assert float(metrics["temperature"]) == pytest.approx(0.3)
    for name, gradient in group.named(grads).items():
        torch.testing.assert_close(gradient.double(), gradients[name], rtol=1e-5, atol=1e-7)
    found = aux.priorities.double()
    torch.testing.assert_close(found, priorities, rtol=1e-5, atol=1e-6)


def test_a_temperature_that_is_given_stays() -> None:
    core = make_core(temperature=0.2)
    state = core.init(0)
    output = core.step(copied(state), rows(BOX))
    assert float(output.metrics["temperature"]) == pytest.approx(0.2)
    named = core.flat.named
    before, after = (named(each["parameters"]) for each in (state, output.state))
    torch.testing.assert_close(after["log_temperature"], before["log_temperature"])
    assert (after["policy_head.weight"] != before["policy_head.weight"]).any()


@pytest.mark.parametrize(("wanted", "falls"), [(-5.0, True), (1.38, False)])
def test_the_temperature_falls_while_the_policy_is_more_random_than_wanted(
    wanted: float, falls: bool
) -> None:
    core = make_core(target_entropy=wanted)
    state = core.init(0)
    after = core.step(copied(state), rows(BOX, 600)).state
    learned = core.flat.named(after["parameters"])["log_temperature"]
    assert (float(learned) < 0) is falls


def test_the_target_entropy_is_of_the_actions_that_are_legal() -> None:
    space = spaces.Dict({"seen": VECTOR, "action_mask": spaces.MultiBinary(3)})
    core = Sac(partial(SoftActorCritic, space, THREE, SMALL), SacConfig())
    sample = rows(THREE)
    masks = torch.tensor([[1, 1, 0]] * 5 + [[0, 1, 0]], dtype=torch.int8)
    sample["actions"][:] = 1
    for name, of_rows in (("observations", (6, 1)), ("last_observations", (6,))):
        seen = {"seen": sample[name], "action_mask": masks.view(*of_rows, 3)}
        sample[name] = seen
    state = core.init(0)
    for _ in range(300):
        state = core.step(state, sample).state
    metrics = core.step(copied(state), sample).metrics
    assert float(metrics["entropy"]) <= math.log(2)
    assert float(metrics["temperature"]) < 1.1


def test_the_values_of_all_actions_are_computed_once_for_what_was_seen() -> None:
    """With many actions they are most of the work of an update."""
    passes = []

    class Counted(SoftActorCritic):
        def _forward_train(self, batch: Any) -> dict[str, Any]:
            passes.append(batch)
            return super()._forward_train(batch)

    core = make_core(THREE, Counted)
    state = core.init(0)
    passes.clear()
    core.grads(state, rows(THREE))
    assert len(passes) == 3, "one of what was seen, and two of what followed"


@pytest.mark.parametrize(("actions", "most"), [(THREE, "1.10"), (BOX, "1.39")])
def test_an_entropy_that_no_policy_has_is_refused(actions: Any, most: str) -> None:
    with pytest.raises(ValueError, match=f"target_entropy = 1.5: must be below {most}"):
        make_core(actions, target_entropy=1.5)


def test_members_of_a_population_have_their_own_temperatures() -> None:
    for key, values in (("temperature", [0.1, 0.5]), ("target_entropy", [-1.0, -3.0])):
        core = make_core(**{key: values[0]})
        population = Population(core, hyperparameters={key: values, "lr": [1e-2, 1e-2]})
        state = population.init(seed=0)
        sample = rows(BOX)
        for _ in range(3):
            output = population.step(state, sample)
            state = output.state
        one, other = (float(output.metrics[f"temperature[{index}]"]) for index in range(2))
        assert one != other
    with pytest.raises(ValueError, match="cannot differ in 'gamma'"):
        Population(make_core(), hyperparameters={"gamma": [0.9, 0.99]})


def test_noise_is_other_in_each_step_and_the_same_in_each_run() -> None:
    keys = [torch.tensor(key) for key in (7, 8)]
    one, other = (uniform(key, (1000, 2)) for key in keys)
    torch.testing.assert_close(uniform(keys[0], (1000, 2)), one)
    assert (one != other).float().mean() > 0.99
    for each in (one, other):
        counts = np.histogram(each.numpy(), bins=10, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 30  # chi-square with 9 degrees of freedom
    both = np.corrcoef(one[:, 0], other[:, 0])[0, 1]
    assert abs(both) < 0.1
    assert abs(np.corrcoef(one[:, 0], one[:, 1])[0, 1]) < 0.1


def test_actions_of_different_bounds_are_the_same_to_the_values() -> None:
    wide = spaces.Box(-4, 4, (2,), np.float32)
    narrow = spaces.Box(0, 1, (2,), np.float32)
    torch.manual_seed(0)
    one = SoftActorCritic(VECTOR, wide, SMALL)
    other = SoftActorCritic(VECTOR, narrow, SMALL)
    other.load_state_dict(one.state_dict())
    seen = torch.randn(5, 4)
    share = torch.rand(5, 2)
    values = [
        module.forward_train({"observations": seen, "actions": low + width * share})["q_values"]
        for module, low, width in ((one, -4, 8), (other, 0, 1))
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-2, 2, (), np.float32),
        spaces.Box(-2, 2, (2, 3), np.float32),
        spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, np.inf], np.float32)),
    ],
    ids=["one number", "a matrix", "one without bounds"],
)
def test_boxes_of_any_shape_and_bounds_are_learned(space: spaces.Box) -> None:
    core = make_core(space)
    space.seed(0)
    taken = np.stack([space.sample() for _ in range(6)])
    sample = {**rows(THREE), "actions": torch.from_numpy(taken).unsqueeze(1)}
    output = core.step(core.init(0), sample)
    values = fetch_metrics(output.metrics)
    assert np.isfinite(list(values.values())).all()
    assert values["skipped"] == 0.0


def test_workers_get_what_acts_alone() -> None:
    core = make_core()
    state = core.init(0)
    names = core.get_params(state)
    assert {name.partition(".")[0] for name in names} == {"encoder", "policy_head"}


def test_a_learner_learns_from_episodes_and_goes_on_after_a_checkpoint(
    make_batch: MakeBatch,
) -> None:
    keys: dict[str, Any] = {"replay_begin": 5, "replay_batch_size": 8, "replay_ratio": 4.0}
    make = partial(SoftActorCritic, VECTOR, spaces.Discrete(2), SMALL)
    one, other = (Learner(Sac(make, SacConfig(**keys)), seed=seed) for seed in (0, 1))
    for seed in range(3):
        metrics = fetch_metrics(one.update_from_episodes([make_batch(4, 6, seed=seed)]))
    assert np.isfinite(list(metrics.values())).all()
    one.forget()
    other.restore(*one.save())
    for seed in range(3, 6):
        for learner in (one, other):
            learner.update_from_episodes([make_batch(4, 6, seed=seed)])
    np.testing.assert_equal(one.get_weights(), other.get_weights())


def test_samples_of_one_and_of_rows_have_the_same_loss(make_batch: MakeBatch) -> None:
    from juggler.learner.core.transitions import rows_of_transitions

    core = make_core(spaces.Discrete(2))
    columns = collate([make_batch(4, 6, seed=2)])
    state = core.init(0)
    of_episodes, _ = core.grads(state, columns)
    drawn = rows_of_transitions(columns, 1, core.config.gamma)
    of_rows, _ = core.grads(state, drawn)
    torch.testing.assert_close(of_episodes, of_rows)


def test_what_it_cannot_train_is_told() -> None:
    with pytest.raises(ValueError, match=r"sac needs a module .* not a ActorCritic"):
        make_core(module=ActorCritic)
    with pytest.raises(UnsupportedSpace, match="acts in Box and Discrete spaces"):
        SoftActorCritic(VECTOR, spaces.MultiDiscrete([2, 3]), SMALL)
    with pytest.raises(ValueError, match=r"model\.squash = False: .* needs True; leave it out"):
        SoftActorCritic(VECTOR, BOX, {**SMALL, "squash": False})
    with pytest.raises(ValueError, match=r"model\.encoder = 'mine:Encoder': .* leave it out"):
        SoftActorCritic(VECTOR, BOX, {"encoder": "mine:Encoder"})
    with pytest.raises(ValueError, match=r"distribution = 'mine:laplace': .* leave it out"):
        SoftActorCritic(VECTOR, BOX, {"distribution": "mine:laplace"})
    with pytest.raises(ValueError, match=r"leave out model\.recurrent"):
        SoftActorCritic(VECTOR, BOX, {**SMALL, "recurrent": "gru", "recurrent_size": 8})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"temperature": 0.0}, "temperature = 0.0: must be above 0"),
        (
            {"temperature": 0.1, "target_entropy": -1.0},
            "a temperature that is given is not learned",
        ),
        ({"replay_begin": 200_000}, "so many steps are never kept"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SacConfig(**keys).validate()
