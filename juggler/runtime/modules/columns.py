"""Column names in batches, and in modules' inputs and outputs.

No torch here.
"""

from __future__ import annotations

from typing import Any, Final

from gymnasium import Space, spaces

from juggler.runtime.wire.errors import UnsupportedSpace

# Columns that an EnvRunner samples, with the names of `EpisodeBatch`.
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
CRITIC_OBSERVATIONS: Final = "critic_observations"
LAST_CRITIC_OBSERVATIONS: Final = "last_critic_observations"
FINAL_CRITIC_OBSERVATIONS: Final = "final_critic_observations"
SEGMENT_ROWS: Final = "segment_rows"
SEGMENT_STARTS: Final = "segment_starts"
SEGMENT_LENGTHS: Final = "segment_lengths"
SEGMENT_OFFSETS: Final = "segment_offsets"

# Columns with one entry for each truncated episode, and for each segment of an episode.
FINALS: Final = (FINAL_ROWS, FINAL_STEPS, FINAL_OBSERVATIONS, FINAL_CRITIC_OBSERVATIONS)
SEGMENTS: Final = (SEGMENT_ROWS, SEGMENT_STARTS, SEGMENT_LENGTHS, SEGMENT_OFFSETS)

# Observations before each step, after each row, and at the end of each truncated episode: of the
# policy, and of a value function with more inputs. The latter, and the last of `FINALS`, exist
# only for modules with that value function.
OBSERVED: Final = (OBSERVATIONS, LAST_OBSERVATIONS, FINAL_OBSERVATIONS)
OBSERVED_BY_CRITIC: Final = (
    CRITIC_OBSERVATIONS,
    LAST_CRITIC_OBSERVATIONS,
    FINAL_CRITIC_OBSERVATIONS,
)

# Keys of "states": memory at the start of each row.
MODULE_STATE: Final = "module"  # of a recurrent module
CONNECTOR_STATES: Final = "connectors"  # by the connectors' names

# The key of an observation with its action mask.
ACTION_MASK: Final = "action_mask"

# Outputs of a module other than actions.
ACTION_DIST_INPUTS: Final = "action_dist_inputs"
VALUES: Final = "values"


def without_mask(space: Space[Any]) -> Space[Any]:
    """Return the space, without "action_mask" if it has one."""
    if not isinstance(space, spaces.Dict) or ACTION_MASK not in space.spaces:
        return space
    rest = {key: each for key, each in space.spaces.items() if key != ACTION_MASK}
    if not rest:
        raise UnsupportedSpace(f"{space} has only an action mask: nothing to decide by")
    return spaces.Dict(rest)
