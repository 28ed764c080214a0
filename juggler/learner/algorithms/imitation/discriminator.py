"""Adversarial imitation (GAIL, DAC).

Ho & Ermon 2016, "Generative Adversarial Imitation Learning"; absorbing states and replay from
Kostrikov et al. 2019, "Discriminator-Actor-Critic: Addressing Sample Inefficiency and Reward Bias
in Adversarial Imitation Learning".

A discriminator D(x, a) learns which steps were demonstrated. With its logits
l(x, a) = log D - log(1 - D), it minimizes the sum of three means

    - log D(x, a)                           over demonstrated steps
    - log(1 - D(x, a))                      over the policy's steps
    gradient_penalty (|∇ l(x, a)| - 1)²     over pairs of both, at a random point between them

The penalty is from Gulrajani et al. 2017. It keeps the logits smooth, so that they fall with the
distance from the demonstrations. Without it, D soon memorizes the demonstrations, and rejects even
a policy that acts the same. The policy learns from the reward

    r(x, a) = log D(x, a) - log(1 - D(x, a))

instead of the environment's. It is 0 where D = 1/2: an agent that acts like the demonstrations
gains nothing from longer or shorter episodes. log D alone would reward short episodes, and
-log(1 - D) long ones.

A terminated episode stays in an absorbing state forever. D sees that state too, so it recognizes
an end that was never demonstrated. A terminating step's reward includes the return of that state:

    r(x, a) + γ / (1 - γ) r(absorbing)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from juggler.learner.algorithms.off_policy import OffPolicyConfig
from juggler.learner.config import ImitationConfig
from juggler.learner.core.around_core import AroundState, OwnNetwork, Rewarded, RewardingCore
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.hashing import uniform
from juggler.learner.core.learner_core import Columns, Seam
from juggler.learner.core.mean_metrics import LiveMean
from juggler.learner.core.returns import terminated
from juggler.learner.core.state_trees import to_device
from juggler.learner.data.sources import alone
from juggler.runtime.checkpoints.checkpoint import IMITATION
from juggler.runtime.connectors.learning import no_moments, variance, with_live
from juggler.runtime.connectors.leaves import at, observed_leaves
from juggler.runtime.datasets.dataset import Dataset, DatasetError
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.modules.encoders import (
    NumberEncoder,
    OneHotEncoder,
    build_encoder,
    feature_size,
)
from juggler.runtime.modules.layers import initialized
from juggler.runtime.wire.structures import space_leaves, tree_map
from juggler.runtime.wire.trees import Path

Space = gymnasium.Space[Any]

_CLIP = 10.0  # of normalized numbers
_PIECE = 1 << 18  # numbers that are processed together
_DEVIATION_EPSILON = 1e-4  # added to standard deviations
_NORM_EPSILON = 1e-12  # added to squared norms, so that a norm of 0 has a gradient


class Logits(nn.Module):
    """Predicts logits of D, for steps and the absorbing state."""

    def __init__(self, space: Space, model: ModelConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(space, model)
        self.head = initialized(nn.Linear(feature_size(self.encoder), 1), model.initializer, 0.01)
        self.absorbing = nn.Parameter(torch.zeros(()))  # []

    def forward(self, steps: Any) -> Tensor:
        """Return logits [B] of steps [B, ...]; None: the absorbing state's []."""
        if steps is None:
            return self.absorbing
        logits: Tensor = self.head(self.encoder(steps)).squeeze(-1)  # [B]
        return logits


