from juggler.runtime.wire.v1 import training_pb2 as _training_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("env_runners", "learners")
    ENV_RUNNERS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    env_runners: int
    learners: int
    def __init__(self, env_runners: _Optional[int] = ..., learners: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("before", "learners_before")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    before: int
    learners_before: int
    def __init__(self, before: _Optional[int] = ..., learners_before: _Optional[int] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "run_dir", "env", "algorithm", "phase", "updates", "queues", "staleness", "sample_request_seconds", "update_seconds", "driver", "workers", "log_messages", "metrics")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_REQUEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_dir: str
    env: str
    algorithm: str
    phase: str
    updates: int
    queues: Queues
    staleness: Histogram
    sample_request_seconds: Histogram
    update_seconds: Histogram
    driver: Resources
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    log_messages: _containers.RepeatedCompositeFieldContainer[LogMessage]
    metrics: str
    def __init__(self, run_id: _Optional[str] = ..., run_dir: _Optional[str] = ..., env: _Optional[str] = ..., algorithm: _Optional[str] = ..., phase: _Optional[str] = ..., updates: _Optional[int] = ..., queues: _Optional[_Union[Queues, _Mapping]] = ..., staleness: _Optional[_Union[Histogram, _Mapping]] = ..., sample_request_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., update_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., driver: _Optional[_Union[Resources, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., log_messages: _Optional[_Iterable[_Union[LogMessage, _Mapping]]] = ..., metrics: _Optional[str] = ...) -> None: ...

class Queues(_message.Message):
    __slots__ = ("requests_in_flight", "updates_in_flight", "queued_batches", "queued_steps")
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_STEPS_FIELD_NUMBER: _ClassVar[int]
    requests_in_flight: int
    updates_in_flight: int
    queued_batches: int
    queued_steps: int
    def __init__(self, requests_in_flight: _Optional[int] = ..., updates_in_flight: _Optional[int] = ..., queued_batches: _Optional[int] = ..., queued_steps: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class Resources(_message.Message):
    __slots__ = ("cpu_seconds", "resident_bytes", "device_bytes")
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpu_seconds: float
    resident_bytes: int
    device_bytes: int
    def __init__(self, cpu_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "host", "pid", "incarnation", "state", "device", "version", "steps", "steps_per_second", "seconds_silent", "restarts", "last_error", "seconds_since_error", "seconds", "resources", "counts", "simulators")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SILENT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SIMULATORS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    host: str
    pid: int
    incarnation: str
    state: str
    device: str
    version: _training_pb2.WeightsVersion
    steps: int
    steps_per_second: float
    seconds_silent: float
    restarts: int
    last_error: str
    seconds_since_error: float
    seconds: _containers.ScalarMap[str, float]
    resources: Resources
    counts: _containers.ScalarMap[str, float]
    simulators: _training_pb2.Simulators
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., state: _Optional[str] = ..., device: _Optional[str] = ..., version: _Optional[_Union[_training_pb2.WeightsVersion, _Mapping]] = ..., steps: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., seconds_silent: _Optional[float] = ..., restarts: _Optional[int] = ..., last_error: _Optional[str] = ..., seconds_since_error: _Optional[float] = ..., seconds: _Optional[_Mapping[str, float]] = ..., resources: _Optional[_Union[Resources, _Mapping]] = ..., counts: _Optional[_Mapping[str, float]] = ..., simulators: _Optional[_Union[_training_pb2.Simulators, _Mapping]] = ...) -> None: ...

class LogMessage(_message.Message):
    __slots__ = ("time", "level", "text")
    TIME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time: float
    level: str
    text: str
    def __init__(self, time: _Optional[float] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...
