"""The trials of a sweep that are over, as Optuna has recorded them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna import Study

#: Attributes of Optuna's trials: the number of the run, and how it ended, for people.
RUN = "run"
SAID = "said"


@dataclass(frozen=True, slots=True)
class TrialOver:
    """A trial that is over.

    Attributes:
        number: of its run.
        value: what trials are compared by: of a pruned one, the last that it reported; None: it has
            none.
        complete: it was neither pruned nor failed.
        said: why not, for people; "" if it is complete.
        settings: by key, the values that it had. What is not a number or a word is JSON.
    """

    number: int
    value: float | None
    complete: bool
    said: str
    settings: Mapping[str, Any]


def trials_over(study: Study) -> list[TrialOver]:
    """All of them, the best complete one first, and then the others in their order."""
    from optuna.study import StudyDirection
    from optuna.trial import TrialState

    found = []
    for trial in study.get_trials(deepcopy=False):
        if not trial.state.is_finished() or SAID not in trial.user_attrs:
            continue  # it goes on, or went on as another after a resume
        reports = trial.intermediate_values
        complete = trial.state == TrialState.COMPLETE
        value = trial.value if complete else None
        if trial.state == TrialState.PRUNED and reports:
            value = reports[max(reports)]
        attributes = trial.user_attrs
        found.append(
            TrialOver(attributes[RUN], value, complete, attributes[SAID], dict(trial.params))
        )
    sign = 1 if study.direction == StudyDirection.MINIMIZE else -1

    def rank(trial: TrialOver) -> tuple[bool, float]:
        return not trial.complete, sign * (trial.value or 0.0) if trial.complete else trial.number

    return sorted(found, key=rank)
