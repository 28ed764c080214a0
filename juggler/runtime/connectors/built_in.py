"""The connectors that ship, by name. No torch here, so that the driver can check a configuration.

The table names their classes, which are imported where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Place = Literal["env_to_module", "module_to_env", "learner"]
PLACES: Final[tuple[Place, ...]] = get_args(Place)

_HERE = "juggler.runtime.connectors"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A connector that ships.

    Attributes:
        place: the pipeline it belongs to.
        path: package.module:Class.
        options: names of its options.
        runner_half: the connector that a learner's piece needs in the EnvRunners; it gets the
            options that both have, and is added without being asked for.
    """

    place: Place
    path: str
    options: tuple[str, ...] = field(default=())
    runner_half: str = ""


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "flatten": BuiltIn("env_to_module", f"{_HERE}.encoding:Flatten"),
    "one_hot": BuiltIn("env_to_module", f"{_HERE}.encoding:OneHot"),
    "mean_std_filter": BuiltIn(
        "env_to_module", f"{_HERE}.mean_std_filter:MeanStdFilter", ("clip", "epsilon")
    ),
    "frame_stack": BuiltIn("env_to_module", f"{_HERE}.frame_stack:FrameStack", ("k",)),
    "previous_actions_and_rewards": BuiltIn(
        "env_to_module", f"{_HERE}.previous_actions:PreviousActionsAndRewards"
    ),
    "discounted_returns": BuiltIn(
        "env_to_module", f"{_HERE}.rewards:DiscountedReturns", ("gamma",)
    ),
    "clip_actions": BuiltIn("module_to_env", f"{_HERE}.actions:ClipActions"),
    "rescale_actions": BuiltIn("module_to_env", f"{_HERE}.actions:RescaleActions"),
    "clip_rewards": BuiltIn("learner", f"{_HERE}.rewards:ClipRewards", ("limit",)),
    "scale_rewards": BuiltIn("learner", f"{_HERE}.rewards:ScaleRewards", ("factor",)),
    "normalize_rewards": BuiltIn(
        "learner",
        f"{_HERE}.rewards:NormalizeRewards",
        ("gamma", "limit", "epsilon"),
        runner_half="discounted_returns",
    ),
    "next_observations": BuiltIn("learner", f"{_HERE}.steps:NextObservations"),
    "returns_to_go": BuiltIn("learner", f"{_HERE}.steps:ReturnsToGo", ("gamma",)),
}

#: The default pieces of each pipeline.
DEFAULTS: Final[dict[Place, tuple[str, ...]]] = {
    "env_to_module": (),
    "module_to_env": ("clip_actions",),
    "learner": (),
}
