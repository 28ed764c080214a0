"""Names of columns, in batches of episodes and in what modules take and return."""

from __future__ import annotations

from typing import Final

# What an envrunner samples; named as in `EpisodeBatch`.
OBSERVATIONS: Final = "observations"
ACTIONS: Final = "actions"
REWARDS: Final = "rewards"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
LIVE: Final = "live"
ACTION_LOGP: Final = "action_logp"
LAST_OBSERVATIONS: Final = "last_observations"
FINAL_OBSERVATIONS: Final = "final_observations"
FINAL_ROWS: Final = "final_rows"
FINAL_STEPS: Final = "final_steps"

# What a module returns beside actions.
ACTION_DIST_INPUTS: Final = "action_dist_inputs"
VALUES: Final = "values"
