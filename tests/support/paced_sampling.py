"""Samplers for several agents with small policies, and what their batches say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from juggler.envrunner.multi_agent.casting import cast
from juggler.envrunner.multi_agent.line_up import LineUps
from juggler.envrunner.multi_agent.module_slots import ModuleSlots
from juggler.envrunner.multi_agent.sampler import MultiAgentSampler
from juggler.envrunner.multi_agent.turns import MultiAgentEnvs
from juggler.envrunner.rounds import Recorded
from juggler.envrunner.setup import may_play
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule


class Remembering(RLModule):
    """Its state is a decaying sum of the observations so far, which its outputs depend on."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.register_buffer("unused", torch.zeros(1))

    def get_initial_state(self) -> Any:
        return {"sum": torch.full((3,), 0.5)}

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"][..., :3]  # [B, T, 3]
        total, sums = batch["states"]["sum"], []
        for t in range(seen.shape[1]):
            total = 0.5 * total + seen[:, t]  # [B, 3]
            sums.append(total)
        outputs = torch.stack(sums, 1)  # [B, T, 3]
        return {"action_dist_inputs": torch.sin(outputs), "states": {"sum": total}}


class Forgetful(RLModule):
    """Its outputs depend on the observation alone."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        self.register_buffer("unused", torch.zeros(1))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]  # [B, ...], or a Dict with a mask
        seen = seen["observation"] if isinstance(seen, dict) else seen
        return {"action_dist_inputs": torch.sin(seen[..., :3])}


class Scaled(RLModule):
    """Has one weight, `scale`, and deterministically chooses the action of that number."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any = None) -> None:
        super().__init__(observation_space, action_space, model_config or {})
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]  # [B, ...]
        chosen = (self.scale.round().long() % 3).expand(len(seen))  # [B]
        return {"action_dist_inputs": 20.0 * torch.nn.functional.one_hot(chosen, 3).float()}


class Halves(Scaled):
    """Chooses each of two actions half of the time."""

    def _forward(self, batch: Any) -> Any:
        return {"action_dist_inputs": torch.zeros(len(batch["observations"]), 2)}


def sampler_of(
    envs: MultiAgentEnvs,
    played_by: Mapping[str, str | Sequence[str]],
    steps: int,
    row_age: int = 1000,
    module: type[RLModule] = Forgetful,
    connectors: dict[str, Any] | None = None,
    seed: int = 3,
    line_ups: LineUps | None = None,
    critic_sees: str = "observation",
) -> MultiAgentSampler:
    ids = list(dict.fromkeys(each for said in played_by.values() for each in may_play(said)))
    modules = {}
    for module_id, role in cast(envs, played_by, ids).items():
        spaces = role.spaces
        env_to_module, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(connectors or {}), spaces.observation_space, spaces.action_space
        )
        built = module(env_to_module.module_observation_space, module_to_env.action_space)
        policy = Actor(built, 1, 0, 0, module_to_env, env_to_module)
        modules[module_id] = ModuleSlots(
            role,
            envs.num_envs,
            envs.agents,
            policy,
            env_to_module,
            steps,
            row_age,
            critic_sees,
            envs.critic_spaces.get(critic_sees),
        )
    return MultiAgentSampler(envs, modules, steps, seed, line_ups)


class Collected:
    """What came of many rounds, by module."""

    def __init__(self, sampler: MultiAgentSampler) -> None:
        self.sampler = sampler
        self.batches: dict[str, list[EpisodeBatch]] = defaultdict(list)
        self.ended: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.env_ended: list[tuple[float, int]] = []
        self.stale: dict[str, int] = defaultdict(int)

    def play(self, *recorded: str, update: int = 0) -> dict[str, Recorded]:
        versions = {module_id: Version(1, update) for module_id in self.sampler._modules}
        played = self.sampler.sample(set(recorded), versions)
        assert set(played.modules) == set(recorded)
        for module_id, result in played.modules.items():
            assert isinstance(result, Recorded), result
            if result.batch is not None:
                EpisodeBatch.from_tree(result.batch.to_tree())  # as the learner checks it
                self.batches[module_id].append(result.batch)
            self.ended[module_id] += zip(
                result.episode_returns, result.episode_lengths, strict=True
            )
            self.stale[module_id] += result.stale_steps
        self.env_ended += zip(played.env_returns, played.env_lengths, strict=True)
        return dict(played.modules)  # type: ignore[arg-type]


def by_slot(batches: list[EpisodeBatch]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """Every live step by (slot, the agent's episode), in the order of the batches and their rows:
    step, action, reward, terminated, truncated, the observation after it."""
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
    for batch in batches:
        for row in sorted(batch.episodes(), key=lambda each: each.offset):
            observations: Any = row.observations
            for t in range(len(row)):
                last = t == len(row) - 1
                slot, episode, step = observations[t][:3].astype(int).tolist()
                assert step == row.offset + t
                after = row.last_observation if last else observations[t + 1]
                found[slot, episode].append(
                    (
                        step,
                        int(np.asarray(row.actions)[t]),
                        float(row.rewards[t]),
                        row.terminated and last,
                        row.truncated and last,
                        np.asarray(after),
                    )
                )
    return found
