"""Hashes as random numbers.

They need no generator, do not make the host wait, and are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_32_BITS = 2**32 - 1


def mixed(x: Tensor) -> Tensor:
    """Hash each number in x [...] -> [...], int64.

    A bijection on [0, 2³²) of xorshifts and multiplications; products stay below 2⁶³.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _32_BITS
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)


def content_key(x: Tensor) -> Tensor:
    """Hash numbers [...] -> [], independent of order, in `mixed`'s range."""
    numbers = (x.double() * 2**20).to(torch.int64) & _32_BITS  # [...]
    return mixed(numbers).sum() & _32_BITS  # []


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return numbers [*shape] that are uniform in [0, 1), float32.

    Args:
        key: [] int64, in the range of `mixed`; each key gives different numbers.
        shape: shape of the result.
    """
    places = torch.arange(1, math.prod(shape) + 1, device=key.device)  # [n]
    numbers = mixed(mixed(places) ^ mixed(key))  # [n]
    return ((numbers >> 8).to(torch.float32) * 2**-24).view(*shape)  # [*shape]
