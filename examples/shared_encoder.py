"""Two modules with one encoder, each with a learner of its own.

    python examples/shared_encoder.py

Two agents see the same signal ("global"), and each has a switch of its own ("local"). The first has
to answer with the sign of the signal if its switch is off, and with the opposite if it is on. For
the second agent it is the other way round. One shared encoder reads the signal, and each module has
an encoder of its own for its switch. In a few seconds the share of right answers rises from 0.5 to
above 0.95 for both. Each update trains the shared encoder, and the other module takes it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from juggler import (
    Actor,
    Impala,
    ImpalaConfig,
    Learner,
    MultiRLModule,
    RLModule,
    RLModuleSpec,
    Sampler,
    SharedParts,
    strip_to_acting,
)

SIGNAL = 8
OBSERVATIONS = gymnasium.spaces.Dict(
    {
        "global": gymnasium.spaces.Box(-np.inf, np.inf, (SIGNAL,), np.float32),
        "local": gymnasium.spaces.Discrete(2),
    }
)
ACTIONS = gymnasium.spaces.Discrete(2)
STEPS = 8


class Signals(gymnasium.Env[dict[str, Any], np.int64]):
    """Eight steps with a new signal each, rewarded for right answers."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def __init__(self, contrary: bool) -> None:
        self.contrary = contrary

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._look(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        positive = bool(self.seen["global"].mean() > 0)
        right = positive ^ bool(self.seen["local"]) ^ self.contrary
        self.steps += 1
        return self._look(), float(action == right), self.steps == STEPS, False, {}

    def _look(self) -> dict[str, Any]:
        signal = self.np_random.standard_normal(SIGNAL).astype(np.float32)  # [8]
        self.seen = {"global": signal, "local": self.np_random.integers(2)}
        return self.seen


class TwoPaths(RLModule):
    """Encodes global observations by a shared encoder, local ones privately."""

    training_only = ("value",)

    def __init__(self, spec: RLModuleSpec, shared: torch.nn.Module) -> None:
        assert spec.observation_space is not None
        assert spec.action_space is not None
        super().__init__(spec.observation_space, spec.action_space, spec.model_config or {})
        self.shared = shared
        self.own = torch.nn.Embedding(2, 32)
        self.join = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU())
        self.policy = torch.nn.Linear(32, self.action_distribution().inputs_size)
        self.value = torch.nn.Linear(32, 1)

    def _forward(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"action_dist_inputs": self.policy(self._features(batch))}  # [B, 2]

    def _forward_train(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        features = self._features(batch)  # [B, 32]
        return {
            "action_dist_inputs": self.policy(features),  # [B, 2]
            "values": self.value(features).squeeze(-1),  # [B]
        }

    def _features(self, batch: Mapping[str, Any]) -> torch.Tensor:
        seen = batch["observations"]
        parts = self.shared(seen["global"]), self.own(seen["local"])  # [B, 32] both
        features: torch.Tensor = self.join(torch.cat(parts, -1))  # [B, 32]
        return features


class SharedEncoder(MultiRLModule):
    """Modules that share one encoder."""

    def build(self, specs: Mapping[str, RLModuleSpec]) -> Mapping[str, RLModule]:
        encoder = torch.nn.Sequential(torch.nn.Linear(SIGNAL, 32), torch.nn.ReLU())
        return {module_id: TwoPaths(spec, encoder) for module_id, spec in specs.items()}


def make_modules() -> SharedEncoder:
    spec = RLModuleSpec(observation_space=OBSERVATIONS, action_space=ACTIONS)
    return SharedEncoder({"one": spec, "other": spec})


def make_module(module_id: str) -> RLModule:
    return make_modules()[module_id]


def main() -> None:
    shared = SharedParts(make_modules().shared_parts())
    learners = {}
    for module_id in make_modules():
        core = Impala(partial(make_module, module_id), ImpalaConfig(lr=3e-3, gamma=0.0))
        learners[module_id] = Learner(core, seed=0)
        shared.add(module_id, learners[module_id])
    policies, samplers = {}, {}
    for module_id, module in make_modules().items():
        strip_to_acting(module)
        policy = Actor(module, rows=32, steps=16, seed=0)
        env = SyncVectorEnv([partial(Signals, contrary=module_id == "other")] * 32)
        policies[module_id] = policy
        samplers[module_id] = Sampler(env, policy, steps=16, seed=0)
    for update in range(201):
        right = {}
        for module_id, sampler in samplers.items():
            policies[module_id].load(learners[module_id].get_weights())
            batch = sampler.sample((1, update)).batch
            right[module_id] = float(batch.rewards[batch.live].mean())
            learners[module_id].update_from_episodes([batch])
            shared.broadcast(module_id)
        if update % 50 == 0:
            print(f"update {update:3d}  " + "  ".join(f"{k} {v:.2f}" for k, v in right.items()))
    one, other = (np.asarray(x.get_weights()["shared.0.weight"]) for x in learners.values())
    print("one encoder:", np.array_equal(one, other))


if __name__ == "__main__":
    main()