class Discriminator(RewardingCore):
    """Wraps a GradientCore to learn from discriminator rewards.

    Rewards are computed when a step is learned from, so replayed steps get current rewards.

    Args:
        inner: the algorithm.
        config: the keys of the table `imitation`.

    Raises:
        ValueError: the algorithm does not learn from rewards of single steps, or no demonstrations
            have this name.
    """

    kind = IMITATION
    own: ImitationConfig
    loss_names = ("discriminator_loss", "discriminator_loss", "gradient_penalty")

    def __init__(self, inner: GradientCore, config: ImitationConfig) -> None:
        instead = "give it the demonstrations as its dataset, and leave out imitation"
        super().__init__(inner, config, instead)
        if inner.config.gamma >= 1:
            raise ValueError(
                f"imitation with gamma = {inner.config.gamma}: an absorbing state has no return "
                "then; set gamma below 1"
            )
        observations, actions = inner.module.observation_space, inner.module.action_space
        self._demonstrations = DemonstratedSteps.read(config.demonstrations, observations, actions)
        self._shown = Shown(observations, actions, self._demonstrations)
        space, model = self._shown.space, ModelConfig.parse(config.model)
        self.network = OwnNetwork(f"{DEFAULT_MODULE} imitation", lambda: Logits(space, model))

    def passes(self) -> tuple[int, int]:
        config = self.inner.config
        if isinstance(config, OffPolicyConfig):  # a replay gives one minibatch at a time
            return 1, 1
        return max(1, config.batch_size // self.own.minibatch_size), 1

    def rewarded(self, state: AroundState, sample: Columns, seam: Seam) -> Rewarded:
        own, live, steps = state["own"], sample[c.LIVE], self._steps(sample)  # [N, T], [N T, ...]
        limit, gamma = self.own.limit, self.config.gamma
        with torch.no_grad():
            found = self.network.in_chunks(own, steps).view(live.shape)  # [N, T]
            absorbing = self.network(own, own["trained"], None).clamp(-limit, limit)  # []
            rewards = found.clamp(-limit, limit)  # [N, T]
            # The return of the absorbing state, which a terminated episode never leaves.
            forever = gamma / (1 - gamma) * absorbing  # []
            rewards = rewards + torch.where(terminated(sample), forever, 0.0)  # [N, T]
            rewards = torch.where(live, rewards, 0.0)  # [N, T]
        mean = LiveMean(live)
        metrics = {
            "imitation_reward": mean(rewards),
            "taken_for_demonstrated": mean((found > 0).float()),
        }
        ends = terminated(sample).flatten()  # [N T]
        losses = partial(self._losses, steps, live.flatten(), ends)
        return Rewarded(own, {**sample, c.REWARDS: rewards}, metrics, losses)

    def _steps(self, sample: Columns) -> Any:
        """Encode a sample's steps for the discriminator, [N T, ...]."""
        device = sample[c.LIVE].device
        if self._demonstrations.terminated.device != device:
            self._demonstrations = self._demonstrations.on(device)
            self._shown.to(device)
        observations, actions = (
            tree_map(lambda x: x.flatten(0, 1), sample[name])
            for name in (c.OBSERVATIONS, c.ACTIONS)
        )
        return self._shown(observations, actions)

    def _losses(
        self,
        steps: Any,
        live: Tensor,
        ends: Tensor,
        own: dict[str, Any],
        part: Tensor,
        key: Tensor,
        number: int,
        trained: Tensor,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the three losses on some steps: see `Losses`."""
        logits, demonstrations = partial(self.network, own, trained), self._demonstrations
        policy = tree_map(lambda x: x[part], steps)  # [B, ...]
        live, ends = live[part], ends[part]  # [B] both
        draws = uniform(key ^ (2 * number - 1), (len(part),))  # [B]
        drawn = demonstrations.drawn((draws * len(demonstrations.terminated)).long())
        demonstrated = self._shown(drawn.observations, drawn.actions)
        # Without a live step there is nothing to discriminate.
        some = live.any().expand(len(part))  # [B]
        losses = [
            _loss(logits, policy, live, ends, 1),
            _loss(logits, demonstrated, some, some & drawn.terminated, -1),
        ]
        weight = self.own.gradient_penalty
        if not weight:
            zero = trained.new_zeros(())  # []
            return [*losses, (zero, zero)]
        shares = uniform(key ^ (2 * number), (len(part),))  # [B]
        penalties = gradient_penalties(logits, policy, demonstrated, shares)  # [B]
        return [*losses, (weight * torch.where(live, penalties, 0.0).sum(), live.sum())]


def _loss(
    logits: Callable[[Any], Tensor], steps: Any, live: Tensor, ends: Tensor, sign: int
) -> tuple[Tensor, Tensor]:
    """Sum a loss over live steps and episode ends [B]; count both.

    With logits l: softplus(l) is -log(1 - D), and softplus(-l) is -log D.
    """
    costs, absorbing = softplus(sign * logits(steps)), softplus(sign * logits(None))  # [B], []
    total = torch.where(live, costs, 0.0).sum() + ends.sum() * absorbing  # []
    return total, live.sum() + ends.sum()


class DemonstratedSteps(NamedTuple):
    """M demonstrated steps."""

    observations: Any  # [M, ...]
    actions: Any  # [M, ...]
    terminated: Tensor  # [M] bool: the environment ended the episode with this step

    @classmethod
    def read(cls, name: str, observation_space: Space, action_space: Space) -> DemonstratedSteps:
        """Read all steps of a data set.

        Args:
            name: its directory, or its name in Minari.
            observation_space: the observation space of the module that imitates them.
            action_space: the action space of that module.

        Raises:
            DatasetError: the data set does not exist, is damaged, or has other spaces; or its
                observations or actions are not finite.
        """
        try:
            data = Dataset(name)
        except DatasetError as error:
            raise DatasetError(f"imitation.demonstrations = {name!r}: {error}") from error
        # The discriminator compares them with what the module sees and does.
        for what, own, other in (
            ("observations", data.observation_space, observation_space),
            ("actions", data.action_space, action_space),
        ):
            if own != other:
                raise DatasetError(
                    f"demonstrations {name!r} have {what} in {own}, and the module that is to "
                    f"imitate them has them in {other}: choose demonstrations of the same "
                    "environment, without connectors.env_to_module that change observations"
                )
        read = ("observations", "actions")
        episodes = [data.episode(index, finite=read) for index in range(len(data))]
        # Only an episode's last step can terminate it.
        terminated = np.zeros(sum(map(len, episodes)), np.bool_)  # [M]
        ends = np.cumsum([len(episode) for episode in episodes]) - 1  # [episodes]
        terminated[ends] = [episode.terminated for episode in episodes]
        return cls(
            # An episode's last observation led to no action.
            tree_map(_joined, *(tree_map(lambda x: x[:-1], e.observations) for e in episodes)),
            tree_map(_joined, *(each.actions for each in episodes)),
            torch.from_numpy(terminated),
        )

    def on(self, device: torch.device) -> DemonstratedSteps:
        return DemonstratedSteps(*(to_device(each, device) for each in self))

    def drawn(self, places: Tensor) -> DemonstratedSteps:
        """Select demonstrated steps by indices [B]."""
        return DemonstratedSteps(*(tree_map(lambda x: x[places], each) for each in self))


def _joined(*parts: Any) -> Tensor:
    """Concatenate arrays [L, ...] of several episodes -> [M, ...]."""
    return torch.from_numpy(np.concatenate(parts))


class Normalized(nn.Module):
    """Numbers of a Box, clipped and normalized by the demonstrations' statistics."""

    def __init__(self, box: spaces.Box, demonstrated: Tensor) -> None:
        """Take the statistics of demonstrated numbers [M, ...] of a Box."""
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.mean: Tensor
        self.deviation: Tensor
        for name, bound in (("low", box.low), ("high", box.high)):
            self.register_buffer(name, torch.as_tensor(bound).float())  # [...]
        moments = no_moments(box.shape)
        # In bounded memory: the clipped numbers of all demonstrations may be as large as they.
        for piece in torch.split(demonstrated, max(1, _PIECE // max(1, moments["mean"].numel()))):
            every = torch.ones(len(piece), dtype=torch.bool)
            moments = with_live(moments, self._clipped(piece), every, alone)
        deviation = variance(moments).sqrt() + _DEVIATION_EPSILON  # [...]
        self.register_buffer("mean", moments["mean"].float())  # [...]
        self.register_buffer("deviation", deviation.float())  # [...]

    def forward(self, x: Tensor) -> Tensor:
        return ((self._clipped(x) - self.mean) / self.deviation).clamp(-_CLIP, _CLIP)  # [B, ...]

    def _clipped(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x.float(), self.low), self.high)  # [B, ...]


class Shown(nn.Module):
    """Observations and actions as one tree of float32 numbers.

    Steps can be interpolated: Box numbers are normalized, choices one-hot. Action masks are
    omitted.
    """

    def __init__(
        self, observation_space: Space, action_space: Space, demonstrations: DemonstratedSteps
    ) -> None:
        super().__init__()
        self._places: list[tuple[int, Path]] = []  # 0: in observations, 1: in actions
        leaves: list[nn.Module] = []
        shapes: list[tuple[int, ...]] = []
        trees = (demonstrations.observations, demonstrations.actions)
        found = (observed_leaves(observation_space), dict(space_leaves(action_space)))
        # Numbers of a Box keep their shape, since they may be an image.
        for side, tree in enumerate(trees):
            for path, leaf in found[side].items():
                self._places.append((side, path))
                if isinstance(leaf, spaces.Box):
                    leaves.append(Normalized(leaf, at(tree, path)))
                    shapes.append(leaf.shape)
                    continue
                if isinstance(leaf, spaces.MultiBinary):
                    encoder: NumberEncoder | OneHotEncoder = NumberEncoder(leaf)
                else:
                    assert isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete))
                    encoder = OneHotEncoder(leaf)
                leaves.append(encoder)
                shapes.append((encoder.size,))
        # One flat Dict of Boxes, for which every encoder can be built.
        self.leaves = nn.ModuleList(leaves)
        self.space = spaces.Dict(
            {
                str(index): spaces.Box(-_CLIP, _CLIP, shape, np.float32)
                for index, shape in enumerate(shapes)
            }
        )

    def forward(self, observations: Any, actions: Any) -> dict[str, Tensor]:
        """Encode trees [B, ...] -> [B, ...] by the keys of `space`."""
        trees = observations, actions
        return {
            str(index): leaf(at(trees[side], path))
            for index, ((side, path), leaf) in enumerate(
                zip(self._places, self.leaves, strict=True)
            )
        }


def gradient_penalties(
    values_of: Callable[[dict[str, Tensor]], Tensor],
    some: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    shares: Tensor,
) -> Tensor:
    """Return penalties (|∇ f(x)| - 1)² at interpolated points x.

    Args:
        values_of: the function f, from rows [B, ...] to one value per row [B].
        some: rows [B, ...] by name.
        others: rows [B, ...] by the same names.
        shares: [B]; x = share * some + (1 - share) * others.

    Returns:
        [B], with a graph, so that it can be minimized.
    """
    between = {}
    for name, x in some.items():
        share = shares.view(-1, *[1] * (x.ndim - 1))  # [B, 1...]
        between[name] = torch.lerp(others[name], x, share).requires_grad_()  # [B, ...]
    total = values_of(between).sum()  # []
    gradients = torch.autograd.grad(
        total, list(between.values()), create_graph=True, materialize_grads=True
    )  # [B, ...] each; 0 for inputs that f ignores
    squares = torch.stack([x.flatten(1).square().sum(1) for x in gradients]).sum(0)  # [B]
    return ((squares + _NORM_EPSILON).sqrt() - 1).square()  # [B]
