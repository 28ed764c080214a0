from __future__ import annotations

from pathlib import Path

import pytest

from juggler.runtime.actors.credentials import call_metadata, read_token, same_token, why_refused


def test_a_call_with_the_runs_token_and_id_may_go_on() -> None:
    assert why_refused(call_metadata("secret", "run", "me"), "secret", "run") is None


def test_a_call_with_another_token_or_run_is_told_so() -> None:
    assert "token" in (why_refused(call_metadata("guess", "run", "me"), "secret", "run") or "")
    assert "token" in (why_refused((), "secret", "run") or "")
    assert "run other" in (why_refused(call_metadata("s", "run", "me"), "s", "other") or "")


def test_no_token_admits_everybody_but_no_other_thing_does() -> None:
    assert same_token("anything", "")
    assert not same_token("", "secret")
    assert not same_token("secre", "secret")
    assert not same_token("sécret", "secret")


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUGGLER_TOKEN", raising=False)
    assert read_token(None) == ""
    monkeypatch.setenv("JUGGLER_TOKEN", "from the environment")
    assert read_token(None) == "from the environment"
    file = tmp_path / "token"
    file.write_text("from a file\n")
    assert read_token(str(file)) == "from a file"


def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the token file"):
        read_token(str(tmp_path / "none"))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        read_token(str(tmp_path / "empty"))
