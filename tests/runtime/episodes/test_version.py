"""Versions of weights."""

from __future__ import annotations

from juggler.runtime.episodes.version import Version


def test_the_version_of_a_run_grows_though_a_module_goes_back_to_an_earlier_update() -> None:
    before = Version.of_run([Version(1, 50), Version(1, 90)])
    after = Version.of_run([Version(1, 50), Version(2, 40)])
    assert before == Version(2, 140)
    assert after == Version(3, 90)
    assert before < after


def test_the_version_of_a_run_with_one_module_is_that_of_the_module() -> None:
    assert Version.of_run([Version(3, 7)]) == Version(3, 7)
