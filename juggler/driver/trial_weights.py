"""Whether a resumed run can go on with the weights that it has, before its workers start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from google.protobuf.json_format import ParseDict

from juggler.driver.agents_found import FoundGroup
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.preflight import GoesOn, Layout
from juggler.driver.trial_updates import Built
from juggler.envrunner.multi_agent.turns import AgentGroup
from juggler.learner.core.state import StateMismatch
from juggler.learner.learner import Learner
from juggler.learner.process.hosted_module import REMEDY
from juggler.runtime.wire.spaces import space_from_message
from juggler.runtime.wire.trees import Path, unflatten
from juggler.runtime.wire.v1 import spaces_pb2

#: Agents of simulators, whose spaces are those of the checkpoint.
_UNKNOWN = FoundGroup((), None, None)


def must_go_on(
    config: RunConfig, built: Mapping[str, Built], groups: Sequence[FoundGroup], before: GoesOn
) -> None:
    """
    Args:
        config: of the run.
        built: its modules with their learners, which stay as they are.
        groups: the agents of the environment; (): nobody here knows them.
        before: what the run goes on from.

    Raises:
        ConfigError: the weights of a module are of another network, of other spaces, or of another
            algorithm, such as one without an intrinsic reward; or its optimizer or its learner
            connectors were others.
    """
    for module_id, each in built.items():
        agents = {agent for agent, ids in config.played_by.items() if module_id in ids}
        groups_of_it = (each for each in groups if not agents or agents & {*each.agents})
        group = next(groups_of_it, _UNKNOWN)
        which = f"module {module_id!r}: " if agents else ""
        if why := _misfit(each, module_id, group, before):
            raise ConfigError(
                f"{which}the run cannot go on from {before.checkpoint}: {why}. {REMEDY}"
            )


def groups_before(config: RunConfig, before: GoesOn) -> dict[str, AgentGroup]:
    """By id of a module, the spaces that its agents had when the run was saved. Modules of which
    the checkpoint has none are missing."""
    found = {}
    for module_id in config.module_ids:
        spaces = before.spaces.get(module_id, {})
        if {*spaces} >= {"observation", "action"}:
            both = (
                space_from_message(ParseDict(spaces[side], spaces_pb2.Space()))
                for side in ("observation", "action")
            )
            found[module_id] = AgentGroup((), *both)
    return found


def _misfit(built: Built, module_id: str, group: FoundGroup, before: GoesOn) -> str:
    """Why a module cannot go on with its weights; "": it can, or nobody knows before."""
    layouts, learner = before.layouts.get(module_id), built.learner
    was, now = before.algorithms.get(module_id), learner.core.name
    if was and was != now:
        return f"its state is of {was!r}, and with what is given it would be of {now!r}"
    if layouts is None:
        return ""  # the module came later, or its core has no parameters by name
    weights = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layouts.items()}
    try:
        learner.core.with_weights(learner.state, weights, 0, whole=True)
    except StateMismatch as error:
        if other := group.other_space(before.spaces[module_id]):
            side, was, here = other
            return f"the {side} space of its environment was {was}, and now it is {here}"
        return str(error)
    except ValueError:
        return ""  # a core of somebody's own that takes over no weights, and restores its state
    return _unfit_state(learner, before.states[module_id])


def _unfit_state(learner: Learner, layouts: Mapping[Path, Layout]) -> str:
    """Why a learner cannot go on with its state, whose weights fit; "": it can."""
    state = unflatten((path, np.zeros(*layout)) for path, layout in layouts.items())
    try:
        learner.must_fit(state)
    except StateMismatch as error:
        what = "its optimizer was another" if "moments/" in error.what else "its state differs"
        return f"{what}: {error.what}" if error.what else str(error)
    except Exception:  # a core of somebody's own may read the numbers, which are not there yet
        return ""
    return ""
