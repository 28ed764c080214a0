"""What `import juggler` gives, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
from support.pages import ROOT, blocks

import juggler
import juggler.client
import juggler.runtime
import juggler.testing
from juggler.cli import COMMANDS
from juggler.driver.config import RunConfig

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
EXAMPLES = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("examples/**/*.py"))
#: What pages and examples may import, and the names in it.
PUBLIC = {
    "juggler": juggler.__all__,
    "juggler.client": juggler.client.__all__,
    "juggler.testing": juggler.testing.__all__,
}
PACKAGE = Path(inspect.getfile(juggler)).parent


def test_everything_that_it_names_is_there() -> None:
    for name in juggler.__all__:
        value = getattr(juggler, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
        else:
            assert getattr(importlib.import_module(juggler._public()[name]), name) is value
    with pytest.raises(AttributeError, match="no attribute 'RLModul'"):
        juggler.RLModul  # noqa: B018


@pytest.mark.parametrize(
    ("name", "instead"),
    [("BehaviourPolicy", "use juggler.Actor"), ("Sample", "a tree of columns by name")],
)
def test_names_of_earlier_releases_say_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{instead}"):
        getattr(juggler, name)


def test_dir_lists_that_and_its_rooms_alone() -> None:
    listed = dir(juggler)
    assert listed == sorted(set(listed))
    rooms = {name for name in listed if inspect.ismodule(getattr(juggler, name))}
    assert "runtime" in rooms
    known = {each.parent.name for each in PACKAGE.glob("*/__init__.py")}
    assert rooms <= known | {"testing"}
    assert set(listed) - rooms == set(juggler.__all__)


def test_type_checkers_are_told_the_same() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (told,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in told.body if isinstance(node, ast.ImportFrom)]
    assert {node.names[0].asname: node.module for node in imports} == juggler._public()


def imported(python: str) -> set[tuple[str, str]]:
    """(module, name) of all imports from Juggler; modules have no name."""
    found = set()
    for node in ast.walk(ast.parse(python)):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {(name.name, "") for name in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "juggler"}


def used(python: str) -> set[tuple[str, str]]:
    """The same of attributes, as in `juggler.Learner`."""
    return {
        ("juggler", node.attr)
        for node in ast.walk(ast.parse(python))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "juggler"
    }


def not_public(python: str) -> set[tuple[str, str]]:
    rooms = {("juggler", module.partition(".")[2]) for module in PUBLIC}
    public = {(module, name) for module, names in PUBLIC.items() for name in (*names, "")}
    return (imported(python) | used(python)) - public - rooms


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES])
def test_what_people_read_imports_public_names_alone(file: str) -> None:
    """docs/make_configuration.py, which makes a page of the code, is not for them."""
    of_page = file.endswith(".md")
    python = "\n".join(blocks("python", file)) if of_page else (ROOT / file).read_text()
    assert not_public(python) == set()
    if of_page:
        text = (ROOT / file).read_text()
        deep = re.findall(r"\bjuggler\.(?:driver|envrunner|learner|policies|runtime)\.\w+", text)
        assert deep == []


def names_in_docstrings(public: type) -> set[str]:
    """Names after `juggler.` in the docstrings of a class."""
    documented = [public, *vars(public).values()]
    texts = [each.__doc__ for each in documented if isinstance(each.__doc__, str)]
    return {name for text in texts for name in re.findall(r"\bjuggler\.(\w+)", text)}


def test_docstrings_of_public_classes_name_what_there_is() -> None:
    classes = [each for each in map(juggler.__getattr__, juggler.__all__) if inspect.isclass(each)]
    found = {(each.__name__, name) for each in classes for name in names_in_docstrings(each)}
    assert ("LearnerGroup", "Learner") in found
    assert {(of, name) for of, name in found if not hasattr(juggler, name)} == set()


# The list of what users name: it changes only together with `interface.txt`.


LISTED = Path(__file__).with_name("interface.txt")


def interface() -> list[str]:
    """Public names, commands and keys, one a line."""
    modules = ("juggler", "juggler.client", "juggler.testing")
    names = [f"{each}.{name}" for each in modules for name in importlib.import_module(each).__all__]
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()
    keys = {f"key {row.split('`')[1]}" for row in rows if row.startswith("| `")}
    return sorted({*names, *keys, *(f"command {name}" for name in COMMANDS)})


def test_nothing_is_added_or_removed_by_accident() -> None:
    listed, now = LISTED.read_text().splitlines(), interface()
    added, removed = set(now) - set(listed), set(listed) - set(now)
    assert added == set(), f"add them to {LISTED.name}"
    assert removed == set(), f"remove them from {LISTED.name}"


# docs/configuration.md says what the config dataclasses say.


DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_its_script_prints_today() -> None:
    printed = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    written = (DOCS / "configuration.md").read_text()
    assert written == printed, "run: python docs/make_configuration.py > docs/configuration.md"


def test_the_page_explains_every_key_of_a_run() -> None:
    rows = [row for row in (DOCS / "configuration.md").read_text().splitlines() if row[:3] == "| `"]
    explained = {row.split("`")[1]: row.rstrip("| ").rpartition("|")[2].strip() for row in rows}
    keys = {key.name for part in vars(RunConfig()).values() for key in fields(part)}
    assert keys <= explained.keys()
    assert all(explained.values()), "a key without a word about it"
