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
    __slots__ = ("run_id", "run_dir", "env", "algorithm", "phase", "wall_seconds", "version", "updates", "restarts", "steps_per_second", "steps", "queues", "episodes", "staleness", "sample_request_seconds", "update_seconds", "driver", "workers", "log_messages", "modules", "agents", "league")
    class Episodes(_message.Message):
        __slots__ = ("ended", "return_mean", "length_mean", "evaluation_return_mean")
        ENDED_FIELD_NUMBER: _ClassVar[int]
        RETURN_MEAN_FIELD_NUMBER: _ClassVar[int]
        LENGTH_MEAN_FIELD_NUMBER: _ClassVar[int]
        EVALUATION_RETURN_MEAN_FIELD_NUMBER: _ClassVar[int]
        ended: int
        return_mean: float
        length_mean: float
        evaluation_return_mean: float
        def __init__(self, ended: _Optional[int] = ..., return_mean: _Optional[float] = ..., length_mean: _Optional[float] = ..., evaluation_return_mean: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_REQUEST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    LOG_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    LEAGUE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_dir: str
    env: str
    algorithm: str
    phase: str
    wall_seconds: float
    version: _training_pb2.WeightsVersion
    updates: int
    restarts: int
    steps_per_second: float
    steps: StepBooks
    queues: Queues
    episodes: RunStatus.Episodes
    staleness: Histogram
    sample_request_seconds: Histogram
    update_seconds: Histogram
    driver: Resources
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    log_messages: _containers.RepeatedCompositeFieldContainer[LogMessage]
    modules: _containers.RepeatedCompositeFieldContainer[ModuleStatus]
    agents: _containers.RepeatedCompositeFieldContainer[AgentStatus]
    league: LeagueStatus
    def __init__(self, run_id: _Optional[str] = ..., run_dir: _Optional[str] = ..., env: _Optional[str] = ..., algorithm: _Optional[str] = ..., phase: _Optional[str] = ..., wall_seconds: _Optional[float] = ..., version: _Optional[_Union[_training_pb2.WeightsVersion, _Mapping]] = ..., updates: _Optional[int] = ..., restarts: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., steps: _Optional[_Union[StepBooks, _Mapping]] = ..., queues: _Optional[_Union[Queues, _Mapping]] = ..., episodes: _Optional[_Union[RunStatus.Episodes, _Mapping]] = ..., staleness: _Optional[_Union[Histogram, _Mapping]] = ..., sample_request_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., update_seconds: _Optional[_Union[Histogram, _Mapping]] = ..., driver: _Optional[_Union[Resources, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., log_messages: _Optional[_Iterable[_Union[LogMessage, _Mapping]]] = ..., modules: _Optional[_Iterable[_Union[ModuleStatus, _Mapping]]] = ..., agents: _Optional[_Iterable[_Union[AgentStatus, _Mapping]]] = ..., league: _Optional[_Union[LeagueStatus, _Mapping]] = ...) -> None: ...

class ModuleStatus(_message.Message):
    __slots__ = ("module_id", "version", "steps", "return_mean", "steps_played")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RETURN_MEAN_FIELD_NUMBER: _ClassVar[int]
    STEPS_PLAYED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    version: _training_pb2.WeightsVersion
    steps: StepBooks
    return_mean: float
    steps_played: int
    def __init__(self, module_id: _Optional[str] = ..., version: _Optional[_Union[_training_pb2.WeightsVersion, _Mapping]] = ..., steps: _Optional[_Union[StepBooks, _Mapping]] = ..., return_mean: _Optional[float] = ..., steps_played: _Optional[int] = ...) -> None: ...

class AgentStatus(_message.Message):
    __slots__ = ("agent", "episodes", "return_mean")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    RETURN_MEAN_FIELD_NUMBER: _ClassVar[int]
    agent: str
    episodes: int
    return_mean: float
    def __init__(self, agent: _Optional[str] = ..., episodes: _Optional[int] = ..., return_mean: _Optional[float] = ...) -> None: ...

class LeagueStatus(_message.Message):
    __slots__ = ("players", "historical", "learning")
    PLAYERS_FIELD_NUMBER: _ClassVar[int]
    HISTORICAL_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    players: int
    historical: int
    learning: _containers.RepeatedCompositeFieldContainer[PlayerStatus]
    def __init__(self, players: _Optional[int] = ..., historical: _Optional[int] = ..., learning: _Optional[_Iterable[_Union[PlayerStatus, _Mapping]]] = ...) -> None: ...

class PlayerStatus(_message.Message):
    __slots__ = ("player_id", "role", "elo", "win_rate", "steps", "copies", "resets", "win_rate_low", "win_rate_high", "nash")
    PLAYER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ELO_FIELD_NUMBER: _ClassVar[int]
    WIN_RATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    WIN_RATE_LOW_FIELD_NUMBER: _ClassVar[int]
    WIN_RATE_HIGH_FIELD_NUMBER: _ClassVar[int]
    NASH_FIELD_NUMBER: _ClassVar[int]
    player_id: str
    role: str
    elo: float
    win_rate: float
    steps: int
    copies: int
    resets: int
    win_rate_low: float
    win_rate_high: float
    nash: float
    def __init__(self, player_id: _Optional[str] = ..., role: _Optional[str] = ..., elo: _Optional[float] = ..., win_rate: _Optional[float] = ..., steps: _Optional[int] = ..., copies: _Optional[int] = ..., resets: _Optional[int] = ..., win_rate_low: _Optional[float] = ..., win_rate_high: _Optional[float] = ..., nash: _Optional[float] = ...) -> None: ...

class StepBooks(_message.Message):
    __slots__ = ("sampled", "trained", "dropped", "in_flight", "lost_unreported")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOST_UNREPORTED_FIELD_NUMBER: _ClassVar[int]
    sampled: int
    trained: int
    dropped: _containers.ScalarMap[str, int]
    in_flight: int
    lost_unreported: int
    def __init__(self, sampled: _Optional[int] = ..., trained: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., in_flight: _Optional[int] = ..., lost_unreported: _Optional[int] = ...) -> None: ...

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
