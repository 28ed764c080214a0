"""Trains and resumes from scripts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from juggler.driver.callbacks import Callback, checked
from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.given_config import load_given
from juggler.driver.result import Result
from juggler.driver.same_run import must_keep_its_algorithm
from juggler.driver.script_classes import (
    give_names,
    must_be_given_again,
    own_classes,
    own_module,
    pack,
)
from juggler.driver.starting import resume_run, start_run
from juggler.runtime.checkpoints.checkpoint import read


def train(
    config: str | Path | RunConfig | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> Result:
    """Train until the run's stop conditions hold.

    Ctrl-C and SIGTERM end the run with a checkpoint, and then raise KeyboardInterrupt and
    SystemExit, which have the run's result as their `result`.

    Args:
        config: a shipped configuration's name ("cartpole"), a TOML file, or a `RunConfig`. Keys
            that a file leaves out are chosen as the guide to algorithms says.
        env: a Gymnasium id, "module:callable", or any callable that makes an environment.
        module: "package.module:Class", an RLModule or Catalog class of this script or notebook, or
            an `RLModuleSpec` whose config has such classes.
        callbacks: hear of the run while it trains, and may end it. What one of them raises ends the
            run in order, and then comes out of here.
        keys: of the configuration, in place of what it says: `lr=1e-3, stop_return=475`.
            `algorithm`, and what `connectors` names, may be classes of this script or notebook.

    Returns:
        The summary, and the paths of the run directory and the newest checkpoint.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
        RunFailed: something failed; the message says what.
        KeyboardInterrupt: on Ctrl-C.
        SystemExit: on SIGTERM or SIGHUP; its status is 128 plus the signal's number.
    """
    started = time.monotonic()
    told = checked(callbacks)
    _must_be_keys(keys)
    own = own_classes(keys)
    give_names(env, module, keys)
    if isinstance(config, RunConfig):
        base, given = config, frozenset(config.flat())
    else:
        base, given = load_given(config, keys.get("algorithm"))
    final = RunConfig.from_flat({**base.flat(), **keys})
    own_code = pack(final, env, own_module(final, module, own), own)
    return start_run(final, given | keys.keys(), started=started, own_code=own_code, callbacks=told)


def resume(
    run_dir: str | Path,
    *,
    env: str | Callable[..., Any] | None = None,
    module: str | Callable[..., Any] | None = None,
    callbacks: Iterable[Callback] = (),
    **keys: Any,
) -> Result:
    """Resume a run from its newest good checkpoint. Signals end it as in `train`.

    Args:
        run_dir: of the run.
        env: as in `train`; a run that was trained on a callable needs it again.
        module: likewise.
        callbacks: as in `train`.
        keys: of the configuration, to be other than before; an `algorithm` that is a class of a
            script is needed again.

    Raises:
        CheckpointError: there is no good checkpoint.
        RunFailed: something failed; the message says what.
    """
    started = time.monotonic()
    told = checked(callbacks)
    _must_be_keys(keys)
    own = own_classes(keys)
    give_names(env, module, keys)
    checkpoint = read(run_dir)
    if "algorithm" in keys and "algorithm" in checkpoint.config:
        must_keep_its_algorithm(checkpoint.config["algorithm"], keys["algorithm"])
    where = f"{checkpoint.path}, with what is given" if keys else str(checkpoint.path)
    config = RunConfig.from_flat({**checkpoint.config, **keys}, where=where)
    module = own_module(config, module, own)
    must_be_given_again(config, env, module, own)
    own_code = pack(config, env, module, own)
    return resume_run(
        Path(run_dir), checkpoint, config, started=started, own_code=own_code, callbacks=told
    )


def _must_be_keys(keys: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: one of them is an argument of these functions, and no key.
    """
    if "resume" in keys:
        raise ConfigError(
            "resume is no key of a configuration: to go on with a run, call "
            f"juggler.resume({str(keys['resume'])!r})"
        )
    if "callback" in keys:
        raise ConfigError("there is no key 'callback': did you mean callbacks=[...], a list?")
