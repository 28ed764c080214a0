"""How a deterministic policy explores, and what its critics see."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import torch
from gymnasium import spaces

from juggler.runtime.acting.acting_graph import ActingGraph, to_onnx
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.modules.acting_part import strip_to_acting
from juggler.runtime.modules.models import DeterministicActorCritic

VECTOR = spaces.Box(-10, 10, (4,), np.float32)
UNEVEN = spaces.Box(np.array([-1, 100], np.float32), np.array([3, 101], np.float32))
LOW, HIGH = torch.from_numpy(UNEVEN.low), torch.from_numpy(UNEVEN.high)
SMALL = {"hidden_sizes": [8]}


def greedy_of(module: DeterministicActorCritic, batch: dict[str, Any]) -> torch.Tensor:
    actions: torch.Tensor = module.action_distribution()(
        module.forward_inference(batch)["action_dist_inputs"]
    ).mode()
    return actions


def test_noise_is_of_the_size_asked_for_within_bounds_and_none_in_greedy_play() -> None:
    torch.manual_seed(0)
    module = DeterministicActorCritic(VECTOR, UNEVEN, SMALL)
    batch = {"observations": torch.randn(1, 4).expand(20_000, 4)}
    greedy = greedy_of(module, batch)
    assert (greedy == greedy[0]).all()
    torch.testing.assert_close(greedy[0], (LOW + HIGH) / 2, rtol=0.05, atol=0.1)
    for noise in (0.1, 1.0):
        module.exploration_noise.fill_(noise)
        outputs = module.forward_exploration(batch)
        spec = module.action_distribution()
        drawn = spec.draw_noise((20_000,), torch.Generator().manual_seed(1))
        actions = spec(outputs["action_dist_inputs"]).sample(drawn)
        assert ((actions >= LOW) & (actions <= HIGH)).all()
        shares = (actions - greedy) / ((HIGH - LOW) / 2)
        if noise == 0.1:
            torch.testing.assert_close(shares.std(0), torch.full((2,), 0.1), rtol=0.03, atol=0)
        else:  # all over the box, and at its bounds
            assert ((actions < LOW + 0.01 * (HIGH - LOW)).float().mean(0) > 0.1).all()
            assert ((actions > HIGH - 0.01 * (HIGH - LOW)).float().mean(0) > 0.1).all()
    module.exploration_noise.fill_(0.0)
    outputs = module.forward_exploration(batch)
    distribution = spec(outputs["action_dist_inputs"])
    torch.testing.assert_close(distribution.sample(drawn), greedy)
    assert distribution.log_prob(greedy).isfinite().all()


def test_a_model_for_simulators_draws_uniform_actions_too_until_learning_begins() -> None:
    module = DeterministicActorCritic(VECTOR, UNEVEN, SMALL)
    strip_to_acting(module)
    connectors = build_runner_pipelines(ConnectorsConfig.parse({}), VECTOR, UNEVEN, None)
    graph = ActingGraph(module.eval(), *connectors, VECTOR, UNEVEN, explores=True)
    model = to_onnx(graph, optimize=False).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model)
    generator = np.random.default_rng(0)
    given = {
        "observation": generator.uniform(-1, 1, (20_000, 4)).astype(np.float32),
        "uniform": generator.random((20_000, 2, 2), np.float32),
    }
    action, logp = session.run(["action", "action_logp"], given)
    for element in ((action - UNEVEN.low) / (UNEVEN.high - UNEVEN.low)).T:
        np.testing.assert_allclose(np.histogram(element, 10, (0, 1))[0] / 20_000, 0.1, rtol=0.07)
    np.testing.assert_allclose(logp, -np.log(UNEVEN.high - UNEVEN.low).sum(), rtol=1e-5)


def test_actions_of_different_bounds_are_the_same_to_the_values() -> None:
    torch.manual_seed(0)
    one = DeterministicActorCritic(VECTOR, spaces.Box(-4, 4, (2,), np.float32), SMALL)
    other = DeterministicActorCritic(VECTOR, spaces.Box(0, 1, (2,), np.float32), SMALL)
    other.load_state_dict(one.state_dict())
    seen, share = torch.randn(5, 4), torch.rand(5, 2)
    values = [
        module.forward_train({"observations": seen, "actions": low + width * share})["q_values"]
        for module, low, width in ((one, -4, 8), (other, 0, 1))
    ]
    torch.testing.assert_close(*values)
