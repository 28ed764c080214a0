from juggler.runtime.wire.v1 import spaces_pb2 as _spaces_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightsVersion(_message.Message):
    __slots__ = ("generation", "update")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    update: int
    def __init__(self, generation: _Optional[int] = ..., update: _Optional[int] = ...) -> None: ...

class Setup(_message.Message):
    __slots__ = ("config", "seed", "steps_trained")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STEPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    config: str
    seed: int
    steps_trained: int
    def __init__(self, config: _Optional[str] = ..., seed: _Optional[int] = ..., steps_trained: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("modules",)
    class Module(_message.Message):
        __slots__ = ("module_id", "observation_space", "action_space", "rows", "steps", "environment_observation_space", "environment_action_space", "critic_space")
        MODULE_ID_FIELD_NUMBER: _ClassVar[int]
        OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
        ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        STEPS_FIELD_NUMBER: _ClassVar[int]
        ENVIRONMENT_OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
        ENVIRONMENT_ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
        CRITIC_SPACE_FIELD_NUMBER: _ClassVar[int]
        module_id: str
        observation_space: _spaces_pb2.Space
        action_space: _spaces_pb2.Space
        rows: int
        steps: int
        environment_observation_space: _spaces_pb2.Space
        environment_action_space: _spaces_pb2.Space
        critic_space: _spaces_pb2.Space
        def __init__(self, module_id: _Optional[str] = ..., observation_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., action_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., rows: _Optional[int] = ..., steps: _Optional[int] = ..., environment_observation_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., environment_action_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., critic_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ...) -> None: ...
    MODULES_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.RepeatedCompositeFieldContainer[Ready.Module]
    def __init__(self, modules: _Optional[_Iterable[_Union[Ready.Module, _Mapping]]] = ...) -> None: ...

class AddModule(_message.Message):
    __slots__ = ("module_id", "config", "observation_space", "action_space", "seed", "oldest_handover", "critic_space")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACE_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_HANDOVER_FIELD_NUMBER: _ClassVar[int]
    CRITIC_SPACE_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    config: str
    observation_space: _spaces_pb2.Space
    action_space: _spaces_pb2.Space
    seed: int
    oldest_handover: WeightsVersion
    critic_space: _spaces_pb2.Space
    def __init__(self, module_id: _Optional[str] = ..., config: _Optional[str] = ..., observation_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., action_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ..., seed: _Optional[int] = ..., oldest_handover: _Optional[_Union[WeightsVersion, _Mapping]] = ..., critic_space: _Optional[_Union[_spaces_pb2.Space, _Mapping]] = ...) -> None: ...

class ModuleReady(_message.Message):
    __slots__ = ("module_id", "description", "meeting_point", "handed_over", "last_updates", "why_alone", "kept_bytes")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MEETING_POINT_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATES_FIELD_NUMBER: _ClassVar[int]
    WHY_ALONE_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    description: str
    meeting_point: str
    handed_over: WeightsVersion
    last_updates: _containers.RepeatedCompositeFieldContainer[UpdateDone]
    why_alone: str
    kept_bytes: int
    def __init__(self, module_id: _Optional[str] = ..., description: _Optional[str] = ..., meeting_point: _Optional[str] = ..., handed_over: _Optional[_Union[WeightsVersion, _Mapping]] = ..., last_updates: _Optional[_Iterable[_Union[UpdateDone, _Mapping]]] = ..., why_alone: _Optional[str] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class RemoveModule(_message.Message):
    __slots__ = ("module_id",)
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    def __init__(self, module_id: _Optional[str] = ...) -> None: ...

class Learners(_message.Message):
    __slots__ = ("module_id", "generation", "learners")
    class Learner(_message.Message):
        __slots__ = ("worker_id", "incarnation", "addresses")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INCARNATION_FIELD_NUMBER: _ClassVar[int]
        ADDRESSES_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        incarnation: str
        addresses: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    generation: int
    learners: _containers.RepeatedCompositeFieldContainer[Learners.Learner]
    def __init__(self, module_id: _Optional[str] = ..., generation: _Optional[int] = ..., learners: _Optional[_Iterable[_Union[Learners.Learner, _Mapping]]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("module_id", "batch_id", "learner", "generation", "at_least", "connector_state", "seed", "round", "requests_in_round", "line_ups", "steps_trained")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_STATE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_ROUND_FIELD_NUMBER: _ClassVar[int]
    LINE_UPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    batch_id: int
    learner: str
    generation: int
    at_least: WeightsVersion
    connector_state: bytes
    seed: int
    round: int
    requests_in_round: int
    line_ups: _containers.RepeatedCompositeFieldContainer[LineUp]
    steps_trained: int
    def __init__(self, module_id: _Optional[str] = ..., batch_id: _Optional[int] = ..., learner: _Optional[str] = ..., generation: _Optional[int] = ..., at_least: _Optional[_Union[WeightsVersion, _Mapping]] = ..., connector_state: _Optional[bytes] = ..., seed: _Optional[int] = ..., round: _Optional[int] = ..., requests_in_round: _Optional[int] = ..., line_ups: _Optional[_Iterable[_Union[LineUp, _Mapping]]] = ..., steps_trained: _Optional[int] = ...) -> None: ...

class LineUp(_message.Message):
    __slots__ = ("match_id", "players")
    MATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PLAYERS_FIELD_NUMBER: _ClassVar[int]
    match_id: int
    players: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, match_id: _Optional[int] = ..., players: _Optional[_Iterable[str]] = ...) -> None: ...

class MatchResult(_message.Message):
    __slots__ = ("match_id", "returns", "length")
    MATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    match_id: int
    returns: _containers.RepeatedScalarFieldContainer[float]
    length: int
    def __init__(self, match_id: _Optional[int] = ..., returns: _Optional[_Iterable[float]] = ..., length: _Optional[int] = ...) -> None: ...

class AddPlayer(_message.Message):
    __slots__ = ("module_id", "config")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    config: str
    def __init__(self, module_id: _Optional[str] = ..., config: _Optional[str] = ...) -> None: ...

class RemovePlayer(_message.Message):
    __slots__ = ("module_id",)
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    def __init__(self, module_id: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("module_id", "batch_id", "learner", "live_steps", "version", "episode_returns", "episode_lengths", "dropped", "explanation", "seconds", "connector_delta", "stale_steps", "counts", "env_returns", "env_lengths", "played", "agent_returns", "matches", "infos", "simulators")
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
    class Played(_message.Message):
        __slots__ = ("module_id", "steps", "episode_returns", "episode_lengths")
        MODULE_ID_FIELD_NUMBER: _ClassVar[int]
        STEPS_FIELD_NUMBER: _ClassVar[int]
        EPISODE_RETURNS_FIELD_NUMBER: _ClassVar[int]
        EPISODE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
        module_id: str
        steps: int
        episode_returns: _containers.RepeatedScalarFieldContainer[float]
        episode_lengths: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, module_id: _Optional[str] = ..., steps: _Optional[int] = ..., episode_returns: _Optional[_Iterable[float]] = ..., episode_lengths: _Optional[_Iterable[int]] = ...) -> None: ...
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPISODE_RETURNS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_DELTA_FIELD_NUMBER: _ClassVar[int]
    STALE_STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ENV_RETURNS_FIELD_NUMBER: _ClassVar[int]
    ENV_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PLAYED_FIELD_NUMBER: _ClassVar[int]
    AGENT_RETURNS_FIELD_NUMBER: _ClassVar[int]
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    INFOS_FIELD_NUMBER: _ClassVar[int]
    SIMULATORS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    batch_id: int
    learner: str
    live_steps: int
    version: WeightsVersion
    episode_returns: _containers.RepeatedScalarFieldContainer[float]
    episode_lengths: _containers.RepeatedScalarFieldContainer[int]
    dropped: str
    explanation: str
    seconds: _containers.ScalarMap[str, float]
    connector_delta: bytes
    stale_steps: int
    counts: _containers.ScalarMap[str, float]
    env_returns: _containers.RepeatedScalarFieldContainer[float]
    env_lengths: _containers.RepeatedScalarFieldContainer[int]
    played: _containers.RepeatedCompositeFieldContainer[Receipt.Played]
    agent_returns: _containers.RepeatedCompositeFieldContainer[AgentReturns]
    matches: _containers.RepeatedCompositeFieldContainer[MatchResult]
    infos: _containers.RepeatedCompositeFieldContainer[InfoNumber]
    simulators: Simulators
    def __init__(self, module_id: _Optional[str] = ..., batch_id: _Optional[int] = ..., learner: _Optional[str] = ..., live_steps: _Optional[int] = ..., version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., episode_returns: _Optional[_Iterable[float]] = ..., episode_lengths: _Optional[_Iterable[int]] = ..., dropped: _Optional[str] = ..., explanation: _Optional[str] = ..., seconds: _Optional[_Mapping[str, float]] = ..., connector_delta: _Optional[bytes] = ..., stale_steps: _Optional[int] = ..., counts: _Optional[_Mapping[str, float]] = ..., env_returns: _Optional[_Iterable[float]] = ..., env_lengths: _Optional[_Iterable[int]] = ..., played: _Optional[_Iterable[_Union[Receipt.Played, _Mapping]]] = ..., agent_returns: _Optional[_Iterable[_Union[AgentReturns, _Mapping]]] = ..., matches: _Optional[_Iterable[_Union[MatchResult, _Mapping]]] = ..., infos: _Optional[_Iterable[_Union[InfoNumber, _Mapping]]] = ..., simulators: _Optional[_Union[Simulators, _Mapping]] = ...) -> None: ...

class Simulators(_message.Message):
    __slots__ = ("connected", "environments")
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    connected: int
    environments: int
    def __init__(self, connected: _Optional[int] = ..., environments: _Optional[int] = ...) -> None: ...

class InfoNumber(_message.Message):
    __slots__ = ("name", "mean", "least", "most")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    mean: _containers.RepeatedScalarFieldContainer[float]
    least: _containers.RepeatedScalarFieldContainer[float]
    most: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., mean: _Optional[_Iterable[float]] = ..., least: _Optional[_Iterable[float]] = ..., most: _Optional[_Iterable[float]] = ...) -> None: ...

class AgentReturns(_message.Message):
    __slots__ = ("agent", "module_id", "returns")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    module_id: str
    returns: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, agent: _Optional[str] = ..., module_id: _Optional[str] = ..., returns: _Optional[_Iterable[float]] = ...) -> None: ...

class Arrivals(_message.Message):
    __slots__ = ("module_id", "arrivals")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    def __init__(self, module_id: _Optional[str] = ..., arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("batch_id", "live_steps")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    live_steps: int
    def __init__(self, batch_id: _Optional[int] = ..., live_steps: _Optional[int] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("text", "warning", "simulators")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    SIMULATORS_FIELD_NUMBER: _ClassVar[int]
    text: str
    warning: bool
    simulators: Simulators
    def __init__(self, text: _Optional[str] = ..., warning: bool = ..., simulators: _Optional[_Union[Simulators, _Mapping]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("module_id", "update_id", "generation", "batch_ids", "minibatch_size", "num_epochs", "exact", "values", "metrics_only")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    METRICS_ONLY_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    update_id: int
    generation: int
    batch_ids: _containers.RepeatedScalarFieldContainer[int]
    minibatch_size: int
    num_epochs: int
    exact: bool
    values: _containers.ScalarMap[str, float]
    metrics_only: bool
    def __init__(self, module_id: _Optional[str] = ..., update_id: _Optional[int] = ..., generation: _Optional[int] = ..., batch_ids: _Optional[_Iterable[int]] = ..., minibatch_size: _Optional[int] = ..., num_epochs: _Optional[int] = ..., exact: bool = ..., values: _Optional[_Mapping[str, float]] = ..., metrics_only: bool = ...) -> None: ...

class UpdateDone(_message.Message):
    __slots__ = ("module_id", "update_id", "version", "batches", "metrics", "seconds", "steps_trained", "steps_dropped", "peer_lost", "replay", "hopeless")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ModuleMetrics
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ModuleMetrics, _Mapping]] = ...) -> None: ...
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ReplayEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    STEPS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    HOPELESS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    update_id: int
    version: WeightsVersion
    batches: _containers.RepeatedCompositeFieldContainer[UsedBatch]
    metrics: _containers.MessageMap[str, ModuleMetrics]
    seconds: _containers.ScalarMap[str, float]
    steps_trained: int
    steps_dropped: int
    peer_lost: str
    replay: _containers.ScalarMap[str, float]
    hopeless: str
    def __init__(self, module_id: _Optional[str] = ..., update_id: _Optional[int] = ..., version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., batches: _Optional[_Iterable[_Union[UsedBatch, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, ModuleMetrics]] = ..., seconds: _Optional[_Mapping[str, float]] = ..., steps_trained: _Optional[int] = ..., steps_dropped: _Optional[int] = ..., peer_lost: _Optional[str] = ..., replay: _Optional[_Mapping[str, float]] = ..., hopeless: _Optional[str] = ...) -> None: ...

class UsedBatch(_message.Message):
    __slots__ = ("batch_id", "live_steps", "staleness", "dropped")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    live_steps: int
    staleness: int
    dropped: str
    def __init__(self, batch_id: _Optional[int] = ..., live_steps: _Optional[int] = ..., staleness: _Optional[int] = ..., dropped: _Optional[str] = ...) -> None: ...

class ModuleMetrics(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    def __init__(self, values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("module_id", "generation", "members", "meeting_points")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEETING_POINTS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    generation: int
    members: _containers.RepeatedScalarFieldContainer[str]
    meeting_points: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, module_id: _Optional[str] = ..., generation: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., meeting_points: _Optional[_Iterable[str]] = ...) -> None: ...

class GroupFormed(_message.Message):
    __slots__ = ("module_id", "generation", "peer_lost", "update", "state_hash")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PEER_LOST_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    generation: int
    peer_lost: str
    update: int
    state_hash: int
    def __init__(self, module_id: _Optional[str] = ..., generation: _Optional[int] = ..., peer_lost: _Optional[str] = ..., update: _Optional[int] = ..., state_hash: _Optional[int] = ...) -> None: ...

class BeginAnew(_message.Message):
    __slots__ = ("module_id", "seed")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    seed: int
    def __init__(self, module_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("module_id", "seed")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    seed: int
    def __init__(self, module_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class Discard(_message.Message):
    __slots__ = ("module_id", "batch_ids")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_IDS_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    batch_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, module_id: _Optional[str] = ..., batch_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("module_id", "weights", "whole", "seed")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    weights: bool
    whole: bool
    seed: int
    def __init__(self, module_id: _Optional[str] = ..., weights: bool = ..., whole: bool = ..., seed: _Optional[int] = ...) -> None: ...

class StateHeader(_message.Message):
    __slots__ = ("module_id", "version", "extra")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    version: WeightsVersion
    extra: str
    def __init__(self, module_id: _Optional[str] = ..., version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., extra: _Optional[str] = ...) -> None: ...

class HandoverHeader(_message.Message):
    __slots__ = ("module_id", "run_id", "version", "extra", "last_updates")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    LAST_UPDATES_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    run_id: str
    version: WeightsVersion
    extra: str
    last_updates: _containers.RepeatedCompositeFieldContainer[UpdateDone]
    def __init__(self, module_id: _Optional[str] = ..., run_id: _Optional[str] = ..., version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., extra: _Optional[str] = ..., last_updates: _Optional[_Iterable[_Union[UpdateDone, _Mapping]]] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("module_id", "chunk", "last", "state_bytes", "weights", "whole", "source", "selectable")
    MODULE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SELECTABLE_FIELD_NUMBER: _ClassVar[int]
    module_id: str
    chunk: bytes
    last: bool
    state_bytes: int
    weights: bool
    whole: bool
    source: str
    selectable: bool
    def __init__(self, module_id: _Optional[str] = ..., chunk: _Optional[bytes] = ..., last: bool = ..., state_bytes: _Optional[int] = ..., weights: bool = ..., whole: bool = ..., source: _Optional[str] = ..., selectable: bool = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("episodes", "seed", "checkpoint", "version", "most_steps", "goal", "video")
    class Goal(_message.Message):
        __slots__ = ("mean", "best")
        MEAN_FIELD_NUMBER: _ClassVar[int]
        BEST_FIELD_NUMBER: _ClassVar[int]
        mean: float
        best: float
        def __init__(self, mean: _Optional[float] = ..., best: _Optional[float] = ...) -> None: ...
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    GOAL_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    episodes: int
    seed: int
    checkpoint: str
    version: WeightsVersion
    most_steps: int
    goal: Evaluate.Goal
    video: str
    def __init__(self, episodes: _Optional[int] = ..., seed: _Optional[int] = ..., checkpoint: _Optional[str] = ..., version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., most_steps: _Optional[int] = ..., goal: _Optional[_Union[Evaluate.Goal, _Mapping]] = ..., video: _Optional[str] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("version", "episode_returns", "episode_lengths", "agent_returns", "why_fewer")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPISODE_RETURNS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    AGENT_RETURNS_FIELD_NUMBER: _ClassVar[int]
    WHY_FEWER_FIELD_NUMBER: _ClassVar[int]
    version: WeightsVersion
    episode_returns: _containers.RepeatedScalarFieldContainer[float]
    episode_lengths: _containers.RepeatedScalarFieldContainer[int]
    agent_returns: _containers.RepeatedCompositeFieldContainer[AgentReturns]
    why_fewer: str
    def __init__(self, version: _Optional[_Union[WeightsVersion, _Mapping]] = ..., episode_returns: _Optional[_Iterable[float]] = ..., episode_lengths: _Optional[_Iterable[int]] = ..., agent_returns: _Optional[_Iterable[_Union[AgentReturns, _Mapping]]] = ..., why_fewer: _Optional[str] = ...) -> None: ...
