"""A learner around another library's optimizer, which works in place.

    python examples/external_optimizer.py

Juggler's algorithms are functions of an explicit state. To use an optimizer or a trainer that holds
its own state, derive from `Learner` and override `step`, `get_params`, `save` and `restore`. The
rest (episodes, sources, asynchronous updates) is inherited. This learner trains CartPole in some
seconds by advantage actor-critic (Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement
Learning") with Nesterov momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import torch

from juggler import (
    Actor,
    ActorCritic,
    ActorCriticConfig,
    Columns,
    Learner,
    LearnerCore,
    Metrics,
    Params,
    RLModule,
    Sampler,
    Tree,
    acting_names,
    all_observations,
    arrays_like,
    gae,
    next_values,
    strip_to_acting,
    tensors_like,
)


class NoCore(LearnerCore[dict[str, Any]]):
    """An empty core: it only answers a Learner's questions about the algorithm."""

    name = "a2c with momentum"
    trains_on = frozenset({"episodes"})

    def __init__(self, config: ActorCriticConfig) -> None:
        self.config = config

    def init(self, seed: int) -> dict[str, Any]:
        return {}


class MomentumLearner(Learner):
    """Trains a module in place."""

    def __init__(
        self,
        make_module: Callable[[], RLModule],
        config: ActorCriticConfig,
        lr: float = 0.05,
        *,
        seed: int = 0,
        source: Iterator[Columns] | None = None,
    ) -> None:
        # This learner never calls the methods that the core lacks.
        super().__init__(NoCore(config), source=source)  # type: ignore[abstract]
        torch.manual_seed(seed)
        self.module = make_module()
        self.optimizer = torch.optim.SGD(
            self.module.parameters(), lr=lr, momentum=0.9, nesterov=True
        )
        # Start with a momentum of 0, so that a new learner has the same state as a saved one.
        for parameter in self.module.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step(self, sample: Columns | None = None) -> Metrics:
        if sample is None:
            if self.source is None:
                raise ValueError("step() without a sample needs a learner with a source")
            sample = next(self.source)
        columns, live = sample, sample["live"]  # [N, T]
        rows, steps = live.shape
        outputs = self.module.forward_train({"observations": all_observations(columns)})
        values, last, final = outputs["values"].tensor_split([rows * steps, rows * steps + rows])
        values = values.view(rows, steps)  # [N, T]
        inputs = outputs["action_dist_inputs"][: rows * steps].view(rows, steps, -1)  # [N, T, D]
        policy = self.module.action_distribution()(inputs)
        with torch.no_grad():
            estimates = gae(
                rewards=columns["rewards"] * self.config.reward_scale,
                values=values,
                next_values=next_values(
                    values, last, final, columns["final_rows"], columns["final_steps"]
                ),
                terminated=columns["terminated"],
                truncated=columns["truncated"],
                live=live,
                gamma=self.config.gamma,
                lambda_=0.95,
            )
        gains = estimates.advantages * policy.log_prob(columns["actions"])  # [N, T]
        errors = (estimates.targets - values).square()  # [N, T]
        entropy = policy.entropy()  # [N, T]
        losses = 0.5 * self.config.value_coefficient * errors - gains - 0.01 * entropy  # [N, T]
        loss = (losses * live).sum() / live.sum().clamp(min=1)  # []
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)  # []
        self.optimizer.step()
        self.updates += 1
        return {"loss": loss.detach(), "grad_norm": norm}

    def get_params(self) -> Params:
        """Copies, because later updates change the module in place."""
        tensors = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        return {name: tensors[name] for name in acting_names(self.module)}

    def save(self) -> tuple[dict[str, Tree], dict[str, Any]]:
        copies: Any = arrays_like(self._state())
        copies = {
            kind: {name: array.copy() for name, array in arrays.items()}
            for kind, arrays in copies.items()
        }
        return copies, {"algorithm": self.core.name, "updates": self.updates}

    def restore(self, tree: Tree, extras: Mapping[str, Any]) -> None:
        mine = self._state()
        for kind, tensors in tensors_like(tree, mine).items():
            for name, tensor in tensors.items():
                mine[kind][name].copy_(tensor)
        self.updates = int(extras["updates"])

    def _state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state: the tensors themselves, not copies."""
        momentum = {
            name: self.optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in self.module.named_parameters()
        }
        return {"module": self.module.state_dict(), "momentum": momentum}


def main() -> None:
    env = gymnasium.make_vec("CartPole-v1", num_envs=16, vectorization_mode="sync")
    spaces = env.single_observation_space, env.single_action_space

    def make_module() -> ActorCritic:
        return ActorCritic(*spaces, {"hidden_sizes": [64]})

    learner = MomentumLearner(make_module, ActorCriticConfig(reward_scale=0.1))
    module = make_module()
    strip_to_acting(module)
    policy = Actor(module, rows=16, steps=32, seed=0)
    sampler = Sampler(env, policy, steps=32, seed=0)
    returns: list[float] = []
    for update in range(400):
        policy.load(learner.get_weights())
        fragment = sampler.sample((1, update))
        learner.update_from_episodes([fragment.batch])
        returns += fragment.episode_returns
        if update % 100 == 99:
            print(f"update {update + 1}: return {sum(returns[-50:]) / 50:.1f}", flush=True)


if __name__ == "__main__":
    main()
