from juggler.runtime.wire.v1 import spaces_pb2 as _spaces_pb2
from juggler.runtime.wire.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AddModule(_message.Message):
    __slots__ = ("module_id", "config", "observation_space", "action_space", "seed")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    config: str
    observation_space: _spaces_pb2.Space
    action_space: _spaces_pb2.Space
    seed: int
    def __init__(self, module_id: _Optional[str] = ..., config: _Optional[str] = ..., observation_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., action_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class RemoveModule(_message.Message):
    __slots__ = ("module_id",)
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    def __init__(self, module_id: _Optional[str] = ...) -> None: ...

class UpdateModule(_message.Message):
    __slots__ = ("module_id", "batch_ids", "minibatch_size", "num_epochs")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    batch_ids: _containers.RepeatedScalarFieldContainer[int]
    minibatch_size: int
    num_epochs: int
    def __init__(self, module_id: _Optional[str] = ..., batch_ids: _Optional[_Iterable[int]] = ..., minibatch_size: _Optional[int] = ..., num_epochs: _Optional[int] = ...) -> None: ...

class ModuleUpdated(_message.Message):
    __slots__ = ("metrics", "live_steps", "updates")
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    metrics: _training_pb2.ModuleMetrics
    live_steps: int
    updates: int
    def __init__(self, metrics: _Optional[_Union[_training_pb2.ModuleMetrics, _Mapping]] = ..., live_steps: _Optional[int] = ..., updates: _Optional[int] = ...) -> None: ...

class FetchModule(_message.Message):
    __slots__ = ("module_id", "weights")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    weights: bool
    def __init__(self, module_id: _Optional[str] = ..., weights: bool = ...) -> None: ...

class LoadModule(_message.Message):
    __slots__ = ("module_id", "chunk", "last", "weights")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    chunk: bytes
    last: bool
    weights: bool
    def __init__(self, module_id: _Optional[str] = ..., chunk: _Optional[bytes] = ..., last: bool = ..., weights: bool = ...) -> None: ...
