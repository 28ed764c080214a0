"""SAC's loss against one written out step by step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.batches import VECTOR
from support.small_cores import Doubled, copied

from juggler.learner.algorithms.sac import SacConfig
from juggler.learner.algorithms.sac.core import Sac
from juggler.learner.core.hashing import content_key, uniform
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.runtime.modules.models import ActorCritic, SoftActorCritic
from juggler.runtime.wire.errors import UnsupportedSpace

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
    """Parts of the loss, gradients by name, and priorities [N], in float64."""
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


@pytest.mark.parametrize(("actions", "most"), [(THREE, "1.10"), (BOX, "1.39")])
def test_an_entropy_that_no_policy_has_is_refused(actions: Any, most: str) -> None:
    with pytest.raises(ValueError, match=f"target_entropy = 1.5: must be below {most}"):
        make_core(actions, target_entropy=1.5)


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


def test_what_it_cannot_train_is_told() -> None:
    with pytest.raises(ValueError, match=r"sac needs a module .* not a ActorCritic"):
        make_core(module=ActorCritic)
    with pytest.raises(UnsupportedSpace, match="acts in Box and Discrete spaces"):
        SoftActorCritic(VECTOR, spaces.MultiDiscrete([2, 3]), SMALL)
    with pytest.raises(ValueError, match=r"model\.squash = False: .* needs"):
        SoftActorCritic(VECTOR, BOX, {**SMALL, "squash": False})
    with pytest.raises(ValueError, match=r"model\.encoder = 'mine:Encoder'"):
        SoftActorCritic(VECTOR, BOX, {"encoder": "mine:Encoder"})
    with pytest.raises(ValueError, match="distribution = 'mine:laplace'"):
        SoftActorCritic(VECTOR, BOX, {"distribution": "mine:laplace"})
    with pytest.raises(ValueError, match=r"leave out model\.recurrent"):
        SoftActorCritic(VECTOR, BOX, {**SMALL, "recurrent": "gru", "recurrent_size": 8})
