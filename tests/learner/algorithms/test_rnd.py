"""Random network distillation against its equations, written out slowly in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from support.batches import TWO, VECTOR, MakeBatch
from support.learner_groups import join, update
from support.small_cores import copied
from torch.func import functional_call

from juggler.driver.config import ConfigError, RunConfig
from juggler.envrunner.sampler import Sampler
from juggler.learner.algorithms.actor_critic.core import EXTRA_ADVANTAGES, actor_critic_pass
from juggler.learner.algorithms.bc import BcConfig
from juggler.learner.algorithms.bc.core import Bc
from juggler.learner.algorithms.dqn import DqnConfig
from juggler.learner.algorithms.dqn.core import Dqn
from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.algorithms.impala.core import Impala
from juggler.learner.algorithms.intrinsic import rnd
from juggler.learner.algorithms.intrinsic.rnd import Networks, Rnd
from juggler.learner.algorithms.ppo import PpoConfig
from juggler.learner.algorithms.ppo.core import Ppo
from juggler.learner.config import IntrinsicConfig
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.learner_core import ALONE, Columns
from juggler.learner.core.mean_metrics import fetch_metrics
from juggler.learner.core.population import Population
from juggler.learner.core.returns import rows_of_transitions
from juggler.learner.data.collate import collate, shard
from juggler.learner.group.peers import state_hash
from juggler.learner.learner import Learner
from juggler.runtime.acting.actor import Actor
from juggler.runtime.modules.models import ActorCritic, QNetwork

MODEL = {"hidden_sizes": [8]}
GAMMA_INT = 0.9
OWN = IntrinsicConfig(
    coefficient=0.7, gamma_int=GAMMA_INT, predictor_share=1.0, features=4, model=MODEL, clip=1.5
)
INNER: dict[str, Callable[[], GradientCore]] = {
    "impala": lambda: Impala(
        partial(ActorCritic, VECTOR, TWO, MODEL),
        ImpalaConfig(gamma=0.95, lambda_=0.8, reward_scale=0.5),
    ),
    "ppo": lambda: Ppo(
        partial(ActorCritic, VECTOR, TWO, MODEL),
        PpoConfig(gamma=0.95, lambda_=0.8, minibatches=1, epochs=1),
    ),
    "dqn": lambda: Dqn(
        partial(QNetwork, VECTOR, TWO, MODEL), DqnConfig(n_step=1, reward_scale=0.5)
    ),
}


NORMALIZED = spaces.Box(-OWN.clip, OWN.clip, (4,), np.float32)


def networks_of(
    own: dict[str, Any], *, with_values: bool, space: spaces.Space[Any] = NORMALIZED
) -> Networks:
    """The networks of a state, as a module of their own."""
    networks, rest = Networks(space, OWN, with_values=with_values), own["trained"]
    for name, parameter in networks.named_parameters():
        if name.startswith("target."):
            parameter.data = own["constant"][name].clone()
        else:
            parameter.data = rest[: parameter.numel()].view_as(parameter).clone()
            rest = rest[parameter.numel() :]
    assert not rest.numel()
    return networks


def led_to(columns: Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Next observations [N, T, 4], and whether they are known [N, T]."""
    after = torch.cat([columns["observations"][:, 1:], columns["last_observations"][:, None]], 1)
    ends = zip(columns["final_rows"], columns["final_steps"], strict=True)
    for (n, t), final in zip(ends, columns["final_observations"], strict=True):
        after[n, t] = final
    return after, columns["live"] & ~columns["terminated"]


class Slow:
    """What `Rnd` should find, from samples in their order."""

    def __init__(self, *, with_values: bool) -> None:
        self.with_values = with_values
        self.seen: list[np.ndarray] = []  # observations that live steps led to
        self.returns: list[float] = []

    def rewards(self, own: dict[str, Any], columns: Columns) -> np.ndarray:
        """Intrinsic rewards [N, T], with the networks before this sample."""
        after, known = (each.numpy() for each in led_to(columns))
        after, live = after.astype(np.float64), columns["live"].numpy()
        self.seen += list(after[known])
        self.mean, self.deviation = np.mean(self.seen, 0), np.std(self.seen, 0)
        self.networks = networks_of(own, with_values=self.with_values)
        errors = np.zeros(live.shape)
        for n, t in zip(*np.nonzero(known), strict=True):
            x = self.normalized(after[n, t])
            with torch.no_grad():
                apart = self.networks.predictor(x) - self.networks.target(x)
            errors[n, t] = apart.double().square().mean()
        for n in range(len(live)):
            total = 0.0
            for t in np.flatnonzero(live[n]):
                total = GAMMA_INT * total + errors[n, t]
                self.returns.append(total)
        return errors / np.std(self.returns)

    def normalized(self, x: np.ndarray) -> torch.Tensor:
        apart = (x - self.mean) / self.deviation
        return torch.from_numpy(apart.clip(-OWN.clip, OWN.clip)).float()[None]

    def value(self, x: torch.Tensor) -> float:
        with torch.no_grad():
            return float(self.networks.values(self.normalized(x.double().numpy())))


