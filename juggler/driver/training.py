"""Starting a run from Python: what the command line does too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import cloudpickle

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver import Driver, Listen
from juggler.driver.record import checkpoints
from juggler.driver.record.progress import make_progress
from juggler.driver.record.run_directory import RunDirectory
from juggler.runtime.actors.endpoints import EndpointError
from juggler.runtime.connectors.built_in import PLACES
from juggler.runtime.connectors.pipeline import class_path

_CONFIGS = "juggler.driver.configs"


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended.

    Attributes:
        summary: what `summary.json` holds.
        run_dir: where everything is.
        checkpoint: the newest checkpoint; None where the run made none.
    """

    summary: dict[str, Any]
    run_dir: Path
    checkpoint: Path | None

    @property
    def solved(self) -> bool:
        return bool(self.summary["solved"])


def shipped_configs() -> list[str]:
    """Names of the configurations in the package."""
    files = resources.files(_CONFIGS).iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".toml"))


def load_config(name: str | Path | None) -> RunConfig:
    """The configuration in a file, or a shipped one by its name; None: the defaults.

    Raises:
        ConfigError: there is no such configuration, or it says something wrong.
    """
    if name is None:
        return RunConfig()
    if not isinstance(name, str | Path):
        raise ConfigError(f"a configuration is a name, a file or a RunConfig, not {name!r}")
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return RunConfig.from_toml(path)
    if str(name) not in shipped_configs():
        raise ConfigError(
            f"there is no configuration {str(name)!r}: give a .toml file or one of those that "
            f"ship: {', '.join(shipped_configs())}"
        )
    with resources.as_file(resources.files(_CONFIGS) / f"{name}.toml") as shipped:
        return RunConfig.from_toml(shipped)


def train(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    **keys: Any,
) -> Result:
    """Train until the run's stop conditions hold; Ctrl-C ends it in order.

    Args:
        config: a shipped configuration's name ("cartpole"), a TOML file, or a `RunConfig`.
        env: a Gymnasium id, "module:callable", or any callable that makes an environment.
        module: "package.module:Class", an RLModule or Catalog class of this script or notebook, or
            an `RLModuleSpec` with the module's config, where parts of it are such classes.
        keys: of the configuration, in place of what it says: `lr=1e-3, stop_return=475`. Where
            `connectors` names a class, that may be a class of this script or notebook.

    Returns:
        The summary, and where plot, metrics and checkpoints are.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    base = config if isinstance(config, RunConfig) else load_config(config)
    own_code = _own_code(env, module, own_connectors(keys), keys)
    final = RunConfig.from_flat({**base.flat(), **keys})
    return start_run(final, started=started, own_code=own_code)


def resume(
    run_dir: str | Path,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    **keys: Any,
) -> Result:
    """Go on with a run from its newest good checkpoint.

    Args:
        run_dir: of the run.
        env: as for `train`; a run that was trained on a callable needs it again.
        module: the same.
        keys: of the configuration, to be other than before.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    own = own_connectors(keys)
    own_code = _own_code(env, module, own, keys)
    checkpoint = checkpoints.read(Path(run_dir))
    config = RunConfig.from_flat({**checkpoint.config, **keys}, where=str(checkpoint.path))
    must_be_given_again(config, env, module, own)
    return resume_run(Path(run_dir), checkpoint, config, started=started, own_code=own_code)


def own_connectors(keys: dict[str, Any]) -> dict[str, type[Any]]:
    """Connector classes among the keys by the names that are put in their place."""
    own: dict[str, type[Any]] = {}
    if "connectors" in keys:
        keys["connectors"] = _with_names(keys["connectors"], own)
    return own


def _with_names(value: Any, own: dict[str, type[Any]]) -> Any:
    if isinstance(value, type):
        own[class_path(value)] = value
        return class_path(value)
    if isinstance(value, dict):
        return {key: _with_names(each, own) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(each, own) for each in value]
    return value


def must_be_given_again(
    config: RunConfig, env: object, module: object, own: Mapping[str, type[Any]]
) -> None:
    """
    Raises:
        ConfigError: the run was trained on something of a script, which no name leads to.
    """
    for key, name, given in (
        ("env", config.env_runner.env, env),
        ("module", config.module.module, module),
    ):
        if name is not None and name.startswith("__main__:") and not callable(given):
            mine = name.partition(":")[2]
            raise ConfigError(f"this run's {key} is {mine}, of a script: pass {key}={mine} again")
    for place in PLACES:
        for piece in config.connectors.parsed().pipeline(place):
            if piece.path.startswith("__main__:") and piece.path not in own:
                raise ConfigError(
                    f"this run's connector {piece.name!r} is of a script: pass connectors=... "
                    "with its class again"
                )


def _own_code(
    env: str | Callable[..., Any] | None,
    module: str | Callable[..., Any] | None,
    connectors: dict[str, type[Any]],
    keys: dict[str, Any],
) -> bytes:
    """Put names among the keys; what has none goes to local workers by itself, cloudpickled."""
    factories: list[Callable[..., Any] | None] = []
    for key, value in (("env", env), ("module", module)):
        factories.append(value if callable(value) else None)
        if callable(value):
            # What config.toml says of it: where it would be found if its script were a module. An
            # object, such as an RLModuleSpec, is to be found nowhere but in the script.
            if hasattr(value, "__qualname__"):
                keys[key] = f"{value.__module__}:{value.__qualname__}"
            else:
                keys[key] = f"__main__:{type(value).__qualname__}"
        elif isinstance(value, str):
            keys[key] = value
        elif value is not None:
            raise ConfigError(
                f"{key} must be a name or what makes one, such as a class: not {value!r}"
            )
    return cloudpickle.dumps((*factories, connectors)) if any(factories) or connectors else b""


def start_run(
    config: RunConfig,
    *,
    started: float,
    own_code: bytes = b"",
    listen: Listen | None = None,
) -> Result:
    """A new run of a whole configuration. See `Driver` for the arguments."""
    path = Path(config.driver.run_dir) if config.driver.run_dir else None
    name = config.env_runner.env.rpartition(":")[2]
    directory = RunDirectory.create(path, config.flat(), name)
    try:
        return _drive(config, directory, started=started, own_code=own_code, listen=listen)
    except EndpointError:
        directory.discard()
        raise


def resume_run(
    run_dir: Path,
    checkpoint: checkpoints.Checkpoint,
    config: RunConfig,
    *,
    started: float,
    own_code: bytes = b"",
    listen: Listen | None = None,
) -> Result:
    """Go on with a run. See `Driver` for the arguments.

    Raises:
        RunDirectoryError: this is no run directory.
    """
    directory = RunDirectory.open(run_dir, config.flat())
    return _drive(
        config, directory, started=started, own_code=own_code, resume=checkpoint, listen=listen
    )


def _drive(config: RunConfig, directory: RunDirectory, **arguments: Any) -> Result:
    progress = make_progress(config.driver.progress)
    resume = arguments.get("resume")
    for problem in resume.problems if resume else ():
        progress.message(problem, "error")
    summary = Driver(config, directory, progress, **arguments).run()
    newest = summary["checkpoint"]
    return Result(summary, directory.path, Path(newest) if newest else None)
