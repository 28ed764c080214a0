"""SAC's and TD3's losses against ones written out step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from support.batches import VECTOR, MakeBatch
from support.learner_groups import join, update
from support.small_cores import Doubled, copied, drawn_rows

from juggler.learner.algorithms.registry import build_learner
from juggler.learner.algorithms.sac import SacConfig
from juggler.learner.algorithms.sac.core import Sac
from juggler.learner.algorithms.td3 import Td3Config
from juggler.learner.algorithms.td3.core import Td3
from juggler.learner.core.hashing import content_key, uniform
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.learner import Learner
from juggler.runtime.modules.models import ActorCritic, DeterministicActorCritic, SoftActorCritic
from juggler.runtime.wire.errors import UnsupportedSpace
from juggler.testing import check_core

BOX = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 5], np.float32))
THREE = spaces.Discrete(3)
SMALL = {"hidden_sizes": [8]}


def make_core(actions: Any = BOX, module: Any = SoftActorCritic, **config: Any) -> Sac:
    make = partial(module, VECTOR, actions, SMALL)
    return Sac(make, SacConfig(**config))


def rows(actions: Any, count: int = 6) -> dict[str, Any]:
    """Transitions with weights, as a replay draws them."""
    generator = torch.Generator().manual_seed(3)
    taken = torch.randint(0, 3, (count,), generator=generator)
    if actions is BOX:
        low, high = torch.from_numpy(BOX.low), torch.from_numpy(BOX.high)
        taken = low + (high - low) * torch.rand((count, 2), generator=generator)
    return {**drawn_rows(taken), "importance_weights": torch.linspace(0.2, 1.0, count)}


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


# TD3's loss against float64 without torch, and its delayed moves.


Floats = NDArray[np.float64]
Parameters = Mapping[str, Floats]
LOW, HALF = BOX.low.astype(float), (BOX.high - BOX.low).astype(float) / 2


def make_td3(actions: Any = BOX, module: Any = DeterministicActorCritic, **config: Any) -> Td3:
    make = partial(module, VECTOR, actions, SMALL)
    return Td3(make, Td3Config(**config))


def td3_rows(space: spaces.Box = BOX, count: int = 6) -> dict[str, Any]:
    """Transitions as a replay draws them."""
    space.seed(0)
    taken = np.stack([np.asarray(space.sample()) for _ in range(count)])  # [N, ...]
    return drawn_rows(torch.from_numpy(taken))


def slow_policy(parameters: Parameters, seen: Floats) -> Floats:
    """π [N, 2] in units of the environment."""
    hidden = np.tanh(seen @ parameters["encoder.0.weight"].T + parameters["encoder.0.bias"])
    u = hidden @ parameters["policy_head.weight"].T + parameters["policy_head.bias"]
    actions: Floats = LOW + HALF * (1 + np.tanh(u))
    return actions


def slow_value(parameters: Parameters, which: int, seen: Floats, actions: Floats) -> Floats:
    """Q_1 or Q_2 [N] of actions in units of the environment."""
    own = {name: x for name, x in parameters.items() if name.startswith(f"critics.{which}.")}
    weight, bias, head, offset = own.values()
    hidden = np.tanh(np.concatenate([(actions - LOW) / HALF - 1, seen], 1) @ weight.T + bias)
    values: Floats = hidden @ head[0] + offset[0]
    return values


def slow_losses(
    parameters: Parameters, target: Parameters, sample: Mapping[str, Any], key: Any, config: Any
) -> tuple[float, float, Floats]:
    """Losses of values and policy, and the priorities [N]."""
    count = len(sample["live"])
    numbers = uniform(key ^ content_key(sample["actions"]), (count, 2, 2)).double().numpy()
    noise = np.sqrt(-2 * np.log(numbers[:, 0])) * np.cos(2 * math.pi * numbers[:, 1])
    most = config.target_noise_clip
    noise = np.clip(config.target_noise * noise, -most, most)  # [N, 2]
    columns = {name: x.double().numpy() for name, x in sample.items()}
    now, then = columns["observations"][:, 0], columns["last_observations"]
    after = slow_policy(target, then) + HALF * noise
    after = np.clip(after, LOW, LOW + 2 * HALF)
    best = np.minimum(*(slow_value(target, which, then, after) for which in (0, 1)))
    goals = config.reward_scale * columns["rewards"][:, 0] + columns["discounts"][:, 0] * best
    taken = columns["actions"][:, 0]
    errors = [goals - slow_value(parameters, which, now, taken) for which in (0, 1)]
    gain = slow_value(parameters, 0, now, slow_policy(parameters, now))
    of_values = (columns["importance_weights"] * 0.5 * np.square(errors).sum(0)).mean()
    return float(of_values), float(-gain.mean()), np.abs(errors).mean(0)


def state_of(core: Td3) -> tuple[str, Any]:
    """The group's id, and a state in which clipping matters."""
    state = core.init(0)
    named = core.flat.named(state["parameters"])
    named["policy_head.weight"].mul_(100)  # a view
    target = core.init(5)["parameters"]
    core.flat.named(target)["policy_head.weight"].mul_(500)
    state["extra"]["target"] = target
    return state


