"""NumPy's dtypes and their numbers on the wire."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from juggler.runtime.wire.errors import WireError
from juggler.runtime.wire.v1.tensors_pb2 import DType

_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.DTYPE_BOOL: np.dtype(np.bool_),
    DType.DTYPE_INT8: np.dtype(np.int8),
    DType.DTYPE_INT16: np.dtype("<i2"),
    DType.DTYPE_INT32: np.dtype("<i4"),
    DType.DTYPE_INT64: np.dtype("<i8"),
    DType.DTYPE_UINT8: np.dtype(np.uint8),
    DType.DTYPE_UINT16: np.dtype("<u2"),
    DType.DTYPE_UINT32: np.dtype("<u4"),
    DType.DTYPE_UINT64: np.dtype("<u8"),
    DType.DTYPE_FLOAT16: np.dtype("<f2"),
    DType.DTYPE_FLOAT32: np.dtype("<f4"),
    DType.DTYPE_FLOAT64: np.dtype("<f8"),
    DType.DTYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


def dtype_to_number(dtype: np.dtype[Any]) -> DType:
    """The wire's number for a dtype of either byte order.

    Raises:
        WireError: the wire has no such dtype.
    """
    number = _NUMBERS.get(dtype) or _NUMBERS.get(dtype.newbyteorder("<"))
    if number is None:
        known = ", ".join(str(known) for known in _NUMBERS)
        raise WireError(f"dtype {dtype} cannot be sent; convert it to one of {known}")
    return number


def dtype_from_number(number: DType) -> np.dtype[Any]:
    """The little-endian dtype with this number on the wire.

    Raises:
        WireError: no dtype has this number.
    """
    if not number:
        raise WireError("no dtype is given; tensors.proto lists those that are known")
    dtype = _DTYPES.get(number)
    if dtype is None:
        raise WireError(f"dtype number {number} is not known; tensors.proto lists those that are")
    return dtype
