from juggler.runtime.wire.v1 import tensors_pb2 as _tensors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Space(_message.Message):
    __slots__ = ("box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple", "text", "graph", "sequence")
    BOX_FIELD_NUMBER: _ClassVar[int]
    DISCRETE_FIELD_NUMBER: _ClassVar[int]
    MULTI_DISCRETE_FIELD_NUMBER: _ClassVar[int]
    MULTI_BINARY_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    box: BoxSpace
    discrete: DiscreteSpace
    multi_discrete: MultiDiscreteSpace
    multi_binary: MultiBinarySpace
    dict: DictSpace
    tuple: TupleSpace
    text: TextSpace
    graph: GraphSpace
    sequence: SequenceSpace
    def __init__(self, box: _Optional[_Union[BoxSpace, _Mapping]] = ..., discrete: _Optional[_Union[DiscreteSpace, _Mapping]] = ..., multi_discrete: _Optional[_Union[MultiDiscreteSpace, _Mapping]] = ..., multi_binary: _Optional[_Union[MultiBinarySpace, _Mapping]] = ..., dict: _Optional[_Union[DictSpace, _Mapping]] = ..., tuple: _Optional[_Union[TupleSpace, _Mapping]] = ..., text: _Optional[_Union[TextSpace, _Mapping]] = ..., graph: _Optional[_Union[GraphSpace, _Mapping]] = ..., sequence: _Optional[_Union[SequenceSpace, _Mapping]] = ...) -> None: ...

class BoxSpace(_message.Message):
    __slots__ = ("shape", "dtype", "low", "high", "int_low", "int_high")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    INT_LOW_FIELD_NUMBER: _ClassVar[int]
    INT_HIGH_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _tensors_pb2.DType
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    int_low: _containers.RepeatedScalarFieldContainer[int]
    int_high: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_tensors_pb2.DType, str]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., int_low: _Optional[_Iterable[int]] = ..., int_high: _Optional[_Iterable[int]] = ...) -> None: ...

class DiscreteSpace(_message.Message):
    __slots__ = ("n", "start", "dtype")
    N_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    n: int
    start: int
    dtype: _tensors_pb2.DType
    def __init__(self, n: _Optional[int] = ..., start: _Optional[int] = ..., dtype: _Optional[_Union[_tensors_pb2.DType, str]] = ...) -> None: ...

class MultiDiscreteSpace(_message.Message):
    __slots__ = ("shape", "nvec", "start", "dtype")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NVEC_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    nvec: _containers.RepeatedScalarFieldContainer[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    dtype: _tensors_pb2.DType
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., nvec: _Optional[_Iterable[int]] = ..., start: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_tensors_pb2.DType, str]] = ...) -> None: ...

class MultiBinarySpace(_message.Message):
    __slots__ = ("shape",)
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shape: _Optional[_Iterable[int]] = ...) -> None: ...

class DictSpace(_message.Message):
    __slots__ = ("entries",)
    class Entry(_message.Message):
        __slots__ = ("key", "space")
        KEY_FIELD_NUMBER: _ClassVar[int]
        SPACE_FIELD_NUMBER: _ClassVar[int]
        key: str
        space: Space
        def __init__(self, key: _Optional[str] = ..., space: _Optional[_Union[Space, _Mapping]] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[DictSpace.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[DictSpace.Entry, _Mapping]]] = ...) -> None: ...

class TupleSpace(_message.Message):
    __slots__ = ("spaces",)
    SPACES_FIELD_NUMBER: _ClassVar[int]
    spaces: _containers.RepeatedCompositeFieldContainer[Space]
    def __init__(self, spaces: _Optional[_Iterable[_Union[Space, _Mapping]]] = ...) -> None: ...

class TextSpace(_message.Message):
    __slots__ = ("min_length", "max_length", "characters")
    MIN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    min_length: int
    max_length: int
    characters: str
    def __init__(self, min_length: _Optional[int] = ..., max_length: _Optional[int] = ..., characters: _Optional[str] = ...) -> None: ...

class GraphSpace(_message.Message):
    __slots__ = ("node_space", "edge_space")
    NODE_SPACE_FIELD_NUMBER: _ClassVar[int]
    EDGE_SPACE_FIELD_NUMBER: _ClassVar[int]
    node_space: Space
    edge_space: Space
    def __init__(self, node_space: _Optional[_Union[Space, _Mapping]] = ..., edge_space: _Optional[_Union[Space, _Mapping]] = ...) -> None: ...

class SequenceSpace(_message.Message):
    __slots__ = ("feature_space", "stack")
    FEATURE_SPACE_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    feature_space: Space
    stack: bool
    def __init__(self, feature_space: _Optional[_Union[Space, _Mapping]] = ..., stack: bool = ...) -> None: ...
