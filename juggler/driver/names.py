"""What a configuration names is looked for before anything starts, as far as that is cheap."""

from __future__ import annotations

from collections.abc import Iterator

from juggler.driver.config import ConfigError, RunConfig
from juggler.envrunner.naming import check_name
from juggler.runtime.connectors.built_in import PLACES
from juggler.runtime.modules.by_name import check_there


def must_be_here(config: RunConfig) -> None:
    """Of a run whose workers are on this host. Nothing of anybody's is imported for it: the driver
    does without torch, and what a module lacks inside, its workers say.

    Raises:
        ConfigError: no environment has such a name, or there is no such Python module.
    """
    try:
        if not config.env_runner.gateway:
            check_name(config.env_runner.env)
        for what, name in _parts(config):
            check_there(name, what)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _parts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Names of the form "package.module:Class", with what each is."""
    named: list[tuple[str, object]] = [
        ("module", config.module.module),
        ("distribution", config.module.distribution),
        ("encoder", config.module.model.get("encoder")),
    ]
    connectors = config.connectors.parsed()
    named += [("connector", piece.path) for at in PLACES for piece in connectors.pipeline(at)]
    for piece in config.env_runner.env_wrappers:
        named.append(("wrapper", piece["use"] if isinstance(piece, dict) else piece))
    for what, name in named:
        if isinstance(name, str) and ":" in name:
            yield what, name
