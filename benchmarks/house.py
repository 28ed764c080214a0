"""Measures how large the code is, and how plain its English.

    python benchmarks/house.py

prints one number a line; with `--where`, also the functions to shorten or to explain.
`tests/docs/test_house.py` keeps the numbers of limits.json from growing.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS, DOCS = ROOT / "juggler", ROOT / "tests", ROOT / "docs"
#: Words in place of the noun that a reader needs, and words that are out of use.
AVOIDED = re.compile(
    r"\b(who|whoever|nobody|somebody|whatever|anew|those that|so many|(?<!no[ /-])such(?! as)"
    r"|begins? again|going on|in place of|(as|so) far as|unheard|hears?|heard|likewise|by then"
    r"|shall|lets? go|tells? whether)\b",
    re.IGNORECASE,
)
LONGEST_HEAD = 12  # words in the first paragraph of a docstring
LARGEST_FILE = 800  # lines
LONGEST_FUNCTION = 50  # lines after the docstring: a screen
LONGEST_STRETCH = 15  # lines of code without a comment

Defined = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> list[Path]:
    """The Python files that people write below a folder."""
    return sorted(path for path in root.rglob("*.py") if not path.name.endswith("_pb2.py"))


def lines(paths: list[Path]) -> int:
    """All lines of the files, with blank ones."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def trees(paths: list[Path]) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in paths}


def importers(files: dict[Path, ast.Module]) -> Counter[str]:
    """By module, how many of the files import it or a name of it."""
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    counts: Counter[str] = Counter()
    for tree in files.values():
        named: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                named.add(node.module)
                named.update(f"{node.module}.{alias.name}" for alias in node.names)
        counts.update(named & known)
    return counts


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and texts of a file, with their line numbers."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type in _PARTS:
            yield token.start[0], token.string


# From Python 3.12 on, an f-string is several tokens.
_PARTS = {getattr(tokenize, name) for name in ("FSTRING_MIDDLE",) if hasattr(tokenize, name)}


def avoided_words(paths: list[Path]) -> list[tuple[Path, int, str]]:
    """Words to avoid, with their files and lines."""
    return [
        (path, line + text[: found.start()].count("\n"), found[0])
        for path in paths
        for line, text in said(path)
        for found in AVOIDED.finditer(text)
    ]


def long_heads(files: dict[Path, ast.Module]) -> list[tuple[Path, int]]:
    """Files and lines of docstrings whose first paragraph is too long."""
    return [
        (path, getattr(node, "lineno", 1))
        for path, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Defined)
        and len((ast.get_docstring(node) or "").split("\n\n")[0].split()) > LONGEST_HEAD
    ]


def bodies(path: Path, tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """First line and lines of each function, without its docstring and blank lines."""
    text = path.read_text().splitlines()
    for node in ast.walk(tree):
        if isinstance(node, Defined):
            first = node.body[1:] if ast.get_docstring(node) else node.body
            end = node.end_lineno or node.lineno
            body = text[first[0].lineno - 1 : end] if first else []
            yield node.lineno, [line.strip() for line in body if line.strip()]


def long_functions(files: dict[Path, ast.Module]) -> list[tuple[Path, int]]:
    """Files and lines of functions that do not fit a screen."""
    return [
        (path, line)
        for path, tree in files.items()
        for line, body in bodies(path, tree)
        if len(body) > LONGEST_FUNCTION
    ]


def long_stretches(files: dict[Path, ast.Module]) -> list[tuple[Path, int]]:
    """Files and lines of functions with too many lines in a row without a comment."""
    return [
        (path, line)
        for path, tree in files.items()
        for line, body in bodies(path, tree)
        if max(map(len, _between_comments(body))) > LONGEST_STRETCH
    ]


def _between_comments(body: list[str]) -> list[list[str]]:
    """Lines of code, split at the comments."""
    stretches: list[list[str]] = [[]]
    for line in body:
        if line.startswith("#"):
            stretches.append([])
        else:
            stretches[-1].append(line)
    return stretches


def measures() -> dict[str, int]:
    """What is measured, by name."""
    package, tests = sources(PACKAGE), sources(TESTS)
    files = trees(package)
    nodes = Counter(
        "functions" if isinstance(node, Defined) else "classes"
        for tree in files.values()
        for node in ast.walk(tree)
        if isinstance(node, Defined | ast.ClassDef)
    )
    counts = importers(files)
    # That file has the words themselves, as an example.
    spoken = [path for path in tests if path.name != "test_house.py"]
    pages = (DOCS / "configuration.md").read_text()
    keys = set(re.findall(r"^\| `([^`]+)`", pages, re.MULTILINE))
    return {
        "package lines": lines(package),
        "package files": len(package),
        **nodes,
        "files with one importer": sum(count == 1 for count in counts.values()),
        "files over 800 lines": sum(lines([path]) > LARGEST_FILE for path in package),
        "test lines": lines(tests),
        "test files": len(tests),
        "keys": len(keys),
        "docs lines": lines(sorted(DOCS.rglob("*.md"))),
        "avoided words": len(avoided_words(package)),
        "avoided words in tests": len(avoided_words(spoken)),
        "long docstring heads": len(long_heads(files)),
        "long docstring heads in tests": len(long_heads(trees(tests))),
        "functions longer than a screen": len(long_functions(files)),
        "functions that need a comment": len(long_stretches(files)),
    }


if __name__ == "__main__":
    for name, number in measures().items():
        print(f"{number:8,}  {name}")
    if sys.argv[1:] == ["--where"]:  # what to shorten or explain
        found = trees(sources(PACKAGE))
        for path, line in sorted(long_functions(found) + long_stretches(found)):
            print(f"{path.relative_to(ROOT)}:{line}")
