"""Keeps the numbers that callbacks have set instead of schedules."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from juggler.driver.config import RunConfig, plain
from juggler.learner.config import LearnerConfig
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.near_matches import closest, nearest

#: In the counters of a checkpoint.
VALUES: Final = "values"
_ALL: Final = ""  # modules


class ChangedValues:
    """Numbers in force, by module; any thread may set them.

    Every update has them, so that all learners of a group change at the same update.

    Args:
        trained: by id of a trained module, the module of the configuration whose settings it has.
            A league adds and removes players.
        resume: the checkpoint that the run resumes from. Keys whose configured value has changed
            since then are not overridden.
    """

    def __init__(
        self, config: RunConfig, trained: Mapping[str, str], resume: Checkpoint | None = None
    ) -> None:
        self._config, self._trained = config, trained
        self._lock = threading.Lock()
        # By module id and key. None: the number for all modules does not apply to this one.
        self._values: dict[str, dict[str, float | None]] = {}
        if resume is not None:
            self._values = _kept(resume)
            self._follow_changes(RunConfig.from_flat(resume.config))

    def _follow_changes(self, before: RunConfig) -> None:
        """Forget numbers of keys whose configured value has changed."""
        for key in dict.fromkeys(key for values in self._values.values() for key in values):
            able = self._able(key, self._trained)
            changed = [
                each
                for each in able
                if _configured(self._config.of(self._trained[each]).learner, key)
                != _configured(before.of(self._trained[each]).learner, key)
            ]
            if changed == able:
                self._store(key, None, None)
            else:
                for module_id in changed:
                    self._store(key, None, module_id)

    def set(self, key: str, value: float | None, module_id: str | None = None) -> None:
        """Replace a schedule by a number; None: follow the configuration again.

        Args:
            module_id: of one of several modules; None: of all that have the key.

        Raises:
            ValueError: the key cannot change while a run trains, there is no such module, or the
                value is out of range.
        """
        value = plain(value)
        where = f"set({key!r}, {value!r})"
        if module_id is not None and module_id not in self._trained:
            raise ValueError(f"{where}: no module {module_id!r}{nearest(module_id, self._trained)}")
        wanted = [*self._trained] if module_id is None else [module_id]
        able = self._able(key, wanted)
        if not able:
            known = sorted({key for each in wanted for key in _schedules(self._learner(each))})
            if close := closest(key, known):
                raise ValueError(f"{where}: did you mean {close!r}?")
            raise ValueError(
                f"{where}: this cannot change while a run trains; what can is {', '.join(known)}"
            )
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{where}: expected a number, or None for the configuration's")
            for each in able:
                _must_be_allowed(self._learner(each), key, float(value), where)
        self._store(key, None if value is None else float(value), module_id)

    def _store(self, key: str, value: float | None, module_id: str | None) -> None:
        """Store a checked number."""
        with self._lock:
            for each in self._values if module_id is None else [module_id]:
                self._values.get(each, {}).pop(key, None)
            if value is not None or (module_id is not None and key in self._values.get(_ALL, {})):
                self._values.setdefault(module_id or _ALL, {})[key] = value

    def of(self, module_id: str, settings_of: str) -> dict[str, float]:
        """The numbers in force for a module, by key.

        Args:
            settings_of: the module of the configuration whose settings it has.
        """
        with self._lock:
            both = {**self._values.get(_ALL, {}), **self._values.get(module_id, {})}
        if not both:
            return {}
        able = _schedules(self._config.of(settings_of).learner)
        return {key: value for key, value in both.items() if key in able and value is not None}

    def in_words(self) -> str:
        """List the numbers in force; "" if there are none."""
        return ", ".join(
            f"{key} = {value:g}" + (f" ({module_id})" if module_id else "")
            for module_id, values in self._values.items()
            for key, value in values.items()
            if value is not None
        )

    def to_state(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint's counters."""
        with self._lock:
            values = {
                module_id: dict(own)
                for module_id, own in self._values.items()
                if own and (module_id == _ALL or module_id in self._trained)
            }
        return {VALUES: values} if values else {}

    def _able(self, key: str, module_ids: Iterable[str]) -> list[str]:
        """Return the modules that have a key."""
        return [each for each in module_ids if key in _schedules(self._learner(each))]

    def _learner(self, module_id: str) -> LearnerConfig:
        return self._config.of(self._trained[module_id]).learner


def _kept(checkpoint: Checkpoint) -> dict[str, dict[str, float | None]]:
    """Return the numbers in a sound checkpoint."""
    return msgspec.convert(checkpoint.counters.get(VALUES, {}), dict[str, dict[str, float | None]])


def _schedules(config: LearnerConfig) -> list[str]:
    """List the keys that are schedules, including those in optimizers' tables."""
    own = [spec.lr_key for spec in config.optimizer_specs()]
    return list(dict.fromkeys([*own, *config.schedules()]))


def _configured(config: LearnerConfig, key: str) -> Any:
    """Return the configured value of this key; None: it is missing."""
    if key in config.schedules():
        return getattr(config, key)
    return next((spec.config.lr for spec in config.optimizer_specs() if spec.lr_key == key), None)


def _must_be_allowed(config: LearnerConfig, key: str, value: float, where: str) -> None:
    """Check that the configuration accepts this value of this key."""
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
