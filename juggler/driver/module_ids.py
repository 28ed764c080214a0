"""Ids of modules: which there can be, and how errors name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from juggler.driver.driver_config import ConfigError
from juggler.envrunner.setup import RANDOM
from juggler.runtime.checkpoints.checkpoint import CONNECTORS, IMITATION, PIPELINES, REPLAY, RND
from juggler.runtime.nearest import closest, listed

_MODULE_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Ids that no module can have, and why.
RESERVED: Final = {
    **dict.fromkeys(
        (CONNECTORS, PIPELINES, REPLAY, RND, IMITATION),
        "checkpoints use this name for something else",
    ),
    RANDOM: "it is the module that draws every action at random",
}


def check_module_id(module_id: object, where: str) -> None:
    """
    Raises:
        ConfigError: no module can have this id.
    """
    if not isinstance(module_id, str) or not _MODULE_ID.fullmatch(module_id):
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id: use 1 to 64 letters, digits, _ and -"
        )
    if module_id in RESERVED:
        raise ConfigError(
            f"{where}: {module_id!r} cannot be a module's id, because {RESERVED[module_id]}: "
            "choose another"
        )


def instead(module_id: str, module_ids: Sequence[str]) -> str:
    """The end of an error about a module that there is not: which one was meant, and which there
    are."""
    near, known = closest(module_id, module_ids), listed(dict.fromkeys(module_ids))
    return f": did you mean {near!r}? There are {known}" if near else f"; there are {known}"
