"""Tensors of dm_env_rpc: the same numbers as the package dm-env-rpc has, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as theirs
from dm_env_rpc.v1 import tensor_utils
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from juggler.envrunner.dm_env_rpc.tensors import (
    _NUMBERS,
    MAX_ELEMENTS,
    SimulatorError,
    Spec,
    setting,
)
from juggler.envrunner.dm_env_rpc.v1 import dm_env_rpc_pb2 as ours

DTYPES = ["f4", "f8", "i1", "i4", "i8", "u1", "u4", "u8", "?"]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, max_side=5))
)


def spec_of(array: Any) -> Spec:
    return Spec(
        1, "x", array.shape, *next(each for each in _NUMBERS.values() if each[1] == array.dtype)
    )


@given(ARRAYS)
def test_a_tensor_of_the_package_is_decoded_bit_by_bit(array: Any) -> None:
    sent = tensor_utils.pack_tensor(array).SerializeToString()
    read = spec_of(array).decode(ours.Tensor.FromString(sent))
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()


@given(ARRAYS)
def test_the_package_decodes_what_is_encoded_bit_by_bit(array: Any) -> None:
    tensor = ours.Tensor()
    spec_of(array).encode(tensor, array)
    read = np.asarray(
        tensor_utils.unpack_tensor(theirs.Tensor.FromString(tensor.SerializeToString()))
    )
    assert read.dtype == array.dtype
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_floats_that_are_not_packed_are_read_too(dtype: str) -> None:
    array = np.array([1.5, -0.0, np.inf], dtype)
    # Field 1 of FloatArray or DoubleArray with wire type 5 or 1, for each number.
    tag = b"\x0d" if dtype == "f4" else b"\x09"
    numbers = b"".join(tag + number.tobytes() for number in array)
    field = b"\x0a" if dtype == "f4" else b"\x12"
    sent = field + bytes([len(numbers)]) + numbers + b"\x7a\x01\x03"  # shape [3]
    their_reading = tensor_utils.unpack_tensor(theirs.Tensor.FromString(sent))
    np.testing.assert_array_equal(their_reading, array)
    read = spec_of(array).decode(ours.Tensor.FromString(sent))
    assert read.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(2, 3), (-1, 3), (2, -1)])
@pytest.mark.parametrize("elements", [1, 6])
def test_one_element_fills_a_shape_and_one_dimension_may_be_open(
    shape: tuple[int, int], elements: int
) -> None:
    tensor = theirs.Tensor(shape=shape)
    tensor.floats.array.extend(range(5, 5 + elements))
    spec = spec_of(np.zeros((2, 3), "f4"))
    read = spec.decode(ours.Tensor.FromString(tensor.SerializeToString()))
    expected = np.arange(5, 11).reshape(2, 3) if elements == 6 else np.full((2, 3), 5)
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize(
    ("shape", "elements", "words"),
    [
        ((2, 3), 5, "has 5 elements: there must be 6, or one"),
        ((2, 3), 0, "has 0 elements"),
        ((-1, -1), 6, r"came with shape \[-1, -1\]"),
        ((3, 2), 6, r"came with shape \[3, 2\], and its"),
        ((6,), 6, r"came with shape \[6\]"),
        ((), 1, r"came with shape \[\]"),
        ((1 << 30, 1 << 30), 1, "came with shape"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(shape: Any, elements: int, words: str) -> None:
    tensor = ours.Tensor(shape=shape)
    tensor.floats.array = bytes(4 * elements)
    with pytest.raises(SimulatorError, match=f"'x' .*{words}"):
        spec_of(np.zeros((2, 3), "f4")).decode(tensor)


def test_bytes_that_are_no_whole_numbers_are_refused() -> None:
    tensor = ours.Tensor(shape=[2])
    tensor.floats.array = bytes(7)
    with pytest.raises(SimulatorError, match=r"has 1.75 elements"):
        spec_of(np.zeros(2, "f4")).decode(tensor)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (ours.TensorSpec(name="x", dtype=ours.STRING), "is of type STRING"),
        (ours.TensorSpec(name="x", dtype=0), "is of type INVALID_DATA_TYPE"),
        (ours.TensorSpec(name="x", dtype=ours.FLOAT, shape=[2, -1]), "which varies"),
        (ours.TensorSpec(name="x", dtype=ours.FLOAT, shape=[1 << 30] * 8), str(MAX_ELEMENTS)),
    ],
)
def test_a_spec_of_what_cannot_be_an_array_is_refused(message: Any, words: str) -> None:
    with pytest.raises(SimulatorError, match=f"'x' .*{words}"):
        Spec.read(1, message)


def test_bounds_that_contradict_their_spec_are_refused() -> None:
    spec = ours.TensorSpec(name="x", dtype=ours.INT32, shape=[2])
    spec.min.int32s.array.extend([0, 3])
    spec.max.int32s.array.extend([2])
    with pytest.raises(SimulatorError, match="min above its max"):
        Spec.read(1, spec)
    spec.max.int64s.array.extend([9])
    with pytest.raises(SimulatorError, match="is of int32s, and its max of int64s"):
        Spec.read(1, spec)
    spec.max.int32s.array.extend([9, 9, 9])
    with pytest.raises(SimulatorError, match="has 3 elements"):
        Spec.read(1, spec)


@pytest.mark.parametrize(
    "value", [3, -0.5, True, "maze", [1, 2], [[0.5], [1.5]], ["a", "b"], [True, False], []]
)
def test_a_setting_arrives_as_the_package_packs_it(value: Any) -> None:
    sent = setting(value)
    theirs_of_it = theirs.Tensor.FromString(sent.SerializeToString())
    np.testing.assert_array_equal(tensor_utils.unpack_tensor(theirs_of_it), value)
    if value != []:
        assert theirs_of_it == tensor_utils.pack_tensor(value)
