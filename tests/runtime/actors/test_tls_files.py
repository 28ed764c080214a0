"""Directories for TLS: making them, and errors about unusable ones."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from support.hub_world import make, mixed

from juggler.cli import main
from juggler.driver.driver import Listen
from juggler.runtime.actors.attachment import Contact
from juggler.runtime.actors.certificates import make_certificates
from juggler.runtime.actors.credentials import call_metadata, read_token, same_token, why_refused
from juggler.runtime.actors.hub import HubSettings
from juggler.runtime.actors.tls import read_tls


def test_certificates_are_for_hosts_and_loopback_and_keys_for_their_owner(tmp_path: Path) -> None:
    paths = make_certificates(tmp_path / "tls", ["gpu1", "10.0.0.1", "gpu1", "::1"], days=30)
    assert [path.name for path in paths] == ["ca.pem", "cert.pem", "key.pem", "token"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes["key.pem"] == modes["token"] == 0o600
    certificate = x509.load_pem_x509_certificate(paths[1].read_bytes())
    extensions = certificate.extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu1", "localhost"]
    addresses = [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.0.0.1", "::1", "127.0.0.1"]
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(paths[0].read_bytes()))


def test_what_is_there_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tmp_path / "tls")
    assert main(["certs", directory]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    assert main(["certs", directory]) == 1
    assert "ca.pem already exists: choose another directory" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()} == before
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "token").write_text("mine")
    assert main(["certs", str(tmp_path / "half")]) == 1
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "gpu1:5005"], "'gpu1:5005' is not a host"),
        (["--host", "bücher.de"], "is not a host"),
    ],
)
def test_wrong_options_of_certs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["certs", str(tmp_path / "tls"), *arguments])
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert not (tmp_path / "tls").exists()


def _with(bad: Path, name: str, content: bytes, good: Path) -> None:
    mixed(bad, ca=good, cert=good, key=good)
    (bad / name).write_bytes(content)


def _sealed(key: Path) -> bytes:
    """A key, with a passphrase."""
    opened = serialization.load_pem_private_key(key.read_bytes(), password=None)
    return opened.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"word"),
    )


#: By what is said: makes a bad directory of a good one and another.
DAMAGES: dict[str, Callable[[Path, Path, Path], object]] = {
    r"bad/ca\.pem is missing: TLS": lambda bad, good, other: None,
    r"bad/key\.pem is missing": lambda bad, good, other: mixed(bad, ca=good, cert=good),
    r"bad/key\.pem is not the key of": lambda bad, good, other: mixed(
        bad, ca=good, cert=good, key=other
    ),
    r"bad/cert\.pem, as verified": lambda bad, good, other: mixed(
        bad, ca=other, cert=good, key=good
    ),
    r"bad/cert\.pem holds no certificate in PEM": lambda bad, good, other: _with(
        bad, "cert.pem", b"hello", good
    ),
    r"bad/ca\.pem is damaged": lambda bad, good, other: _with(
        bad, "ca.pem", (good / "ca.pem").read_bytes()[:200], good
    ),
    r"bad/key\.pem needs a passphrase": lambda bad, good, other: _with(
        bad, "key.pem", _sealed(good / "key.pem"), good
    ),
    r"the authority's certificate .*bad/ca\.pem expired on .* GMT": lambda bad, good, other: (
        make_certificates(bad, [], days=-1)
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_what_is_wrong_with_a_directory_is_said_with_the_file(tmp_path: Path, words: str) -> None:
    for name in ("good", "other"):
        make(tmp_path / name)
    DAMAGES[words](tmp_path / "bad", tmp_path / "good", tmp_path / "other")
    with pytest.raises(ValueError, match=words):
        read_tls(str(tmp_path / "bad"))


def test_a_directory_is_given_or_in_the_environment_or_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUGGLER_TLS", raising=False)
    assert read_tls(None) is None
    make(tmp_path / "tls")
    monkeypatch.setenv("JUGGLER_TLS", str(tmp_path / "tls"))
    tls = read_tls(None)
    assert tls is not None
    assert tls.directory == str(tmp_path / "tls")
    assert "PRIVATE" not in repr(tls)


def test_the_token_beside_certificates_is_the_last_that_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUGGLER_TOKEN", "JUGGLER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    tls = make(tmp_path / "tls")
    token = (tmp_path / "tls" / "token").read_text().strip()
    assert len(token) == 64
    assert read_token(None, tls) == token
    monkeypatch.setenv("JUGGLER_TOKEN", "of-the-environment")
    assert read_token(None, tls) == "of-the-environment"
    (tmp_path / "file").write_text("of-a-file\n")
    monkeypatch.setenv("JUGGLER_TOKEN_FILE", str(tmp_path / "file"))
    assert read_token(None, tls) == "of-a-file"
    (tmp_path / "given").write_text("of-a-given-file\n")
    assert read_token(str(tmp_path / "given"), tls) == "of-a-given-file"
    (tmp_path / "tls" / "token").unlink()
    monkeypatch.delenv("JUGGLER_TOKEN_FILE")
    monkeypatch.delenv("JUGGLER_TOKEN")
    assert read_token(None, tls) == ""


def test_a_call_with_another_token_or_run_is_told_so() -> None:
    assert "token" in (why_refused(call_metadata("guess", "run", "me"), "secret", "run") or "")
    assert "token" in (why_refused((), "secret", "run") or "")
    assert "run 'other'" in (why_refused(call_metadata("s", "run", "me"), "s", "other") or "")


def test_no_token_admits_everybody_but_no_other_thing_does() -> None:
    assert same_token("anything", "")
    assert not same_token("", "secret")
    assert not same_token("secre", "secret")
    assert not same_token("sécret", "secret")


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
