"""Numbers that callbacks have put in the place of schedules while a run trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from juggler.driver.config import RunConfig
from juggler.driver.league_players import trained_now
from juggler.learner.config import LearnerConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.nearest import nearest

#: In the counters of a checkpoint.
VALUES: Final = "values"
_ALL: Final = ""  # modules


class ChangedValues:
    """Every update tells its learners which numbers are in force, so that all learners of a group
    change at the same update.

    Args:
        config: of the run.
        resume: the checkpoint that it goes on from. What somebody has changed in the configuration
            since then is not overridden.
    """

    def __init__(self, config: RunConfig, resume: Checkpoint | None = None) -> None:
        self._config = config
        self._trained = trained_now(config, resume.counters if resume else None)
        self._values: dict[str, dict[str, float]] = {}  # by module id and key
        if resume is not None:
            kept = _kept(resume)
            before, now = resume.config, config.flat()
            for module_id, values in kept.items():
                same = {key: x for key, x in values.items() if before.get(key) == now.get(key)}
                self._values |= {module_id: same} if same else {}

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Put a number in the place of a schedule, or (None) follow the configuration again.

        Args:
            key: of the learner.
            value: of the key from the next update on.
            module_id: of one of several modules; None: of all that have the key.

        Raises:
            ValueError: the key cannot change while a run trains, there is no such module, or the
                value is out of range.
        """
        where = f"set({key!r}, {value!r})"
        if module_id is not None and module_id not in self._trained:
            raise ValueError(f"{where}: no module {module_id!r}{nearest(module_id, self._trained)}")
        wanted = [*self._trained] if module_id is None else [module_id]
        able = [each for each in wanted if key in _schedules(self._learner(each))]
        if not able:
            known = sorted({key for each in wanted for key in _schedules(self._learner(each))})
            raise ValueError(
                f"{where}: this cannot change while a run trains; what can is {', '.join(known)}"
            )
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: expected a number, or None for the configuration's")
            for each in able:
                _must_be_allowed(self._learner(each), key, float(value), where)
        values = self._values.setdefault(module_id or _ALL, {})
        values.pop(key, None)
        if value is not None:
            values[key] = float(value)

    def of(self, module_id: str, settings_of: str) -> dict[str, float]:
        """The numbers in force for a module, by key.

        Args:
            module_id: of the module.
            settings_of: the module of the configuration whose settings it has.
        """
        both = {**self._values.get(_ALL, {}), **self._values.get(module_id, {})}
        if not both:
            return both
        able = _schedules(self._config.of(settings_of).learner)
        return {key: value for key, value in both.items() if key in able}

    def in_words(self) -> str:
        """What is in force; "": nothing is."""
        return ", ".join(
            f"{key} = {value:g}" + (f" ({module_id})" if module_id else "")
            for module_id, values in self._values.items()
            for key, value in values.items()
        )

    def to_state(self) -> dict[str, Any]:
        """For the counters of a checkpoint."""
        values = {module_id: dict(own) for module_id, own in self._values.items() if own}
        return {VALUES: values} if values else {}

    def _learner(self, module_id: str) -> LearnerConfig:
        return self._config.of(self._trained[module_id]).learner


def _kept(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, float]]:
    """What a sound checkpoint has."""
    return msgspec.convert(checkpoint.counters.get(VALUES, {}), dict[str, dict[str, float]])


def _schedules(config: LearnerConfig) -> list[str]:
    """The keys of an algorithm that are schedules, those of its optimizers' tables among them."""
    own = [spec.lr_key for spec in config.optimizer_specs()]
    return list(dict.fromkeys([*own, *config.schedules()]))


def _must_be_allowed(config: LearnerConfig, key: str, value: float, where: str) -> None:
    """
    Raises:
        ValueError: the configuration refuses this value of this key.
    """
    if not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number")
    try:
        if key in config.schedules():
            changes: dict[str, Any] = {key: value}
            replace(config, **changes).validate()
        else:
            spec = next(each for each in config.optimizer_specs() if each.lr_key == key)
            replace(spec.config, lr=value).validate_optimizer()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
