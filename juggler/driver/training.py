"""Starting a run from Python: what the command line does too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import cloudpickle

from juggler.driver import checkpoints
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.driver import Driver, Listen
from juggler.driver.progress import make_progress
from juggler.driver.run_directory import RunDirectory

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
        module: "package.module:Class", or an RLModule class of this script or notebook.
        keys: of the configuration, in place of what it says: `lr=1e-3, stop_return=475`.

    Returns:
        The summary, and where plot, metrics and checkpoints are.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    base = config if isinstance(config, RunConfig) else load_config(config)
    factories: list[Callable[..., Any] | None] = []
    for key, value in (("env", env), ("module", module)):
        own = value if callable(value) else None
        factories.append(own)
        if own is not None:
            # What config.toml says of it: where it would be found if it had a module.
            label = f"{getattr(own, '__module__', '')}:{getattr(own, '__qualname__', own)}"
            keys[key] = label
        elif value is not None:
            keys[key] = value
    own_code = cloudpickle.dumps(tuple(factories)) if any(factories) else b""
    final = RunConfig.from_flat({**base.flat(), **keys})
    return start_run(final, started=started, own_code=own_code)


def resume(run_dir: str | Path, **keys: Any) -> Result:
    """Go on with a run from its newest good checkpoint.

    Args:
        run_dir: of the run.
        keys: of the configuration, to be other than before.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    before = checkpoints.read(Path(run_dir)).config
    config = RunConfig.from_flat({**before, **keys}, where=str(run_dir))
    return resume_run(Path(run_dir), config, started=started)


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
    return _drive(config, directory, started=started, own_code=own_code, listen=listen)


def resume_run(
    run_dir: Path,
    config: RunConfig | None = None,
    *,
    started: float,
    listen: Listen | None = None,
) -> Result:
    """Go on with a run from its newest good checkpoint.

    Args:
        run_dir: of the run.
        config: to go on with; none: as before.
        started: see `Driver`.
        listen: see `Driver`.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunDirectoryError: this is no run directory.
    """
    directory = RunDirectory.open(run_dir)
    checkpoint = checkpoints.read(run_dir)
    config = config or RunConfig.from_flat(checkpoint.config, where=str(checkpoint.path))
    return _drive(config, directory, started=started, resume=checkpoint, listen=listen)


def _drive(config: RunConfig, directory: RunDirectory, **arguments: Any) -> Result:
    progress = make_progress(config.driver.progress)
    resume = arguments.get("resume")
    for problem in resume.problems if resume else ():
        progress.message(problem, "error")
    summary = Driver(config, directory, progress, **arguments).run()
    newest = summary["checkpoint"]
    return Result(summary, directory.path, Path(newest) if newest else None)
