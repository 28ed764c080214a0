"""Proof that the driver asked for a batch: whoever has the run's token alone cannot make it."""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1 import episodes_pb2

_KEY_BYTES = 32
_PERMIT_BYTES = 16


class Permits:
    """Codes for batches, which only who has the key can make and check.

    The driver gives one out with each sample request. A learner checks it in a batch's header, and
    so need not be told of every request, nor remember any.

    Args:
        key: of the driver and its learners; EnvRunners never see it.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise ValueError(f"a key for permits of {len(key)} bytes: it has {_KEY_BYTES}")
        self.key = key

    @classmethod
    def new(cls) -> Permits:
        return cls(secrets.token_bytes(_KEY_BYTES))

    def of(self, batch_id: int, module_id: str) -> bytes:
        """The permit for a batch of one module."""
        name = batch_id.to_bytes(8, "little") + module_id.encode()
        return blake2b(name, key=self.key, digest_size=_PERMIT_BYTES).digest()

    def check(self, header: episodes_pb2.BatchHeader) -> None:
        """
        Raises:
            WireError: nobody asked for this batch.
        """
        if not hmac.compare_digest(header.permit, self.of(header.batch_id, header.module_id)):
            raise WireError(f"batch {header.batch_id} has no permit of the driver's")
