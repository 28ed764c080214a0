"""Errors for readers who may have written some of the frames."""

from __future__ import annotations

import re
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from gymnasium import spaces

from juggler.runtime.own_frames import traceback_of
from juggler.runtime.wire.structures import space_leaves, tree_map

_CALLS = re.compile(r"^  \[(a call|\d+ calls) in Juggler, to (\S+), line \d+, in (\S+)\]$", re.M)


def _raises(_: object) -> None:
    raise KeyError("no contact")


def test_calls_in_juggler_between_those_of_the_reader_are_one_line() -> None:
    with pytest.raises(KeyError) as got:
        tree_map(_raises, {"a": {"b": np.zeros(3)}})
    whole, shown = "".join(traceback.format_exception(got.value)), traceback_of(got.value)
    assert len(re.findall(r"structures\.py", whole)) > 1
    ((count, place, _),) = _CALLS.findall(shown)
    assert count == f"{len(re.findall(r'structures.py', whole))} calls"
    assert place == "runtime/wire/structures.py"
    assert "tree_map(_raises" in shown
    assert shown.endswith(whole[whole.rindex("  File") :]), "what follows is as Python shows it"


def test_the_frame_that_raised_is_shown_also_if_it_is_jugglers() -> None:
    with pytest.raises(Exception, match="Text") as got:
        space_leaves(spaces.Dict(a=spaces.Dict(b=spaces.Text(3))))
    whole, shown = "".join(traceback.format_exception(got.value)), traceback_of(got.value)
    assert len(_CALLS.findall(shown)) == 1
    assert shown.endswith(whole[whole.rindex("  File") :])


def test_an_error_that_came_from_another_is_shown_with_it() -> None:
    def wraps() -> None:
        try:
            tree_map(_raises, {"a": np.zeros(3)})
        except KeyError as error:
            raise RuntimeError("it fell over") from error

    with pytest.raises(RuntimeError) as got:
        wraps()
    shown = traceback_of(got.value)
    assert len(_CALLS.findall(shown)) == 1
    assert shown.index("no contact") < shown.index("direct cause") < shown.index("it fell over")


def test_an_error_of_juggler_alone_is_shown_whole() -> None:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(space_leaves, spaces.Text(3)).exception()
    assert error is not None
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # of the pool
    assert traceback_of(error) == "".join(traceback.format_exception(error))
    assert "structures.py" in traceback_of(error)
