"""Checks for tests of your own algorithms.

    from juggler.testing import check_core, sample_for

    def test_my_core_conforms():
        make_module = partial(MyModule, observation_space, action_space, {})
        make_core = lambda: MyCore(make_module, MyConfig())
        check_core(make_core, sample_for(make_module()))

A check raises an AssertionError that names the broken rule, and the place.
"""

from __future__ import annotations

from juggler.testing.rules import (
    AnythingEnv,
    MakeCore,
    MakeLearner,
    assert_same,
    check_core,
    check_learner,
    copied,
    differ,
    sample_for,
)

__all__ = [
    "AnythingEnv",
    "MakeCore",
    "MakeLearner",
    "assert_same",
    "check_core",
    "check_learner",
    "copied",
    "differ",
    "sample_for",
]
