"""Adversarial imitation: Ho & Ermon 2016, "Generative Adversarial Imitation Learning"; with
absorbing states and with a replay, Kostrikov et al. 2019, "Discriminator-Actor-Critic: Addressing
Sample Inefficiency and Reward Bias in Adversarial Imitation Learning".

A discriminator D(x, a) learns which steps were demonstrated. With its logits
l(x, a) = log D - log(1 - D), it minimizes the sum of three means

    - log D(x, a)                           over demonstrated steps
    - log(1 - D(x, a))                      over those of the policy
    gradient_penalty (|∇ l(x, a)| - 1)²     over pairs of both, at a random place between the two

The penalty is that of Gulrajani et al. 2017. It keeps the logits smooth, so that they fall with the
distance from what was demonstrated. Without it, D soon knows the demonstrations by heart, and tells
a policy from them that does the same. The policy learns from the reward

    r(x, a) = log D(x, a) - log(1 - D(x, a))

in place of the environment's. It is 0 where D = 1/2: who cannot be told from the demonstrations
gains nothing by living longer, nor by ending sooner. log D alone would pay for dying, and
-log(1 - D) for living.

An episode that terminates goes to an absorbing state, and stays there for ever. D sees that state
too, so that an end that was never demonstrated is told by it. The reward of a step that terminates
has the return of the absorbing state in it:

    r(x, a) + γ / (1 - γ) r(absorbing)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from juggler.learner.algorithms.given_rewards import must_take_rewards
from juggler.learner.algorithms.imitation.demonstrations import Demonstrations
from juggler.learner.algorithms.imitation.gradient_penalty import gradient_penalties
from juggler.learner.algorithms.imitation.shown import Shown
from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.around_config import ImitationConfig
from juggler.learner.core.around_core import AroundCore, AroundState
from juggler.learner.core.gradient_core import GradientCore
from juggler.learner.core.hashing import mixed, uniform
from juggler.learner.core.learner_core import Columns, Metrics, Seam
from juggler.learner.core.live_mean import LiveMean
from juggler.learner.core.own_network import LossSum, OwnNetwork
from juggler.learner.core.transitions import terminated
from juggler.learner.data.sources import DataSource, Sums, alone
from juggler.runtime.checkpoints.checkpoint import IMITATION
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.modules import columns as c
from juggler.runtime.modules.encoders import build_encoder, feature_size
from juggler.runtime.modules.layers import initialized
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.wire.structures import tree_map

Space = gymnasium.Space[Any]

#: A column [] int64: the rank of the learner whose source gave the sample; 0 before it has one.
RANK: Final = "learner_rank"


class Logits(nn.Module):
    """log D / (1 - D) of steps, and of the absorbing state."""

    def __init__(self, space: Space, model: ModelConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(space, model)
        self.head = initialized(nn.Linear(feature_size(self.encoder), 1), model.initializer, 0.01)
        self.absorbing = nn.Parameter(torch.zeros(()))  # []

    def forward(self, steps: Any) -> Tensor:
        """Shown steps [B, ...] -> [B]; None, for the absorbing state -> []."""
        if steps is None:
            return self.absorbing
        logits: Tensor = self.head(self.encoder(steps)).squeeze(-1)  # [B]
        return logits


class Ranked:
    """Gives what another data source gives, with a column `RANK`.

    Learners of a group have one state, so a core that draws by it draws the same at all of them.
    With this column it can draw apart.
    """

    def __init__(self, source: DataSource) -> None:
        self._source, self._rank = source, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def add(self, sample: Columns, sums: Sums = alone) -> Iterator[Columns]:
        for due in self._source.add(sample, sums):
            yield {**due, RANK: torch.tensor(self._rank, device=due[c.LIVE].device)}

    def draw_apart(self, rank: int) -> None:
        self._rank = rank
        self._source.draw_apart(rank)


class Discriminator(AroundCore):
    """Has a GradientCore learn from what a discriminator makes of each step, in place of rewards.

    The rewards are worked out whenever a step is learned from, so that those of a replay are by the
    discriminator of that moment.
    """

    kind = IMITATION

    def __init__(self, inner: GradientCore, config: ImitationConfig) -> None:
        """Args:
            inner: the algorithm.
            config: the keys of the table `imitation`.

        Raises:
            ValueError: the algorithm does not learn from rewards of single steps; or there are no
                such demonstrations.
        """
        instead = "give it the demonstrations as its dataset, and leave out imitation"
        must_take_rewards(inner, "imitation", instead)
        if inner.config.gamma >= 1:
            raise ValueError(
                f"imitation with gamma = {inner.config.gamma}: an absorbing state has no return "
                "then; set gamma below 1"
            )
        super().__init__(inner)
        self.inner: GradientCore = inner
        self.own = config
        config.validate()
        observations, actions = inner.module.observation_space, inner.module.action_space
        self._demonstrations = Demonstrations.read(config.demonstrations, observations, actions)
        self._shown = Shown(observations, actions, self._demonstrations)
        space, model = self._shown.space, ModelConfig.parse(config.model)
        self.network = OwnNetwork(f"{DEFAULT_MODULE} imitation", lambda: Logits(space, model))
        # The same at all learners of a group: a replay gives one minibatch at a time.
        keeps = isinstance(inner.config, OffPolicyConfig)
        self._minibatches = 1 if keeps else max(1, inner.config.batch_size // config.minibatch_size)

    def data_source(self, seed: int = 0) -> DataSource:
        return cast(DataSource, Ranked(super().data_source(seed)))

    def own_state(self, seed: int) -> dict[str, Any]:
        return self.network.beginning(seed)

    def shown(self, state: AroundState, sample: Columns) -> Columns:
        return self._rewarded(state["own"], sample)[0]

    def learned(
        self, state: AroundState, sample: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Columns, Metrics]:
        rewarded, metrics = self._rewarded(state["own"], sample)
        own, losses = self._trained(state["own"], sample, seam)
        policy_loss, demonstration_loss, penalty = losses.unbind()  # [] each
        metrics["discriminator_loss"] = policy_loss + demonstration_loss
        metrics["gradient_penalty"] = penalty
        return own, rewarded, metrics

    @torch.no_grad()
    def _rewarded(self, own: dict[str, Any], columns: Columns) -> tuple[Columns, Metrics]:
        """The columns with the discriminator's rewards, and metrics."""
        live, network = columns[c.LIVE], self.network  # [N, T]
        self._keep_on(live.device)
        limit, gamma = self.own.limit, self.config.gamma
        found = network.in_chunks(own, self._steps(columns))  # [N T]
        absorbing = network(own, own["trained"], None)  # []
        rewards = found.clamp(-limit, limit).view(live.shape)  # [N, T]
        forever = gamma / (1 - gamma) * absorbing.clamp(-limit, limit)  # []
        rewards = rewards + torch.where(terminated(columns), forever, 0.0)  # [N, T]
        rewards = torch.where(live, rewards, 0.0)  # [N, T]
        mean = LiveMean(live)
        metrics = {
            "imitation_reward": mean(rewards),
            "taken_for_demonstrated": mean((found > 0).float().view(live.shape)),
        }
        rest = {name: column for name, column in columns.items() if name != RANK}
        return {**rest, c.REWARDS: rewards}, metrics

    def _keep_on(self, device: torch.device) -> None:
        """Keep the demonstrations on this device."""
        if self._demonstrations.terminated.device != device:
            self._demonstrations = self._demonstrations.on(device)
            self._shown.to(device)

    def _steps(self, columns: Columns) -> Any:
        """What the discriminator sees of a sample: trees [N T, ...]."""
        observations, actions = (
            tree_map(lambda x: x.flatten(0, 1), columns[name])
            for name in (c.OBSERVATIONS, c.ACTIONS)
        )
        return self._shown(observations, actions)

    def _trained(
        self, own: dict[str, Any], columns: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Tensor]:
        """The state after some steps of the optimizer, and the means of its losses [3]. Each
        learner draws demonstrations of its own."""
        network, demonstrations, each = self.network, self._demonstrations, []
        live, ends = columns[c.LIVE].flatten(), terminated(columns).flatten()  # [N T] both
        steps = self._steps(columns)
        apart = mixed(columns[RANK]) if RANK in columns else 0  # [], and 0 for rank 0
        key = mixed(own["key"]) ^ apart  # []
        order = uniform(key, (live.numel(),)).argsort()  # [N T]
        parts = order.tensor_split(self._minibatches)  # [B] each
        for number, part in enumerate(parts, start=1):
            losses = [network.nothing(own)] * 3
            if part.numel():
                policy = tree_map(lambda x, part=part: x[part], steps)  # [B, ...]
                some_key, other_key = key ^ (2 * number - 1), key ^ (2 * number)  # [] both
                draws = uniform(some_key, (len(part),))  # [B]
                drawn = demonstrations.drawn((draws * len(demonstrations.terminated)).long())
                demonstrated = self._shown(drawn.observations, drawn.actions)
                # Without a live step there is nothing to be told from.
                some = live[part].any().expand(len(part))  # [B]
                losses = [
                    _loss(network, own, policy, live[part], ends[part], softplus),
                    _loss(network, own, demonstrated, some, some & drawn.terminated, _negative),
                    self._penalty(network, own, other_key, policy, demonstrated, live[part]),
                ]
            own, means = network.stepped(own, losses, self.own.lr, seam)
            each.append(means)  # [3]
        return own, torch.stack(each).mean(0)

    def _penalty(
        self,
        network: OwnNetwork,
        own: dict[str, Any],
        key: Tensor,
        policy: Any,
        demonstrated: Any,
        live: Tensor,
    ) -> LossSum:
        """The gradient penalty between live [B] steps of the policy and demonstrated ones."""
        if not self.own.gradient_penalty:
            return network.nothing(own)
        shares = uniform(key, (len(live),))  # [B]

        def total(trained: Tensor) -> Tensor:
            def logits(steps: Any) -> Tensor:
                return network(own, trained, steps)  # [B]

            penalties = gradient_penalties(logits, policy, demonstrated, shares)  # [B]
            return self.own.gradient_penalty * torch.where(live, penalties, 0.0).sum()  # []

        return network.loss_sum(own, total, live.sum())


def _negative(logits: Tensor) -> Tensor:
    """-log D, of logits [...]; softplus is -log(1 - D)."""
    return softplus(-logits)


def _loss(
    network: OwnNetwork,
    own: dict[str, Any],
    steps: Any,
    live: Tensor,
    ends: Tensor,
    cost: Callable[[Tensor], Tensor],
) -> LossSum:
    """A loss over live steps [B], and over the absorbing state once for each end [B]."""

    def total(trained: Tensor) -> Tensor:
        costs = cost(network(own, trained, steps))  # [B]
        absorbing = cost(network(own, trained, None))  # []
        return torch.where(live, costs, 0.0).sum() + ends.sum() * absorbing  # []

    return network.loss_sum(own, total, live.sum() + ends.sum())
