"""A network that a core around another one trains for itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from juggler.learner.core.learner_core import ALONE
from juggler.learner.core.own_network import OwnNetwork


class Tied(nn.Module):
    """Two layers with the same weights, as an encoder of one's own may have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum(1)


def test_parameters_that_a_network_has_twice_are_one() -> None:
    network, x = OwnNetwork("tied", Tied), torch.randn(5, 3)
    own = network.beginning(0)
    assert own["trained"].shape == (9 + 3 + 3,)
    weights, *biases = own["trained"].split([9, 3, 3])
    weights = weights.view(3, 3)
    expected = ((x @ weights.T + biases[0]) @ weights.T + biases[1]).sum(1)
    torch.testing.assert_close(network(own, own["trained"], x), expected)
    loss = network.loss_sum(own, lambda trained: network(own, trained, x).sum(), torch.tensor(5))
    after, _ = network.stepped(own, [loss], 1e-3, ALONE)
    assert not torch.equal(after["trained"], own["trained"])