@pytest.mark.parametrize("since", [0, 1], ids=["the policy stays", "the policy moves"])
@pytest.mark.parametrize("target_noise", [0.2, 5.0], ids=["noise", "noise that is clipped"])
def test_losses_and_gradients_are_those_of_the_paper(target_noise: float, since: int) -> None:
    core = make_td3(reward_scale=0.7, target_noise=target_noise)
    state = state_of(core)
    extra, sample = state["extra"], td3_rows()
    sample["importance_weights"] = torch.linspace(0.2, 1.0, 6)
    extra["since_policy_move"] = torch.tensor(since)
    named = core.flat.named
    own, target = (
        {name: x.double().numpy().copy() for name, x in named(vector).items()}
        for vector in (state["parameters"], extra["target"])
    )
    losses = partial(slow_losses, own, target, sample, extra["key"], core.config)
    grads, aux = core.grads(state, sample)
    metrics = aux.metrics
    of_values, of_policy, priorities = losses()
    np.testing.assert_allclose(aux.priorities, priorities, rtol=1e-4)
    assert float(metrics["value_loss"]) == pytest.approx(of_values, rel=1e-4)
    assert ("policy_loss" in metrics) == since
    if since:
        assert float(metrics["policy_loss"]) == pytest.approx(of_policy, rel=1e-4)
    for name, gradient in named(grads).items():
        of_critics = name.startswith("critics.")
        expected = np.zeros_like(own[name])
        for place in np.ndindex(expected.shape):
            if not of_critics and since == 0:
                break  # a gradient of exactly 0
            there, ends = own[name][place], []
            for step in (1e-6, -1e-6):
                own[name][place] = there + step
                ends.append(losses()[0 if of_critics else 1])
            own[name][place] = there
            expected[place] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=2e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_between_its_moves_nothing_of_the_policy_changes(optimizer: str) -> None:
    core = make_td3(policy_period=3, target_period=2, target_share=0.25, optimizer=optimizer)
    state = core.init(0)
    named, sample = core.flat.named, td3_rows()

    def parts(state: Any) -> dict[str, torch.Tensor]:
        own = state
        vectors = {"parameters": own["parameters"], "target": own["extra"]["target"]}
        vectors |= own["moments"]
        return {
            f"{what} {name}": x.clone()
            for what, vector in vectors.items()
            for name, x in named(vector).items()
        }

    before = parts(state)
    for step in range(1, 13):
        state = core.step(state, sample).state
        after = parts(state)
        for name, x in after.items():
            due = step % 3 == 0 or ("critics." in name and not name.startswith("target "))
            due = due and (step % 6 == 0 or not name.startswith("target "))
            assert torch.equal(x, before[name]) is not due, f"{name} in step {step}"
        if step % 6 == 0:
            moved = {
                name: torch.lerp(before[f"target {name}"], after[f"parameters {name}"], 0.25)
                for name in named(state["parameters"])
            }
            for name, expected in moved.items():
                torch.testing.assert_close(after[f"target {name}"], expected)
        before = after
    if optimizer == "adam":  # which corrects for how often each parameter has moved
        updates = named(state["moments"]["updates"])
        assert {int(x.flatten()[0]) for name, x in updates.items() if "critics" in name} == {12}
        assert {int(x.flatten()[0]) for name, x in updates.items() if "critics" not in name} == {4}


