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

from juggler.driver.agents_config import AgentsConfig
from juggler.driver.driver_config import DriverConfig
from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.builders import BUILDERS
from juggler.driver.league.config import LeagueConfig
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.actor_critic.config import ActorCriticConfig
from juggler.learner.algorithms.appo.config import AppoConfig
from juggler.learner.algorithms.bc.config import BcConfig
from juggler.learner.algorithms.dqn.config import DqnConfig
from juggler.learner.algorithms.impala.config import ImpalaConfig
from juggler.learner.algorithms.iql.config import IqlConfig
from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.algorithms.off_policy.epsilon_config import EpsilonGreedyConfig
from juggler.learner.algorithms.ppo.config import PpoConfig
from juggler.learner.algorithms.pqn.config import PqnConfig
from juggler.learner.algorithms.r2d2.config import R2d2Config
from juggler.learner.algorithms.sac.config import SacConfig
from juggler.learner.algorithms.td3.config import Td3Config
from juggler.learner.around_config import ImitationConfig, IntrinsicConfig
from juggler.learner.config import LearnerConfig
from juggler.runtime.connectors.config import ConnectorsConfig, ConnectorsTable
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.model_config import ModelConfig, QNetworkConfig

INTRODUCTION = """\
# Configuration

A run is configured by a flat set of keys. Each is a key of a TOML file, an option of the command
line (with dashes for underscores), and a keyword of `juggler.train`:

```toml
env = "Acrobot-v1"
num_env_runners = 4
lr = 1e-3
```

```sh
juggler train my_run.toml --num-env-runners 8
```

```python
juggler.train("my_run.toml", num_env_runners=8)
```

Values that are given with the command override those of the file, which override the defaults
below. For an environment on this host, `juggler train` and `juggler.train` choose other values for
some of the keys that nobody gave, and print them:
[algorithms.md](algorithms.md#what-a-run-chooses).

An unknown key is an error that names the nearest right one. A value of the wrong type or out of its
range is an error too. All that are found are told together, one in each line.

The keys that are tables in a file (`env_kwargs`, `model`, `connectors`, `optimizers`, `intrinsic`,
`imitation`, `agents`, `modules`) are JSON on the command line: `--model '{"hidden_sizes": [128]}'`.
The pairs of a schedule (`lr`) are written there one after the other: `--lr 0 1e-3 1000000 1e-4`.
"none" on this page is `none` on the command line, `"none"` in a file, and `None` in Python.

`juggler train --list` shows the configurations that ship. `config.toml` in a run's directory is the
run's own configuration, and `juggler train` accepts it again (with another `--run-dir` if it has
one).
"""

SECTIONS: list[tuple[str, type[Any]]] = [
    ("The run", DriverConfig),
    ("Environments", EnvRunnerConfig),
    ("Learning", LearnerConfig),
    ("Learning with IMPALA, APPO and PPO", ActorCriticConfig),
    ("Learning with IMPALA", ImpalaConfig),
    ("Learning with APPO", AppoConfig),
    ("Learning with PPO", PpoConfig),
    ("Learning with PQN", PqnConfig),
    ("Learning with BC", BcConfig),
    ("Learning with DQN, R2D2, SAC, TD3 and IQL", OffPolicyConfig),
    ("Learning with DQN and R2D2", EpsilonGreedyConfig),
    ("Learning with DQN", DqnConfig),
    ("Learning with R2D2", R2d2Config),
    ("Learning with SAC", SacConfig),
    ("Learning with TD3", Td3Config),
    ("Learning with IQL", IqlConfig),
    ("Intrinsic rewards: keys of `intrinsic`", IntrinsicConfig),
    ("Imitation: keys of `imitation`", ImitationConfig),
    ("The module", ModuleConfig),
    ("The default module: keys of `model`", ModelConfig),
    ("Values of actions: keys of `model`", QNetworkConfig),
    ("Connectors", ConnectorsTable),
    ("Connectors: keys of `connectors`", ConnectorsConfig),
    ("Several agents", AgentsConfig),
    ("Leagues: keys of `league`", LeagueConfig),
    *(
        (f"Leagues: `options` of `{name}`", builder)
        for name, builder in BUILDERS.items()
        if builder is not LeagueBuilder
    ),
]

CLOSING = "`python docs/make_configuration.py` prints this page."


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(_section(*section) for section in SECTIONS), CLOSING, ""])


def _section(title: str, kind: type[Any]) -> str:
    texts = _texts(kind)
    hints = get_type_hints(kind)
    lines = [
        f"## {title}",
        "",
        inspect.cleandoc(kind.__doc__ or ""),
        "",
        "| Key | Type | Default | |",
        "|---|---|---|---|",
    ]
    for field in _own_fields(kind):
        type_, default = _type(hints[field.name]), _default(field)
        lines.append(f"| `{field.name}` | {type_} | {default} | {texts[field.name]} |")
    return "\n".join([*lines, ""])


def _own_fields(kind: type[Any]) -> list[Field[Any]]:
    """All fields; of an algorithm or its `model` only those that no section before has, or that
    have other defaults."""
    if kind is LearnerConfig or not issubclass(kind, LearnerConfig | QNetworkConfig):
        return list(fields(kind))
    shared = (ActorCriticConfig, EpsilonGreedyConfig, OffPolicyConfig)
    base = next((each for each in shared if issubclass(kind, each) and kind is not each), None)
    base = base or (LearnerConfig if issubclass(kind, LearnerConfig) else ModelConfig)
    every = {field.name: _default(field) for field in fields(base)}
    return [field for field in fields(kind) if every.get(field.name) != _default(field)]


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
                yield name, " ".join(text.split()).replace("|", r"\|")


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
        return f"list of {_type(get_args(hint)[0]).replace(' or ', 's or ')}s"
    if get_origin(hint) is Space:
        return "space"
    if get_args(hint):
        return " or ".join(map(_type, get_args(hint)))
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names[hint]


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
