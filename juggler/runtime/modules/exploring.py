"""How much a module explores: one number that its learner sets, or one for each row it acts for."""

from __future__ import annotations

from juggler.runtime.modules.deterministic_actor_critic import EXPLORATION_NOISE
from juggler.runtime.modules.q_network import EPSILON
from juggler.runtime.modules.rl_module import RLModule


def exploration_of(module: RLModule) -> str:
    """The buffer with the number that says how much a module explores.

    Raises:
        ValueError: it has none.
    """
    buffers = dict(module.named_buffers())
    for name in (EPSILON, EXPLORATION_NOISE):
        if name in buffers:
            return name
    raise ValueError(
        f"exploration_ladder: {type(module).__name__} has no buffer {EPSILON!r} or "
        f"{EXPLORATION_NOISE!r} that says how much it explores; set it to 0"
    )


def with_own_exploration(module: RLModule, rows: int) -> None:
    """Let each of B rows that a module acts for explore as much as a number of its own says."""
    # A module with a state has a dimension of time in all that it returns.
    shape = (rows, 1, 1) if module.get_initial_state() else (rows, 1)
    name = exploration_of(module)
    said = module.get_buffer(name)  # []
    module.register_buffer(name, said.expand(shape).clone())  # [B, 1] or [B, 1, 1]
