"""Prints docs/configuration.md from the config dataclasses and the texts below their fields.

python docs/make_configuration.py > docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w
from gymnasium import Space

from juggler.driver.driver_config import AgentsConfig, DriverConfig
from juggler.driver.league.builders import BUILDERS
from juggler.driver.league.config import LeagueConfig
from juggler.driver.league.league_builder import LeagueBuilder
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.actor_critic import ActorCriticConfig
from juggler.learner.algorithms.off_policy import EpsilonGreedyConfig, OffPolicyConfig
from juggler.learner.algorithms.registry import ALGORITHMS
from juggler.learner.config import ImitationConfig, IntrinsicConfig, LearnerConfig
from juggler.runtime.connectors.config import ConnectorsConfig, ConnectorsTable
from juggler.runtime.modules.config import ModelConfig, ModuleConfig, QNetworkConfig

INTRODUCTION = """\
# Configuration

On this page you can look up every key of a run with its type, default and meaning. A key is
`num_env_runners = 4` in a TOML file, `--num-env-runners 4` on the command line, and
`juggler.train("my_run.toml", num_env_runners=4)` in Python.

The command's values override the file's, which override the defaults below. For an environment on
this host, a run [chooses other values](algorithms.md#what-a-run-chooses) for some keys that you do
not give, and prints them. An unknown key is an error. All errors are reported at once.

Tables are JSON on the command line: `--model '{"hidden_sizes": [128]}'`. A schedule is
`--lr 0 1e-3 1000000 1e-4` there. "none" is `none` on the command line, `"none"` in a file, and
`None` in Python. A row "as above" has other defaults of keys that are explained further up.

`juggler train --list` shows the configurations that ship. `config.toml` in a run's directory is the
run's own, and `juggler train` accepts it again (with another `--run-dir` if it has one).
"""

#: Configurations that several algorithms share, the most general first.
SHARED: tuple[type[LearnerConfig], ...] = (ActorCriticConfig, OffPolicyConfig, EpsilonGreedyConfig)


def _of_algorithms() -> Iterator[tuple[str, type[LearnerConfig]]]:
    """What several algorithms share, before the first of them, and each algorithm's own."""
    titled: set[type[LearnerConfig]] = set()
    for algorithm in sorted(ALGORITHMS.values(), key=lambda each: _shared(each.config)):
        for kind in (*SHARED, algorithm.config):
            if issubclass(algorithm.config, kind) and kind not in titled:
                titled.add(kind)
                yield (
                    ", ".join(
                        name
                        for name, each in ALGORITHMS.items()
                        if issubclass(each.config, kind) and (kind in SHARED or each is algorithm)
                    ),
                    kind,
                )


def _shared(config: type[LearnerConfig]) -> list[bool]:
    return [not issubclass(config, kind) for kind in SHARED]


_Q_ALGORITHMS = ", ".join(
    name for name, each in ALGORITHMS.items() if each.module == "juggler:QNetwork"
)
_INSTEAD_OF_REWARDS: dict[str, type[Any]] = {
    "keys of `intrinsic`": IntrinsicConfig,
    "keys of `imitation`": ImitationConfig,
}
_OPTIONS: dict[str, type[Any]] = {
    f"`options` of `{name}`": builder
    for name, builder in BUILDERS.items()
    if builder is not LeagueBuilder
}
#: By title, what a section is about: a class, and others as parts of its table, by name.
SECTIONS: list[tuple[str, dict[str, type[Any]]]] = [
    ("The run", {"": DriverConfig}),
    ("Environments", {"": EnvRunnerConfig}),
    ("Learning", {"": LearnerConfig}),
    ("Learning, by algorithm", dict(_of_algorithms())),
    ("Learning: the tables `intrinsic` and `imitation`", _INSTEAD_OF_REWARDS),
    (
        "The module",
        {"": ModuleConfig, "keys of `model`": ModelConfig, _Q_ALGORITHMS: QNetworkConfig},
    ),
    ("Connectors", {"": ConnectorsTable, "keys of `connectors`": ConnectorsConfig}),
    ("Several agents", {"": AgentsConfig}),
    ("Leagues: the table `league`", {"": LeagueConfig, **_OPTIONS}),
]

#: Keys of algorithms that mean the same in each, and only have other defaults.
SAME_EVERYWHERE = {
    "batch_size",
    "epochs",
    "gamma",
    "grad_clip",
    "lr",
    "max_staleness",
    "n_step",
    "replay_batch_size",
    "replay_ratio",
    "target_share",
}

CLOSING = "`python docs/make_configuration.py` prints this page."


def page() -> str:
    """The whole page."""
    rows: dict[str, str] = {}
    sections = [_section(*section, rows) for section in SECTIONS]
    return "\n".join([INTRODUCTION, *sections, CLOSING, ""])


def _section(title: str, kinds: dict[str, type[Any]], rows: dict[str, str]) -> str:
    """A section with a row for each key.

    Args:
        rows: by key, its newest row in the sections before; those of this one are added.
    """
    lines = [f"## {title}", "", "| Key | Type | Default | |", "|---|---|---|---|"]
    for name, kind in kinds.items():
        if name:
            lines.append(f"| **{name}** | | | {' '.join(_about(kind).split())} |")
        lines += _rows(kind, rows)
    return "\n".join([*lines, ""])


def _about(kind: type[Any]) -> str:
    """What a class is for: its whole docstring if it is a builder, else the first paragraph."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return text if issubclass(kind, LeagueBuilder) else text.partition("\n\n")[0]


def _rows(kind: type[Any], rows: dict[str, str]) -> list[str]:
    """A row for each key, and one for keys that a section before explains."""
    texts = _texts(kind)
    hints = get_type_hints(kind)
    new, others = [], []
    for field in _own_fields(kind):
        type_, default, text = _type(hints[field.name]), _default(field), texts[field.name]
        row = f"| `{field.name}` | {type_} | {default} | {text} |"
        same = issubclass(kind, LearnerConfig) and field.name in SAME_EVERYWHERE
        if field.name in rows and (same or row == rows[field.name]):
            others.append(f"`{field.name}` = {default}")
        else:
            new.append(row)
            rows[field.name] = row
    above = [f"| as above | | | {', '.join(others)} |"] if others else []
    return [*above, *new]


def _own_fields(kind: type[Any]) -> list[Field[Any]]:
    """All fields; of an algorithm or its `model` only those that no section before has, or that
    have other defaults."""
    if kind is LearnerConfig or not issubclass(kind, LearnerConfig | QNetworkConfig):
        return list(fields(kind))
    base = next(
        (each for each in SHARED[::-1] if issubclass(kind, each) and kind is not each), None
    )
    base = base or (LearnerConfig if issubclass(kind, LearnerConfig) else ModelConfig)
    every = {field.name: _default(field) for field in fields(base)}
    own = [field for field in fields(kind) if every.get(field.name) != _default(field)]
    return [field for field in own if field.name != "algorithm"]


def _texts(kind: type[Any]) -> dict[str, str]:
    """The strings below fields, by field; those of a subclass override inherited ones."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        texts.update(_texts_in(definition))
    return texts


def _texts_in(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(definition.body, definition.body[1:], strict=False):
        match statement, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                words = " ".join(text.split()).replace("{algorithms}", ", ".join(ALGORITHMS))
                yield name, words.replace("|", r"\|")


def _type(hint: Any) -> str:
    if hint is NoneType:
        return "none"
    if get_origin(hint) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in get_args(hint))
    if get_origin(hint) is Callable:
        return "callable"
    if get_origin(hint) is tuple:
        return f"({', '.join(map(_type, get_args(hint)))})"
    if get_origin(hint) is dict:
        return "table"
    if get_origin(hint) is not None and get_origin(hint) is not type and _is_sequence(hint):
        return f"list of {' or '.join(map(_plural, _type(get_args(hint)[0]).split(' or ')))}"
    if get_origin(hint) is Space:
        return "space"
    if get_args(hint):
        return " or ".join(map(_type, get_args(hint)))
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names[hint]


def _plural(type_: str) -> str:
    if type_.endswith(")"):
        return type_
    return f"lists{type_[4:]}" if type_.startswith("list of") else f"{type_}s"


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and hasattr(origin, "index")


def _default(field: Field[Any]) -> str:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is None:
        return "none"
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{key} = {json.dumps(each)}' for key, each in value.items())}}}`"
    text = tomli_w.dumps({"x": value})
    return f"`{' '.join(text.partition('=')[2].split()).replace('[ ', '[').replace(', ]', ']')}`"


if __name__ == "__main__":
    print(page(), end="")
