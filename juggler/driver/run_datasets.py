"""Checks and resolves a run's data sets before it begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium

from juggler.driver.config import ConfigError, RunConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.registry import find_algorithm
from juggler.runtime.datasets.dataset import DatasetError, environment_of, must_be_installed


def with_dataset(
    config: RunConfig, given: Collection[str], *, is_here: bool, is_new: bool
) -> RunConfig:
    """Complete a configuration with its data set's environment and absolute paths.

    Raises:
        ConfigError: the algorithm needs a data set, the named one does not exist, evaluations have
            no environment, or recording is impossible there.
    """
    if is_here:
        config = _with_record(_with_demonstrations(config), is_new)
    name, algorithm = config.env_runner.dataset, config.learner.algorithm
    if not name and find_algorithm(algorithm).offline:
        raise ConfigError(
            f"algorithm = {algorithm!r} learns from a data set: name one with dataset = ...; "
            "juggler record makes one from a trained policy"
        )
    if not name or not is_here:
        return config
    # A data set may state in which environment it was recorded.
    try:
        stated = environment_of(name)
    except DatasetError as error:
        raise ConfigError(f"dataset: {error}") from error
    if "env" in given:
        stated = {}
    elif not stated or ":" in stated["env"]:  # its module would be imported and called
        if config.plays:
            raise ConfigError(
                f"evaluation_seconds = {config.driver.evaluation_seconds:g}: data set {name!r} "
                f"{_in_words(stated)}"
            )
        stated = {"env": Path(_kept(name)).name}  # only a name for people; it is not played
    stated = {key: value for key, value in stated.items() if key not in given}
    return replace(config, env_runner=replace(config.env_runner, dataset=_kept(name), **stated))


def _in_words(stated: dict[str, Any]) -> str:
    """Describe what a data set does not state about its environment."""
    if not stated:
        return "does not name its environment; name it with env = ..."
    kwargs = f" and env_kwargs = {stated['env_kwargs']}" if stated["env_kwargs"] else ""
    return (
        f"names the environment {stated['env']}, and a run imports no module because a data "
        f"set names it: if you trust it, set env = {stated['env']!r}{kwargs} yourself"
    )


def is_of_another(runner: EnvRunnerConfig) -> bool:
    """Return whether the named environment is not the data set's.

    Raises:
        DatasetError: there is no such data set, or it is damaged.
    """
    if runner.env == Path(runner.dataset).name:
        return False  # none was named
    played = {"env": runner.env, "env_kwargs": runner.env_kwargs}
    return played != environment_of(runner.dataset)


def must_be_playable(config: Mapping[str, Any], env: str, *, with_simulator: bool = True) -> None:
    """Check that a run has an environment to play.

    Raises:
        ConfigError: the run's env is only a name, of its data set or of simulators, and no other
            environment is given.
    """
    dataset, is_name = config.get("dataset", ""), env == config.get("env")
    if config.get("gateway") and is_name and ":" not in env and env not in gymnasium.registry:
        start = "start the simulator with --simulator, " * with_simulator
        raise ConfigError(
            f"the run used simulators, and env = {env!r} is only a name: {start}name an "
            "environment in Python with --env, or env in Python; or act in the simulator, with "
            "the policy as an ONNX model (docs/external-simulators.md)"
        )
    if dataset and env == Path(dataset).name and env not in gymnasium.registry:
        raise ConfigError(
            f"the run learned from the data set {dataset}, without an environment "
            "to play: name it with --env, or env in Python"
        )


def _with_demonstrations(config: RunConfig) -> RunConfig:
    """Replace demonstrations by their absolute path."""
    modules = config.agents.modules
    if not config.learner.imitation and not any("imitation" in each for each in modules.values()):
        return config
    learner = replace(config.learner, imitation=_found(config.learner.imitation))
    tables = {
        module_id: {**table, "imitation": _found(table["imitation"])}
        if "imitation" in table
        else table
        for module_id, table in modules.items()
    }
    return replace(config, learner=learner, agents=replace(config.agents, modules=tables))


def _with_record(config: RunConfig, is_new: bool) -> RunConfig:
    """Replace the directory of recordings by its absolute path."""
    if not config.env_runner.record:
        return config
    place = Path(config.env_runner.record).expanduser().resolve()
    try:
        must_be_installed()
    except DatasetError as error:
        raise ConfigError(f"record = {config.env_runner.record!r}: {error}") from error
    if is_new and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(
            f"record = {config.env_runner.record!r}: {place} already exists, and is not an empty "
            "directory: choose another place, or remove it"
        )
    return replace(config, env_runner=replace(config.env_runner, record=str(place)))


def _found(imitation: dict[str, Any]) -> dict[str, Any]:
    named = imitation.get("demonstrations")
    return {**imitation, "demonstrations": _kept(named)} if named else imitation


def _kept(name: str) -> str:
    """Return a data set's name that works from any directory."""
    place = Path(name).expanduser()
    return str(place.resolve()) if place.exists() else name
