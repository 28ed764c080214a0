"""Type annotations of user code, as written, without evaluation.

Some are imported only for a type checker, and Python 3.14 evaluates none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any


def signature(of: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable.

    Raises:
        TypeError: it is not callable.
        ValueError: Python knows no signature, as for some C functions.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(of, annotation_format=Format.FORWARDREF)
    return inspect.signature(of)


def typed_by(kind: type[Any]) -> Collection[str]:
    """Names of attributes annotated in the class itself, not its bases."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(kind, format=Format.FORWARDREF).keys()
    return inspect.get_annotations(kind).keys()
