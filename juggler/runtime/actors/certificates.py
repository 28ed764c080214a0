"""Makes a certificate authority and one certificate for a cluster or test.

Only this file needs the package `cryptography`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from juggler.runtime.actors.tls import AUTHORITY, CERTIFICATE, KEY, TOKEN

#: Names of the host itself, which are in every certificate.
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CLOCKS_DIFFER = timedelta(hours=1)


def make_certificates(directory: Path, hosts: Sequence[str], days: float) -> list[Path]:
    """Make ca.pem, cert.pem, key.pem and a token.

    The key of the authority is thrown away.

    Args:
        directory: created if it does not exist.
        hosts: names and IP addresses by which hosts are dialed.
        days: validity of the certificates in days.

    Returns:
        The files.

    Raises:
        FileExistsError: one of the files already exists.
        ValueError: a host is neither a name nor an IP address.
    """
    names = x509.SubjectAlternativeName(
        [_general_name(host) for host in dict.fromkeys([*hosts, *_LOOPBACK])]
    )
    # Nothing is overwritten: other hosts may already use these files.
    paths = [directory / name for name in (AUTHORITY, CERTIFICATE, KEY, TOKEN)]
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{path} already exists: choose another directory")
    # The authority signs one certificate and is then forgotten, so no key can sign another one.
    signing, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    signed_by = x509.SubjectKeyIdentifier.from_public_key(signing.public_key())
    authority = (
        _begun("Juggler authority", signing.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(signed_by, critical=False)
    )
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    # One certificate for both ends: every process is a server and a client.
    certificate = (
        _begun("Juggler", own.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(names, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signed_by),
            critical=False,
        )
    )
    # The key has no passphrase, because workers start unattended.
    contents = [
        *(
            each.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
            for each in (authority, certificate)
        ),
        own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        f"{secrets.token_hex(32)}\n".encode(),
    ]
    # Files are created with their final modes: a key must never be readable by other users.
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, contents, strict=True):
        mode = 0o600 if path.name in (KEY, TOKEN) else 0o644
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    return paths


def _begun(subject: str, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return x509.CertificateBuilder(
        issuer_name=name("Juggler authority"),
        subject_name=name(subject),
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=min(now, end) - _CLOCKS_DIFFER,
        not_valid_after=end,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*._-]+", host):
            raise ValueError(
                f"{host!r} is not a host: expected a name or an IP address, without a port"
            ) from None
        return x509.DNSName(host)


def _key_usage(*uses: str) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{use: use in uses for use in every.split()})
