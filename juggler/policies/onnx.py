"""A policy as an ONNX model, for programs without Python or PyTorch.

The model acts for a batch of N environments, which may be any number, and does what
`Policy.act(explore=False)` does, connectors included. It keeps nothing between its calls: what the
policy remembers goes in and out.

Inputs, each with a leading dimension [N]:

- "observation", or "observation/key" for each part of a Dict or Tuple, in the dtypes of the
  policy's observation space; an action mask is the part "action_mask";
- where the policy remembers, "first" (bool): which rows begin an episode; and "state/…", of any
  content where one begins, else as the last call returned it;
- where it uses rewards, "reward" (float32): what came for the last action.

Outputs: "action", or "action/key" for each part, as the environment takes it; and
"next_state/…" for each "state/…".
"""

from __future__ import annotations

from pathlib import Path

from juggler.policies.policy import Policy
from juggler.runtime.connectors.acting_graph import ActingGraph, to_onnx


def export(policy: Policy, path: Path) -> Path:
    """Write a policy as an ONNX model.

    Args:
        policy: whose connectors take tensors, as all that ship do, and whose module torch can
            export.
        path: of the file.

    Raises:
        ValueError: a part of the policy cannot be exported, or a package is missing; says which.
    """
    graph = ActingGraph(
        policy.module,
        policy.env_to_module,
        policy.module_to_env,
        policy.observation_space,
        policy.action_space,
    )
    program = to_onnx(graph)
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=False)
    return path
