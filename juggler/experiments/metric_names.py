"""The names of metrics, as far as they are known before a run."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.core.ledger import Counters
from juggler.driver.module_ids import instead
from juggler.driver.record.metrics import Metrics
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.nearest import closest

#: Numbers that the driver adds to those of `Metrics` and of the books.
_OF_THE_DRIVER: Final = (
    "wall_time",
    "training_time",
    "updates",
    "num_env_runners",
    "num_learners",
    "restarts",
)
#: The end of the names of what evaluations have.
_OF_EVALUATIONS: Final = "evaluation_return_mean"
#: Tables: what is in them depends on the algorithm, the environment or the workers.
_TABLES: Final = (
    "modules",
    "info",
    "custom",
    "by_module",
    "by_agent",
    "league",
    "seconds",
    "inference",
    "env_steps_dropped",
    "learner_steps",
)


def plain_metrics() -> frozenset[str]:
    """Those of every run that are numbers by themselves."""
    gathered = Metrics().line(1.0, 0).keys()
    books = {f"env_steps_{each.name}" for each in fields(Counters)}
    return frozenset({*_OF_THE_DRIVER, *gathered, *books}.difference(_TABLES))


def must_be_a_metric(name: str, config: RunConfig) -> None:
    """
    Args:
        name: of a number in lines of metrics, flat.
        config: of the run.

    Raises:
        ConfigError: no line will have such a number, as far as that is known before a run.
    """
    table, slash, rest = name.partition("/")
    if name.endswith(_OF_EVALUATIONS) and not config.driver.evaluation_seconds:
        raise ConfigError(
            f"metric = {name!r}: a run evaluates only with evaluation_seconds: give it, and less "
            "than a trial takes"
        )
    if name in plain_metrics():
        return
    first = config.module_ids[0]
    # What is not named by Gymnasium may have several agents, and so modules with names of its own.
    is_known = bool(config.agents.agents) or ":" not in config.env_runner.env
    is_alone = is_known and config.agents.acting_ids == (DEFAULT_MODULE,)
    if is_alone and table == "modules" and rest.partition("/")[0] != DEFAULT_MODULE:
        raise ConfigError(
            f"metric = {name!r}: a metric of the learner is named modules/{DEFAULT_MODULE}/NAME, "
            f"such as modules/{DEFAULT_MODULE}/grad_norm"
        )
    if slash and table in ("modules", "by_module") and is_known and not config.agents.league:
        _must_be_of_a_module(name, config)
    if slash and table == "modules":
        return _must_be_of_a_learner(name, config)
    if slash and table in _TABLES:
        return
    near = closest(name, plain_metrics())
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ConfigError(
        f"metric = {name!r}: lines of metrics have no such number{hint}. Those of a learner are "
        f"named as modules/{first}/grad_norm is, those of an environment's infos info/NAME/mean"
    )


def _must_be_of_a_module(name: str, config: RunConfig) -> None:
    """
    Args:
        name: as "modules/hunter/entropy" or "by_module/hunter/updates".
        config: of a run whose modules are known: the environment does not settle them, and no
            players come and go.

    Raises:
        ConfigError: there is no such module.
    """
    agents = config.agents
    table, module_id = name.split("/", 2)[:2]
    if table == "by_module" and len(agents.acting_ids) == 1:
        raise ConfigError(
            f"metric = {name!r}: lines have by_module with several modules, and there is one "
            f"alone, {agents.acting_ids[0]!r}: name a number of the run, as episode_return_mean is"
        )
    known = config.module_ids if table == "modules" else agents.acting_ids
    if module_id not in known:
        which = "module that is trained" if table == "modules" else "module"
        raise ConfigError(
            f"metric = {name!r}: there is no {which} {module_id!r}{instead(module_id, known)}"
        )


def _must_be_of_a_learner(name: str, config: RunConfig) -> None:
    """
    Args:
        name: as "modules/default/entropy"; which modules there are may only show in the run.
        config: of the run.

    Raises:
        ConfigError: learners of the module's algorithm have no such number.
    """
    _, module_id, metric = (*name.split("/", 2), "")[:3]
    is_known = module_id in {*config.module_ids, *config.agents.modules}
    learner = (config.of(module_id) if is_known else config).learner
    known = learner.metric_names()
    if ":" in learner.algorithm or metric in known:  # nobody knows the metrics of one's own
        return
    near = closest(metric, known)
    hint = f" (did you mean {near!r}?)" if near else ""
    raise ConfigError(
        f"metric = {name!r}: {learner.algorithm} has no metric {metric!r} as it is configured"
        f"{hint}. It has {', '.join(sorted(known))}"
    )
