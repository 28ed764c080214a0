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
STATES: Final = "states"
SEGMENT_ROWS: Final = "segment_rows"
SEGMENT_STARTS: Final = "segment_starts"
SEGMENT_LENGTHS: Final = "segment_lengths"
SEGMENT_OFFSETS: Final = "segment_offsets"

# Those that go together: one entry for each truncated episode, and for each segment of one.
FINALS: Final = (FINAL_ROWS, FINAL_STEPS, FINAL_OBSERVATIONS)
SEGMENTS: Final = (SEGMENT_ROWS, SEGMENT_STARTS, SEGMENT_LENGTHS, SEGMENT_OFFSETS)

# Branches of "states": what is known at the start of each row, beside its first observation.
MODULE_STATE: Final = "module"  # of a recurrent module
CONNECTOR_STATES: Final = "connectors"  # by the connectors' names

# The key of an observation that says which actions are legal.
ACTION_MASK: Final = "action_mask"

# What a module returns beside actions.
ACTION_DIST_INPUTS: Final = "action_dist_inputs"
VALUES: Final = "values"
