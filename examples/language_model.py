"""A module that is a language model: a small causal transformer.

    python examples/language_model.py

It sees a word of three letters and has to write the same word after it, letter by letter. Each
right letter has a reward of 1. Guessing has a return of 0.75; after a few seconds of training the
return is 2.9. In this directory, the command line finds both classes by name:
juggler train --env language_model:Repeat --module language_model:LanguageModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

import juggler

LETTERS = 4
WORD = 3
END = LETTERS  # the token at the end of the word, and in places not written yet
PAGE = 2 * WORD + 1


class Repeat(gymnasium.Env[NDArray[np.int64], np.int64]):
    """A page of letters: a word, then the letters written so far."""

    observation_space = gymnasium.spaces.MultiDiscrete([LETTERS + 1] * PAGE)
    action_space = gymnasium.spaces.Discrete(LETTERS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        super().reset(seed=seed)
        self.page = np.full(PAGE, END)  # [L]
        self.page[:WORD] = self.np_random.integers(LETTERS, size=WORD)
        self.written = 0
        return self.page.copy(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, dict[str, Any]]:
        right = action == self.page[self.written]
        self.page[WORD + 1 + self.written] = action  # after the word and its end
        self.written += 1
        return self.page.copy(), float(right), self.written == WORD, False, {}


class LanguageModel(juggler.RLModule):
    """A causal transformer whose last prediction is the policy.

    Vaswani et al. 2017, "Attention Is All You Need", with the normalization before each block.
    """

    training_only = ("value",)

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        super().__init__(observation_space, action_space, model_config)
        assert isinstance(observation_space, gymnasium.spaces.MultiDiscrete)
        assert isinstance(action_space, gymnasium.spaces.Discrete)
        width = model_config.get("width", 32)
        tokens, length = int(observation_space.nvec.max()), len(observation_space.nvec)
        self.token = torch.nn.Embedding(tokens, width)
        self.place = torch.nn.Parameter(torch.randn(length, width))  # [L, H]
        self.blocks = torch.nn.ModuleList(
            Block(width, model_config.get("heads", 2)) for _ in range(model_config.get("blocks", 2))
        )
        self.normalize = torch.nn.LayerNorm(width)
        self.next_token = torch.nn.Linear(width, int(action_space.n))
        self.value = torch.nn.Linear(width, 1)

    def _forward(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {"action_dist_inputs": self.next_token(self._read(batch))}  # [B, letters]

    def _forward_train(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        features = self._read(batch)  # [B, H]
        return {
            "action_dist_inputs": self.next_token(features),  # [B, letters]
            "values": self.value(features).squeeze(-1),  # [B]
        }

    def _read(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The features at the last written token [B, H]."""
        text = batch["observations"]  # [B, L]
        x = self.token(text) + self.place  # [B, L, H]
        for block in self.blocks:
            x = block(x)  # [B, L, H]
        written = (text[:, WORD + 1 :] != END).sum(-1)  # [B]
        rows = torch.arange(len(text), device=text.device)  # [B]
        features: torch.Tensor = self.normalize(x[rows, WORD + written])  # [B, H]
        return features


class Block(torch.nn.Module):
    """A transformer block: causal self-attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.look = torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        )
        self.joined = torch.nn.Linear(width, width)
        self.think = torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.look(x).unflatten(-1, (3, self.heads, -1))  # [B, L, 3, heads, H / heads]
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # [B, heads, L, H / heads] each
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # as q
        x = x + self.joined(seen.transpose(1, 2).flatten(2))  # [B, L, H]
        thought: torch.Tensor = self.think(x)  # [B, L, H]
        return x + thought  # [B, L, H]


if __name__ == "__main__":
    result = juggler.train(
        env=Repeat,
        module=LanguageModel,
        num_env_runners=1,
        envs_per_runner=64,
        fragment_steps=12,
        batch_size=700,
        lr=1e-3,
        grad_clip=1.0,
        gamma=0.5,  # each letter is rewarded at once
        stop_return=2.9,
        stop_seconds=300,
    )
    assert result.checkpoint is not None
    played = juggler.evaluate(result.checkpoint, env=Repeat, module=LanguageModel)
    print(f"{len(played.returns)} episodes: return {played.mean:.1f} ± {played.deviation:.1f}")
