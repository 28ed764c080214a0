"""What people are told of an environment that raises."""

from __future__ import annotations

import pytest

from juggler.envrunner.failures import EnvironmentFailed

IN_A_LIBRARY = "/venv/lib/python3.11/site-packages/toys/art.py"


def _failed(call: str) -> EnvironmentFailed:
    """A call within an installed library does not suit the function that it is for."""
    code = compile("def draw(x): ...\n\n\ndraw()", IN_A_LIBRARY, "exec")
    with pytest.raises(TypeError) as raised:
        exec(code, {})
    raised.value.__traceback__ = raised.tb.tb_next  # without this function's own frame
    return EnvironmentFailed.during("environment 0 (toy)", call, raised.value)


def test_where_a_library_failed_in_a_step_is_shown() -> None:
    assert IN_A_LIBRARY in _failed("step").traceback


def test_arguments_that_a_constructor_does_not_take_are_told_by_the_reason_alone() -> None:
    failed = _failed("constructor")
    assert "missing 1 required positional argument: 'x'" in failed.reason
    assert not failed.traceback


def test_an_exception_of_a_step_lasts_if_it_comes_again_in_the_same_round() -> None:
    failed = _failed("step")
    failed.in_round(7)
    assert failed.lasting
    assert "environment 0 (toy) failed in step: " in str(failed)
    assert str(failed).endswith("(in round 7 of its EnvRunner)")


@pytest.mark.parametrize("call", ["reset", "step"])
def test_what_may_pass_by_itself_does_not_last(call: str) -> None:
    failed = EnvironmentFailed("environment 0", call, "it did not answer within 5 s")
    failed.in_round(1)
    assert not failed.lasting


def test_a_reset_as_gym_had_it_is_told_what_gymnasium_has() -> None:
    def reset() -> None: ...

    with pytest.raises(TypeError) as raised:
        reset(seed=1)  # type: ignore[call-arg]
    failed = EnvironmentFailed.during("environment 0 (old)", "reset", raised.value)
    assert "write reset(self, *, seed=None, options=None)" in failed.reason