def samples_of(make_batch: MakeBatch, count: int = 2) -> list[Columns]:
    return [collate([make_batch(4, 9, seed=seed)]) for seed in range(count)]


@pytest.mark.parametrize("name", INNER)
def test_rewards_are_normalized_errors_of_the_predictor(make_batch: MakeBatch, name: str) -> None:
    core, slow = Rnd(INNER[name](), OWN), Slow(with_values=name != "dqn")
    state = core.init(0)
    for columns in samples_of(make_batch):
        expected = slow.rewards(state["own"], columns)
        live = columns["live"].numpy()
        assert 0 < live.mean() < 1, "a case worth its name"
        output = core.step(copied(state), columns)
        found = fetch_metrics(output.metrics)["intrinsic_reward"]
        assert found == pytest.approx(expected[live].mean(), rel=1e-4)
        _, shown, _ = core.learned(state, columns, ALONE)
        if name == "dqn":
            bonus = (shown["rewards"] - columns["rewards"]).numpy()
            np.testing.assert_allclose(bonus, 0.7 * expected / 0.5, rtol=1e-4, atol=1e-5)
        state = output.state


@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_intrinsic_advantages_are_of_a_return_that_never_ends(
    make_batch: MakeBatch, name: str
) -> None:
    inner = INNER[name]()
    core, slow = Rnd(inner, OWN), Slow(with_values=True)
    state = core.init(0)
    (columns,) = samples_of(make_batch, 1)
    rewards = slow.rewards(state["own"], columns)
    live, lambda_ = columns["live"].numpy(), 0.8
    forward = inner.forward(state["inner"])
    policy = forward.module.action_distribution()(
        actor_critic_pass(forward, columns).action_dist_inputs
    )
    log_ratios = (policy.log_prob(columns["actions"]) - columns["action_logp"]).detach().numpy()
    expected = np.zeros(live.shape)
    for n in range(len(live)):
        steps = np.flatnonzero(live[n])
        values = [slow.value(columns["observations"][n, t]) for t in steps]
        t = steps[-1]
        ended = bool(columns["terminated"][n, t])
        values.append(values[-1] if ended else slow.value(led_to(columns)[0][n, t]))
        correction = 0.0  # v - V of the next live step
        for place in reversed(range(len(steps))):
            t = steps[place]
            delta = rewards[n, t] + GAMMA_INT * values[place + 1] - values[place]
            if name == "ppo":
                correction = expected[n, t] = delta + GAMMA_INT * lambda_ * correction
            else:
                rho = min(1.0, np.exp(log_ratios[n, t]))
                expected[n, t] = rho * (delta + GAMMA_INT * correction)
                correction = rho * delta + GAMMA_INT * lambda_ * rho * correction
    _, shown, _ = core.learned(state, columns, ALONE)
    found = shown[EXTRA_ADVANTAGES].numpy()
    np.testing.assert_allclose(found, 0.7 * expected, rtol=1e-3, atol=1e-4)
    assert columns["terminated"].any(), "a case worth its name"


def test_the_algorithm_adds_these_to_its_own_advantages(make_batch: MakeBatch) -> None:
    (columns,) = samples_of(make_batch, 1)
    extra = torch.randn(columns["live"].shape, generator=torch.Generator().manual_seed(0))
    impala = INNER["impala"]()
    state = impala.init(0)
    plain, _ = impala.grads(state, columns)
    changed, _ = impala.grads(state, {**columns, EXTRA_ADVANTAGES: extra})
    parameters = state["parameters"].clone().requires_grad_()
    forward = impala.forward(state).using(parameters)
    policy = forward.module.action_distribution()(
        actor_critic_pass(forward, columns).action_dist_inputs
    )
    logp = policy.log_prob(columns["actions"])[columns["live"]]
    expected = torch.autograd.grad(-(extra[columns["live"]] * logp).mean(), parameters)[0]
    torch.testing.assert_close(changed - plain, expected)


