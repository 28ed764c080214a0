"""What no algorithm can do without, of a policy that acts for it."""

from __future__ import annotations

from juggler.runtime.modules.columns import ACTION_DIST_INPUTS, ACTIONS
from juggler.runtime.modules.rl_module import RLModule


def require_log_probabilities(module: RLModule, known: bool) -> None:
    """
    Args:
        module: acts.
        known: whether it says of what distribution its actions are.

    Raises:
        ValueError: it does not, and a learner would take every action for a certain one.
    """
    if not known:
        raise ValueError(
            f"{type(module).__name__} returns {ACTIONS!r} without {ACTION_DIST_INPUTS!r} where it "
            "explores: how far the policy has moved since then is known from the log-probabilities "
            f"of its actions alone. Return {ACTION_DIST_INPUTS!r} beside them, or these alone, and "
            "actions are drawn"
        )
