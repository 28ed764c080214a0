"""Help texts of options, which are docstrings, in whole paragraphs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import docstring_parser

#: A line break that ends neither a paragraph nor an item of a list.
_WITHIN: Final = re.compile(r"(?<!\n)\n(?!\n|- )")


@contextmanager
def whole_paragraphs() -> Iterator[None]:
    """Within, tyro reads docstrings whose lines are joined. By itself it breaks a line wherever the
    next one in the file is indented, as those of attributes are."""
    parse = docstring_parser.parse_from_object

    def joined(*arguments: Any, **options: Any) -> docstring_parser.Docstring:
        found = parse(*arguments, **options)
        for each in found.params:
            if each.description:
                each.description = _WITHIN.sub(" ", inspect.cleandoc(each.description))
        return found

    docstring_parser.parse_from_object = joined
    try:
        yield
    finally:
        docstring_parser.parse_from_object = parse
