from __future__ import annotations

from pathlib import Path

import pytest

from juggler.driver.driver import Listen
from juggler.runtime.actors.credentials import call_metadata, read_token, same_token, why_refused
from juggler.runtime.actors.hub import HubSettings
from juggler.runtime.actors.worker import Contact


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
    for name in ("JUGGLER_TOKEN", "JUGGLER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert read_token(None) == ""
    monkeypatch.setenv("JUGGLER_TOKEN", "from the environment")
    assert read_token(None) == "from the environment"
    file, other = tmp_path / "token", tmp_path / "other"
    file.write_text("from a file\n")
    other.write_text("from another file\n")
    monkeypatch.setenv("JUGGLER_TOKEN_FILE", str(other))
    assert read_token(None) == "from another file"
    assert read_token(str(file)) == "from a file"


@pytest.mark.parametrize("token", ["två", "two\nlines", "nul\0", "x" * 5000])
def test_a_token_that_no_header_can_carry_is_refused_unseen(tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(ValueError, match="must hold one line of at most 4096") as raised:
        read_token(str(file))
    assert token not in str(raised.value)


def test_whatever_holds_a_token_does_not_print_it() -> None:
    holders = (
        Contact("127.0.0.1:1", token="secret"),
        Listen("127.0.0.1:1", token="secret"),
        HubSettings("run", (), token="secret"),
    )
    assert "secret" not in repr(holders)


def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the token file"):
        read_token(str(tmp_path / "none"))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        read_token(str(tmp_path / "empty"))
