from juggler.runtime.wire.v1 import tensors_pb2 as _tensors_pb2
from juggler.runtime.wire.v1 import training_pb2 as _training_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchHeader(_message.Message):
    __slots__ = ("module_id", "batch_id", "envrunner", "generation", "live_steps", "version")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ENVRUNNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    batch_id: int
    envrunner: str
    generation: int
    live_steps: int
    version: _training_pb2.WeightsVersion
    def __init__(self, module_id: _Optional[str] = ..., batch_id: _Optional[int] = ..., envrunner: _Optional[str] = ..., generation: _Optional[int] = ..., live_steps: _Optional[int] = ..., version: _Optional[_Union[_training_pb2.WeightsVersion, _Mapping]] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("batch_id", "refused")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    refused: str
    def __init__(self, batch_id: _Optional[int] = ..., refused: _Optional[str] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("module_id", "subscriber")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBER_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    subscriber: str
    def __init__(self, module_id: _Optional[str] = ..., subscriber: _Optional[str] = ...) -> None: ...

class WeightsHeader(_message.Message):
    __slots__ = ("module_id", "version")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    version: _training_pb2.WeightsVersion
    def __init__(self, module_id: _Optional[str] = ..., version: _Optional[_Union[_training_pb2.WeightsVersion, _Mapping]] = ...) -> None: ...
