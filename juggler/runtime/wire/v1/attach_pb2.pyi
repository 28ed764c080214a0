from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromWorker(_message.Message):
    __slots__ = ("hello", "heartbeat", "replies", "reports", "farewell")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    replies: _containers.RepeatedCompositeFieldContainer[Reply]
    reports: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    farewell: Farewell
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., replies: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ..., reports: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "index", "incarnation", "run_id", "token", "host", "pid", "devices", "data_addresses", "local", "predecessor")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: str
    index: int
    incarnation: str
    run_id: str
    token: str
    host: str
    pid: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    local: bool
    predecessor: str
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[str] = ..., run_id: _Optional[str] = ..., token: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., data_addresses: _Optional[_Iterable[str]] = ..., local: bool = ..., predecessor: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("seconds_since_progress", "resident_bytes", "device_bytes", "held_up_by", "stack", "cpu_seconds")
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_UP_BY_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds_since_progress: float
    resident_bytes: int
    device_bytes: int
    held_up_by: str
    stack: str
    cpu_seconds: float
    def __init__(self, seconds_since_progress: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ..., held_up_by: _Optional[str] = ..., stack: _Optional[str] = ..., cpu_seconds: _Optional[float] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "last", "body", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    last: bool
    body: _any_pb2.Any
    failure: Failure
    def __init__(self, id: _Optional[int] = ..., last: bool = ..., body: _Optional[_Union[_any_pb2.Any, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("message", "traceback", "lasting")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LASTING_FIELD_NUMBER: _ClassVar[int]
    message: str
    traceback: str
    lasting: bool
    def __init__(self, message: _Optional[str] = ..., traceback: _Optional[str] = ..., lasting: bool = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "failure", "unanswered")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failure: Failure
    unanswered: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reason: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., unanswered: _Optional[_Iterable[int]] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("welcome", "refusal", "commands")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "run_id", "heartbeat_seconds")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    run_id: str
    heartbeat_seconds: float
    def __init__(self, worker_id: _Optional[str] = ..., run_id: _Optional[str] = ..., heartbeat_seconds: _Optional[float] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("id", "body")
    ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    id: int
    body: _any_pb2.Any
    def __init__(self, id: _Optional[int] = ..., body: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