@pytest.mark.parametrize("name", INNER)
def test_predictor_and_values_take_one_step_of_adam(make_batch: MakeBatch, name: str) -> None:
    core, slow = Rnd(INNER[name](), OWN), Slow(with_values=name != "dqn")
    state = core.init(0)
    (columns,) = samples_of(make_batch, 1)
    slow.rewards(state["own"], columns)
    networks, live = slow.networks, columns["live"]
    after, known = led_to(columns)
    after = torch.cat([slow.normalized(x.double().numpy()) for x in after[known]])
    errors = (networks.predictor(after) - networks.target(after).detach()).square().mean(-1)
    total = errors.mean()
    if name != "dqn":
        _, _, metrics = core.learned(state, columns, ALONE)
        targets = targets_of(Rnd(INNER[name](), OWN), state, columns)
        before = torch.cat(
            [slow.normalized(x.double().numpy()) for x in columns["observations"][live]]
        )
        value_loss = 0.5 * (targets - networks.values(before).squeeze(-1)).square().mean()
        found = float(metrics["intrinsic_value_loss"])
        assert found == pytest.approx(float(value_loss.detach()), rel=1e-4)
        total = total + value_loss
    adam = torch.optim.Adam(
        [p for name, p in networks.named_parameters() if not name.startswith("target.")], lr=OWN.lr
    )
    total.backward()  # type: ignore[no-untyped-call]
    adam.step()
    output = core.step(copied(state), columns)
    told = fetch_metrics(output.metrics)
    assert told["predictor_loss"] == pytest.approx(float(errors.mean().detach()), rel=1e-4)
    expected = torch.cat(
        [p.flatten() for name, p in networks.named_parameters() if not name.startswith("target.")]
    )
    trained = output.state["own"]["trained"]
    # Adam's first step is the sign of the gradient: where that is nearly 0, it is either.
    close = (trained - expected).abs() < 1e-5
    assert close.float().mean() > 0.99


def targets_of(core: Rnd, state: Any, columns: Columns) -> torch.Tensor:
    """The targets of the intrinsic values of live steps [live]."""
    found: list[torch.Tensor] = []
    estimates = core._with_bonus

    def noting(*args: Any) -> Any:
        result = estimates(*args)
        found.append(result[1])
        return result

    core._with_bonus = noting  # type: ignore[method-assign]
    core.learned(state, columns, ALONE)
    return found[0].values[columns["live"]]