def test_a_policy_that_stays_takes_no_part_in_the_norm_that_is_limited() -> None:
    core = make_td3(grad_clip=1e-3)
    state = state_of(core)
    sample = td3_rows()
    grads, _ = core.grads(state, sample)
    of_values = [x for name, x in core.flat.named(grads).items() if name.startswith("critics.")]
    norm = math.sqrt(sum(float(x.square().sum()) for x in of_values))
    metrics = core.step(copied(state), sample).metrics
    assert float(metrics["grad_norm"]) == pytest.approx(norm)


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-2, 2, (), np.float32), spaces.Box(-1, 3, (2, 3), np.float64), BOX],
    ids=["one number", "a matrix", "bounds that differ"],
)
def test_boxes_of_any_shape_are_learned(space: spaces.Box) -> None:
    sample = td3_rows(space)
    check_core(partial(make_td3, space), sample)


def test_learners_of_a_group_move_their_policies_together(make_batch: MakeBatch) -> None:
    keys: dict[str, Any] = {"replay_begin": 0, "replay_batch_size": 8, "replay_ratio": 8.0}
    number = spaces.Box(-0.5, 1.5, (), np.float32)
    group = [Learner(make_td3(number, **keys), seed=0) for _ in range(2)]
    before = group[0].get_weights()
    join(group)
    for seed in range(3):
        update(group, [[make_batch(4, 6, seed=2 * seed + place)] for place in (0, 1)])
    torch.testing.assert_close(group[0].state, group[1].state, rtol=0, atol=0)
    after = group[0].get_weights()
    assert (after["policy_head.weight"] != before["policy_head.weight"]).any()


def test_what_td3_cannot_train_is_told() -> None:
    with pytest.raises(ValueError, match=r"td3 needs a module .* not a"):
        make_td3(module=SoftActorCritic)
    with pytest.raises(ValueError, match="'td3' needs a Box action space"):
        build_learner(Td3Config(), None, VECTOR, spaces.Discrete(3), {})
    with pytest.raises(UnsupportedSpace, match="acts in Box spaces, and not in MultiBinary"):
        DeterministicActorCritic(VECTOR, spaces.MultiBinary(3), SMALL)
    with pytest.raises(ValueError, match=r"model\.squash = False: .* needs"):
        DeterministicActorCritic(VECTOR, BOX, {**SMALL, "squash": False})
    with pytest.raises(ValueError, match=r"leave out model\.recurrent"):
        DeterministicActorCritic(VECTOR, BOX, {**SMALL, "recurrent": "gru"})


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        ([-1, -np.inf], [1, np.inf], "squashes each element of an"),
        ([-1, -1], [1, np.inf], "squashes each element of an"),
        ([-1, 2], [1, 2], "one clearly above the other"),
        ([-3e38, 0], [3e38, 1], "choose another algorithm, such as sac"),
    ],
)
def test_a_box_without_bounds_to_squash_to_is_refused(
    low: list[float], high: list[float], words: str
) -> None:
    space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    with pytest.raises(UnsupportedSpace, match=words):
        build_learner(Td3Config(), None, VECTOR, space, SMALL)
