from juggler.runtime.wire.v1 import spaces_pb2 as _spaces_pb2
from juggler.runtime.wire.v1 import tensors_pb2 as _tensors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    REMOTE_INFERENCE: _ClassVar[Mode]
    LOCAL_INFERENCE: _ClassVar[Mode]
    LOGGED_DATA: _ClassVar[Mode]
MODE_UNSPECIFIED: Mode
REMOTE_INFERENCE: Mode
LOCAL_INFERENCE: Mode
LOGGED_DATA: Mode

class FromSimulator(_message.Message):
    __slots__ = ("hello", "steps", "recording", "policy", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    steps: StepBatch
    recording: Recording
    policy: PolicyRequest
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., steps: _Optional[_Union[StepBatch, _Mapping]] = ..., recording: _Optional[_Union[Recording, _Mapping]] = ..., policy: _Optional[_Union[PolicyRequest, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ToSimulator(_message.Message):
    __slots__ = ("welcome", "actions", "error", "notice", "recorded", "policy", "new_policy")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NEW_POLICY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    actions: ActionBatch
    error: Error
    notice: Notice
    recorded: Recorded
    policy: PolicyChunk
    new_policy: NewPolicy
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., actions: _Optional[_Union[ActionBatch, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., recorded: _Optional[_Union[Recorded, _Mapping]] = ..., policy: _Optional[_Union[PolicyChunk, _Mapping]] = ..., new_policy: _Optional[_Union[NewPolicy, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "client", "mode", "environments", "agents", "resume_token", "real_time", "info_names")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REAL_TIME_FIELD_NUMBER: _ClassVar[int]
    INFO_NAMES_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    client: str
    mode: Mode
    environments: int
    agents: _containers.RepeatedCompositeFieldContainer[Agent]
    resume_token: str
    real_time: bool
    info_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., client: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., environments: _Optional[int] = ..., agents: _Optional[_Iterable[_Union[Agent, _Mapping]]] = ..., resume_token: _Optional[str] = ..., real_time: bool = ..., info_names: _Optional[_Iterable[str]] = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("id", "observation_space", "action_space", "policy")
    ID_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    id: str
    observation_space: _spaces_pb2.Space
    action_space: _spaces_pb2.Space
    policy: str
    def __init__(self, id: _Optional[str] = ..., observation_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., action_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "run_id", "session_id", "resume_token", "resume_seconds", "resumed", "last_seq", "batches_in_flight", "message_bytes", "fragment_steps")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    BATCHES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    session_id: str
    resume_token: str
    resume_seconds: float
    resumed: bool
    last_seq: int
    batches_in_flight: int
    message_bytes: int
    fragment_steps: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., session_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., resume_seconds: _Optional[float] = ..., resumed: bool = ..., last_seq: _Optional[int] = ..., batches_in_flight: _Optional[int] = ..., message_bytes: _Optional[int] = ..., fragment_steps: _Optional[int] = ...) -> None: ...

class NamedTensor(_message.Message):
    __slots__ = ("path", "dtype", "shape", "data")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: _containers.RepeatedScalarFieldContainer[str]
    dtype: _tensors_pb2.DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, path: _Optional[_Iterable[str]] = ..., dtype: _Optional[_Union[_tensors_pb2.DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("seq", "agents", "continuing", "idle_rewards")
    class IdleRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUING_FIELD_NUMBER: _ClassVar[int]
    IDLE_REWARDS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    agents: _containers.RepeatedCompositeFieldContainer[Rows]
    continuing: _containers.RepeatedScalarFieldContainer[int]
    idle_rewards: _containers.ScalarMap[int, float]
    def __init__(self, seq: _Optional[int] = ..., agents: _Optional[_Iterable[_Union[Rows, _Mapping]]] = ..., continuing: _Optional[_Iterable[int]] = ..., idle_rewards: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("agent", "environments", "rewards", "terminated", "truncated", "observations", "final_rows", "final_observations", "paused", "infos", "early_rewards")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    FINAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINAL_OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    INFOS_FIELD_NUMBER: _ClassVar[int]
    EARLY_REWARDS_FIELD_NUMBER: _ClassVar[int]
    agent: int
    environments: _containers.RepeatedScalarFieldContainer[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    terminated: _containers.RepeatedScalarFieldContainer[bool]
    truncated: _containers.RepeatedScalarFieldContainer[bool]
    observations: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    final_rows: _containers.RepeatedScalarFieldContainer[int]
    final_observations: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    paused: _containers.RepeatedScalarFieldContainer[bool]
    infos: _containers.RepeatedScalarFieldContainer[float]
    early_rewards: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, agent: _Optional[int] = ..., environments: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Iterable[float]] = ..., terminated: _Optional[_Iterable[bool]] = ..., truncated: _Optional[_Iterable[bool]] = ..., observations: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., final_rows: _Optional[_Iterable[int]] = ..., final_observations: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., paused: _Optional[_Iterable[bool]] = ..., infos: _Optional[_Iterable[float]] = ..., early_rewards: _Optional[_Iterable[float]] = ...) -> None: ...

class ActionBatch(_message.Message):
    __slots__ = ("seq", "agents")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    agents: _containers.RepeatedCompositeFieldContainer[Actions]
    def __init__(self, seq: _Optional[int] = ..., agents: _Optional[_Iterable[_Union[Actions, _Mapping]]] = ...) -> None: ...

class Actions(_message.Message):
    __slots__ = ("agent", "policy", "version", "actions")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    agent: int
    policy: str
    version: PolicyVersion
    actions: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    def __init__(self, agent: _Optional[int] = ..., policy: _Optional[str] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ..., actions: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("generation", "update")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    update: int
    def __init__(self, generation: _Optional[int] = ..., update: _Optional[int] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("seq", "agent", "environment", "starts", "terminated", "truncated", "observations", "actions", "rewards", "action_logp", "version", "infos")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_LOGP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INFOS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    agent: int
    environment: int
    starts: bool
    terminated: bool
    truncated: bool
    observations: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    actions: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    action_logp: _containers.RepeatedScalarFieldContainer[float]
    version: PolicyVersion
    infos: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, seq: _Optional[int] = ..., agent: _Optional[int] = ..., environment: _Optional[int] = ..., starts: bool = ..., terminated: bool = ..., truncated: bool = ..., observations: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., actions: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., rewards: _Optional[_Iterable[float]] = ..., action_logp: _Optional[_Iterable[float]] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ..., infos: _Optional[_Iterable[float]] = ...) -> None: ...

class Recorded(_message.Message):
    __slots__ = ("seq", "stale", "newest")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    seq: int
    stale: bool
    newest: PolicyVersion
    def __init__(self, seq: _Optional[int] = ..., stale: bool = ..., newest: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class PolicyRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class PolicyChunk(_message.Message):
    __slots__ = ("policy", "version", "size", "sha256", "offset", "data")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    policy: str
    version: PolicyVersion
    size: int
    sha256: bytes
    offset: int
    data: bytes
    def __init__(self, policy: _Optional[str] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ..., size: _Optional[int] = ..., sha256: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class NewPolicy(_message.Message):
    __slots__ = ("policy", "version")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    policy: str
    version: PolicyVersion
    def __init__(self, policy: _Optional[str] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "text")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Notice.Kind]
        WAITING: _ClassVar[Notice.Kind]
        LEAVING: _ClassVar[Notice.Kind]
    KIND_UNSPECIFIED: Notice.Kind
    WAITING: Notice.Kind
    LEAVING: Notice.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: Notice.Kind
    text: str
    def __init__(self, kind: _Optional[_Union[Notice.Kind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "seq", "retryable")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Error.Code]
        UNSUPPORTED_VERSION: _ClassVar[Error.Code]
        EXPECTED_HELLO: _ClassVar[Error.Code]
        SECOND_HELLO: _ClassVar[Error.Code]
        WRONG_SPACES: _ClassVar[Error.Code]
        NOT_SERVED: _ClassVar[Error.Code]
        FULL: _ClassVar[Error.Code]
        UNKNOWN_SESSION: _ClassVar[Error.Code]
        SUPERSEDED: _ClassVar[Error.Code]
        BAD_MESSAGE: _ClassVar[Error.Code]
        OUT_OF_ORDER: _ClassVar[Error.Code]
        TOO_MANY_IN_FLIGHT: _ClassVar[Error.Code]
        UNKNOWN_ENVIRONMENT: _ClassVar[Error.Code]
        UNKNOWN_AGENT: _ClassVar[Error.Code]
        WRONG_SHAPE: _ClassVar[Error.Code]
        NOT_FINITE: _ClassVar[Error.Code]
        NO_LEGAL_ACTION: _ClassVar[Error.Code]
        NO_FINAL_OBSERVATION: _ClassVar[Error.Code]
        ENDED: _ClassVar[Error.Code]
        WRONG_MODE: _ClassVar[Error.Code]
        UNKNOWN_VERSION: _ClassVar[Error.Code]
        NO_LOG_PROBABILITIES: _ClassVar[Error.Code]
        CANNOT_LEARN: _ClassVar[Error.Code]
        NOT_EXPORTED: _ClassVar[Error.Code]
    CODE_UNSPECIFIED: Error.Code
    UNSUPPORTED_VERSION: Error.Code
    EXPECTED_HELLO: Error.Code
    SECOND_HELLO: Error.Code
    WRONG_SPACES: Error.Code
    NOT_SERVED: Error.Code
    FULL: Error.Code
    UNKNOWN_SESSION: Error.Code
    SUPERSEDED: Error.Code
    BAD_MESSAGE: Error.Code
    OUT_OF_ORDER: Error.Code
    TOO_MANY_IN_FLIGHT: Error.Code
    UNKNOWN_ENVIRONMENT: Error.Code
    UNKNOWN_AGENT: Error.Code
    WRONG_SHAPE: Error.Code
    NOT_FINITE: Error.Code
    NO_LEGAL_ACTION: Error.Code
    NO_FINAL_OBSERVATION: Error.Code
    ENDED: Error.Code
    WRONG_MODE: Error.Code
    UNKNOWN_VERSION: Error.Code
    NO_LOG_PROBABILITIES: Error.Code
    CANNOT_LEARN: Error.Code
    NOT_EXPORTED: Error.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: Error.Code
    message: str
    seq: int
    retryable: bool
    def __init__(self, code: _Optional[_Union[Error.Code, str]] = ..., message: _Optional[str] = ..., seq: _Optional[int] = ..., retryable: bool = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Info(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "run_id", "modes", "agents", "counts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    run_id: str
    modes: _containers.RepeatedScalarFieldContainer[Mode]
    agents: _containers.RepeatedCompositeFieldContainer[Agent]
    counts: _containers.ScalarMap[str, float]
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., run_id: _Optional[str] = ..., modes: _Optional[_Iterable[_Union[Mode, str]]] = ..., agents: _Optional[_Iterable[_Union[Agent, _Mapping]]] = ..., counts: _Optional[_Mapping[str, float]] = ...) -> None: ...