def test_drawn_transitions_have_the_bonus_of_what_they_led_to(make_batch: MakeBatch) -> None:
    (columns,) = samples_of(make_batch, 1)
    core = Rnd(INNER["dqn"](), OWN)
    state = core.init(0)
    rows = rows_of_transitions(columns, n=1, gamma=0.9)
    _, shown, _ = core.learned(state, rows, ALONE)
    bonus = (shown["rewards"] - rows["rewards"])[:, 0]  # [M]
    own = core.learned(state, rows, ALONE)[0]
    (observed,) = own["observed"].values()
    mean, m2 = observed["mean"], observed["m2"]
    after, known = rows["last_observations"], rows["discounts"][:, 0] > 0  # [M, 4], [M]
    assert 0 < known.float().mean() < 1, "a case worth its name"
    np.testing.assert_allclose(mean.numpy(), after[known].double().mean(0).numpy(), rtol=1e-5)
    deviation = (m2 / known.sum()).sqrt()  # [4]
    x = ((after - mean) / deviation).clamp(-OWN.clip, OWN.clip).float()
    networks = networks_of(state["own"], with_values=False)
    errors = functional_call(networks, {}, (x, "errors")).detach().double()  # [M]
    errors[~known] = 0.0
    expected = 0.7 * errors / errors.std(unbiased=False) / 0.5
    np.testing.assert_allclose(bonus.double().numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


def test_a_nan_reaches_the_loss_and_does_not_become_no_bonus(make_batch: MakeBatch) -> None:
    (columns,) = samples_of(make_batch, 1)
    rows = rows_of_transitions(columns, n=1, gamma=0.9)
    rows["last_observations"][rows["discounts"][:, 0] > 0] = torch.nan
    core = Rnd(INNER["dqn"](), OWN)
    shown = core.learned(core.init(0), rows, ALONE)[1]
    assert shown["rewards"].isnan().all()


def test_there_is_no_bonus_before_returns_differ() -> None:
    places, zeros = spaces.Discrete(4), torch.zeros((8, 1))
    inner = Dqn(partial(QNetwork, places, TWO, MODEL), DqnConfig(n_step=1))
    core = Rnd(inner, OWN)
    state, errors = core.init(0), []

    def drawn(after: torch.Tensor) -> Columns:
        """Steps that led to these places [8]."""
        numbers = {"actions": zeros.long(), "rewards": zeros, "discounts": zeros + 0.9}
        seen = {"observations": zeros.long(), "last_observations": after, "live": zeros == 0}
        networks = networks_of(state["own"], with_values=False, space=places)
        found = functional_call(networks, {}, (after, "errors")).detach()  # [8]
        errors.append(found.double().numpy())
        return {**seen, **numbers, "states": {}}

    same = drawn(torch.full((8,), 2))
    own, shown, metrics = core.learned(state, same, ALONE)
    assert not shown["rewards"].any()
    assert float(metrics["novelty"]) == pytest.approx(errors[0].mean(), rel=1e-5)
    state = core.init(0) | {"own": own}
    shown = core.learned(state, drawn(torch.arange(8) % 4), ALONE)[1]
    expected = 0.7 * errors[1] / np.concatenate(errors).std()
    bonus = shown["rewards"][:, 0].double().numpy()
    np.testing.assert_allclose(bonus, expected, rtol=1e-3, atol=1e-5)
    assert errors[0].min() > 0, "a case worth its name"


@pytest.mark.parametrize("name", ["impala", "ppo"])
def test_learners_of_a_group_know_what_one_of_all_samples_would(
    make_batch: MakeBatch, name: str
) -> None:
    alone, *group = (Learner(Rnd(INNER[name](), OWN), seed=0) for _ in range(3))
    join(group)
    for seed in range(3):
        batches = [make_batch(4, 6, seed=2 * seed), make_batch(4, 6, seed=2 * seed + 1)]
        alone.update_from_episodes(batches)
        update(group, shard(batches, 2))
    expected = alone.state["own"]
    for learner in group:
        found = learner.state["own"]
        for key in ("observed", "returns"):
            one, other = found[key], expected[key]
            if key == "observed":
                (one,), (other,) = one.values(), other.values()  # of the only leaf
            assert int(one["count"]) == int(other["count"]) > 0
            torch.testing.assert_close(one["mean"], other["mean"], rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(one["m2"], other["m2"], rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(found["trained"], expected["trained"], rtol=1e-2, atol=2e-3)
    assert len(set(map(state_hash, group))) == 1, "not a bit apart"


# Random network distillation where episodes end.


RND_ENDS_INNER: dict[str, Callable[[], GradientCore]] = {
    "ppo": lambda: Ppo(partial(ActorCritic, VECTOR, TWO, MODEL), PpoConfig()),
    "dqn": lambda: Dqn(partial(QNetwork, VECTOR, TWO, MODEL), DqnConfig(n_step=1)),
}


class Walk(gym.Env[np.ndarray, int]):
    """Two steps to an end, with a new observation of its own."""

    observation_space, action_space = VECTOR, TWO

    def __init__(self, terminates: bool, new: bool) -> None:
        self.terminates, self.new, self.place = terminates, new, 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.place = 0
        return self.seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        over = self.place == 1
        self.place += 1 + (over and self.new)
        return self.seen(), 0.0, over and self.terminates, over and not self.terminates, {}

    def seen(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.place]


def walked(mode: AutoresetMode, terminates: bool, *, new: bool) -> Columns:
    env = SyncVectorEnv([partial(Walk, terminates, new)] * 4, autoreset_mode=mode)
    policy = Actor(QNetwork(VECTOR, TWO, MODEL), 4, 12, 0)
    columns: Columns = collate([Sampler(env, policy, 12, 0).sample((0, 0)).batch])
    env.close()
    return columns


@pytest.mark.parametrize("drawn", [False, True], ids=["of a row", "drawn"])
@pytest.mark.parametrize("terminates", [False, True], ids=["truncated", "terminated"])
def test_the_bonus_of_an_end_is_the_same_with_each_autoreset_mode(
    terminates: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Rnd(RND_ENDS_INNER["dqn"](), IntrinsicConfig(predictor_share=1.0, features=16))
    state, found = core.init(0), []
    usual = walked(AutoresetMode.SAME_STEP, terminates, new=False)
    for _ in range(100):
        state = core.step(state, usual).state
    monkeypatch.setattr(rnd, "with_live", lambda moments, *_: moments)  # one scale for both
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        columns = walked(mode, terminates, new=True)
        if drawn:
            columns = rows_of_transitions(columns, 1, 0.9)
        shown, live = core.learned(state, columns, ALONE)[1], columns["live"]
        bonus = (shown["rewards"] - columns["rewards"])[live]  # [M]
        place = columns["observations"][live].argmax(-1)  # [M]
        found.append([float(bonus[place == at].mean()) for at in (0, 1)])
    np.testing.assert_allclose(*found, rtol=1e-5)
    usual_bonus, bonus_of_end = found[0]
    assert bonus_of_end == 0.0 if terminates else bonus_of_end > 10 * usual_bonus > 0


@pytest.mark.parametrize("name", RND_ENDS_INNER)
def test_what_stands_behind_a_row_that_terminated_makes_no_difference(
    make_batch: MakeBatch, name: str
) -> None:
    """It may be unknown: a paused agent's simulator shows nothing."""
    ends = np.zeros((3, 5), np.bool_)
    ends[:, -1] = True
    batch = make_batch(3, 5, ends=0.0, terminated=ends)
    core = Rnd(RND_ENDS_INNER[name](), IntrinsicConfig(features=4, model=MODEL))
    columns = collate([batch])
    others = {**columns, "last_observations": columns["last_observations"] + 3.0}
    one, other = (core.step(core.init(0), each) for each in (columns, others))
    torch.testing.assert_close(one.state, other.state, rtol=0, atol=0)
    assert fetch_metrics(one.metrics) == fetch_metrics(other.metrics)


@pytest.mark.parametrize(
    "inner",
    [partial(Impala, config=ImpalaConfig(burn_in=3)), partial(Ppo, config=PpoConfig(burn_in=3))],
)
def test_nothing_is_aimed_at_in_a_burn_in(
    make_batch: MakeBatch, inner: Callable[..., GradientCore]
) -> None:
    model = {**MODEL, "recurrent": "gru", "recurrent_size": 4}
    make = partial(ActorCritic, VECTOR, TWO, model)
    core = Rnd(inner(make), IntrinsicConfig(features=4, model=MODEL))
    offsets = np.full(2, 7, np.int32)  # both rows go on with an episode from before
    states = {"module": {"hidden": np.zeros((2, 4), np.float32)}}
    batch = make_batch(2, 3, ends=0.0, segment_offsets=offsets, states=states)
    metrics = core.learned(core.init(0), collate([batch]), ALONE)[2]
    assert float(metrics["intrinsic_value_loss"]) == 0.0
    assert float(metrics["predictor_loss"]) > 0.0


# Random network distillation: the table `intrinsic`, and cores that it is not for.


ACTING = partial(ActorCritic, VECTOR, TWO, {})


def test_bc_refuses_it_with_a_sentence() -> None:
    bc = Bc(ACTING, BcConfig())
    with pytest.raises(ValueError, match="bc, which learns nothing from rewards"):
        Rnd(bc)
    with pytest.raises(ConfigError, match="it never acts or earns"):
        RunConfig.from_flat(
            {"algorithm": "bc", "dataset": "somewhere", "intrinsic": {"kind": "rnd"}}
        )


def test_summed_rewards_of_several_kept_steps_are_refused() -> None:
    make = partial(QNetwork, VECTOR, TWO, {})
    with pytest.raises(ValueError, match="intrinsic with n_step = 3"):
        Rnd(Dqn(make, DqnConfig()))
    Rnd(Dqn(make, DqnConfig(n_step=1)))


def test_kept_steps_that_all_look_like_ends_are_refused() -> None:
    make = partial(QNetwork, VECTOR, TWO, {})
    with pytest.raises(ValueError, match=r"intrinsic with gamma = 0: .*; set"):
        Rnd(Dqn(make, DqnConfig(n_step=1, gamma=0.0)))
    Rnd(Impala(ACTING, ImpalaConfig(gamma=0.0)))  # it knows ends by themselves


def test_what_cannot_be_explored_with_says_so() -> None:
    with pytest.raises(ValueError, match="is for a GradientCore, and"):
        Rnd(Population(Impala(ACTING, ImpalaConfig()), size=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Put juggler\.Rnd\(core"):
        Impala(ACTING, ImpalaConfig(intrinsic={"kind": "rnd"}))


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ({"kind": "rdn"}, r"intrinsic\.kind: 'rdn'"),
        ({"coefficent": 1.0}, "no key 'coefficent': did you mean"),
        ({"coefficient": "much"}, r"intrinsic\.coefficient: expected a"),
        ({"coefficient": 0.0}, r"intrinsic\.coefficient = 0\.0"),
        ({"gamma_int": 1.0}, r"intrinsic\.gamma_int = 1\.0: must"),
        ({"predictor_share": 0.0}, r"predictor_share = 0\.0: must be"),
        ({"model": {"hiden_sizes": [8]}}, r"intrinsic\.model has no key 'hiden_sizes'"),
    ],
)
def test_a_wrong_table_names_the_key(table: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        RunConfig.from_flat({"intrinsic": table})
