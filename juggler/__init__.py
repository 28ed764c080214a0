"""Juggler: reinforcement learning with many processes at once.

import juggler

result = juggler.train("cartpole", stop_return=475)
print(juggler.evaluate(result.checkpoint).mean)
"""

from __future__ import annotations

import functools
import importlib
import os
import sys

TYPE_CHECKING = False  # without an import, which a command would wait for
if TYPE_CHECKING:
    import typing

    from juggler.cli.plot import Picture as Picture
    from juggler.cli.plot import plot as plot
    from juggler.driver.callbacks import Callback as Callback
    from juggler.driver.callbacks import Evaluation as Evaluation
    from juggler.driver.callbacks import Run as Run
    from juggler.driver.config import ConfigError as ConfigError
    from juggler.driver.config import RunConfig as RunConfig
    from juggler.driver.config_files import shipped_configs as shipped_configs
    from juggler.driver.driver import RunFailed as RunFailed
    from juggler.driver.league.league_builder import LeagueBuilder as LeagueBuilder
    from juggler.driver.league.league_builder import Pairing as Pairing
    from juggler.driver.league.results import LeagueResults as LeagueResults
    from juggler.driver.league.roster import AddPlayer as AddPlayer
    from juggler.driver.league.roster import FreezePlayer as FreezePlayer
    from juggler.driver.league.roster import ResetPlayer as ResetPlayer
    from juggler.driver.league.roster import RetirePlayer as RetirePlayer
    from juggler.driver.learner_group import LearnerGroup as LearnerGroup
    from juggler.driver.learner_group import LearnerGroupError as LearnerGroupError
    from juggler.driver.learner_group import ShardLost as ShardLost
    from juggler.driver.learner_group import UpdateFailed as UpdateFailed
    from juggler.driver.play_checkpoint import Demonstrations as Demonstrations
    from juggler.driver.play_checkpoint import Evaluated as Evaluated
    from juggler.driver.play_checkpoint import PlayedMatches as PlayedMatches
    from juggler.driver.play_checkpoint import evaluate as evaluate
    from juggler.driver.play_checkpoint import play_matches as play_matches
    from juggler.driver.play_checkpoint import record as record
    from juggler.driver.run_end import Result as Result
    from juggler.driver.start_run import StartedRun as StartedRun
    from juggler.driver.start_run import resume as resume
    from juggler.driver.start_run import start as start
    from juggler.driver.start_run import train as train
    from juggler.driver.workers.module_setups import LearnerSpec as LearnerSpec
    from juggler.envrunner.cartpoles import CartPoles as CartPoles
    from juggler.envrunner.multi_agent.matrix_game import MatrixGame as MatrixGame
    from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv as MultiAgentVectorEnv
    from juggler.envrunner.multi_agent.vector_env import VectorStep as VectorStep
    from juggler.envrunner.sampler import Sampler as Sampler
    from juggler.experiments.seeds import Interval as Interval
    from juggler.experiments.seeds import SeedsResult as SeedsResult
    from juggler.experiments.seeds import interquartile_mean as interquartile_mean
    from juggler.experiments.seeds import train_seeds as train_seeds
    from juggler.experiments.sweep import SweepFailed as SweepFailed
    from juggler.experiments.sweep import SweepResult as SweepResult
    from juggler.experiments.sweep import resume_sweep as resume_sweep
    from juggler.experiments.sweep import sweep as sweep
    from juggler.learner.algorithms.actor_critic import (
        ActorCriticConfig as ActorCriticConfig,
    )
    from juggler.learner.algorithms.actor_critic.core import ActorCriticCore as ActorCriticCore
    from juggler.learner.algorithms.actor_critic.core import actor_critic_pass as actor_critic_pass
    from juggler.learner.algorithms.algorithm import Algorithm as Algorithm
    from juggler.learner.algorithms.appo import AppoConfig as AppoConfig
    from juggler.learner.algorithms.appo.core import Appo as Appo
    from juggler.learner.algorithms.bc import BcConfig as BcConfig
    from juggler.learner.algorithms.bc.core import Bc as Bc
    from juggler.learner.algorithms.dqn import DqnConfig as DqnConfig
    from juggler.learner.algorithms.dqn.core import Dqn as Dqn
    from juggler.learner.algorithms.imitation.discriminator import Discriminator as Discriminator
    from juggler.learner.algorithms.impala import ImpalaConfig as ImpalaConfig
    from juggler.learner.algorithms.impala.core import Impala as Impala
    from juggler.learner.algorithms.intrinsic.rnd import Rnd as Rnd
    from juggler.learner.algorithms.iql import IqlConfig as IqlConfig
    from juggler.learner.algorithms.iql.core import Iql as Iql
    from juggler.learner.algorithms.off_policy.core import (
        importance_weights as importance_weights,
    )
    from juggler.learner.algorithms.ppo import PpoConfig as PpoConfig
    from juggler.learner.algorithms.ppo.core import Ppo as Ppo
    from juggler.learner.algorithms.pqn import PqnConfig as PqnConfig
    from juggler.learner.algorithms.pqn.core import Pqn as Pqn
    from juggler.learner.algorithms.r2d2 import R2d2Config as R2d2Config
    from juggler.learner.algorithms.r2d2.core import R2d2 as R2d2
    from juggler.learner.algorithms.registry import build_learner as build_learner
    from juggler.learner.algorithms.sac import SacConfig as SacConfig
    from juggler.learner.algorithms.sac.core import Sac as Sac
    from juggler.learner.algorithms.td3 import Td3Config as Td3Config
    from juggler.learner.algorithms.td3.core import Td3 as Td3
    from juggler.learner.config import ImitationConfig as ImitationConfig
    from juggler.learner.config import IntrinsicConfig as IntrinsicConfig
    from juggler.learner.config import LearnerConfig as LearnerConfig
    from juggler.learner.core.around_core import AroundCore as AroundCore
    from juggler.learner.core.around_core import AroundState as AroundState
    from juggler.learner.core.forward import Forward as Forward
    from juggler.learner.core.forward import Loss as Loss
    from juggler.learner.core.gradient_core import GradientCore as GradientCore
    from juggler.learner.core.learner_core import ALONE as ALONE
    from juggler.learner.core.learner_core import Aux as Aux
    from juggler.learner.core.learner_core import LearnerCore as LearnerCore
    from juggler.learner.core.learner_core import Metrics as Metrics
    from juggler.learner.core.learner_core import Params as Params
    from juggler.learner.core.learner_core import Seam as Seam
    from juggler.learner.core.learner_core import StepOutput as StepOutput
    from juggler.learner.core.mean_metrics import LiveMean as LiveMean
    from juggler.learner.core.mean_metrics import fetch_metrics as fetch_metrics
    from juggler.learner.core.population import Population as Population
    from juggler.learner.core.population import stacked as stacked
    from juggler.learner.core.returns import gae as gae
    from juggler.learner.core.returns import next_values as next_values
    from juggler.learner.core.returns import vtrace as vtrace
    from juggler.learner.core.sequences import all_observations as all_observations
    from juggler.learner.core.state_trees import StateMismatch as StateMismatch
    from juggler.learner.core.state_trees import arrays_like as arrays_like
    from juggler.learner.core.state_trees import tensors_like as tensors_like
    from juggler.learner.data.collate import collate as collate
    from juggler.learner.data.collate import shard as shard
    from juggler.learner.data.replay.replay import MixInReplay as MixInReplay
    from juggler.learner.data.replay.replay import Replay as Replay
    from juggler.learner.data.sources import CircularBuffer as CircularBuffer
    from juggler.learner.data.sources import Columns as Columns
    from juggler.learner.data.sources import DataSource as DataSource
    from juggler.learner.data.sources import Queue as Queue
    from juggler.learner.learner import Learner as Learner
    from juggler.learner.optim.config import Scheduled as Scheduled
    from juggler.learner.optim.flat_module import TrainState as TrainState
    from juggler.learner.optim.optimizers import Schedule as Schedule
    from juggler.learner.shared_parts import SharedParts as SharedParts
    from juggler.policies.policy import Policy as Policy
    from juggler.policies.policy import load_policy as load_policy
    from juggler.runtime.acting.actor import Actor as Actor
    from juggler.runtime.checkpoints.checkpoint import CheckpointError as CheckpointError
    from juggler.runtime.checkpoints.weights import read_weights as read_weights
    from juggler.runtime.connectors.connector import ActionConnector as ActionConnector
    from juggler.runtime.connectors.connector import ContextConnector as ContextConnector
    from juggler.runtime.connectors.connector import LearnerConnector as LearnerConnector
    from juggler.runtime.connectors.connector import MergeableConnector as MergeableConnector
    from juggler.runtime.connectors.connector import ObservationConnector as ObservationConnector
    from juggler.runtime.connectors.learning import PerEpisode as PerEpisode
    from juggler.runtime.connectors.mergeable_state import Moments as Moments
    from juggler.runtime.connectors.row_times import first_observations as first_observations
    from juggler.runtime.modules.acting_part import acting_names as acting_names
    from juggler.runtime.modules.acting_part import strip_to_acting as strip_to_acting
    from juggler.runtime.modules.config import ModelConfig as ModelConfig
    from juggler.runtime.modules.distributions.base import ActionDistribution as ActionDistribution
    from juggler.runtime.modules.distributions.base import DistributionSpec as DistributionSpec
    from juggler.runtime.modules.distributions.for_space import Categorical as Categorical
    from juggler.runtime.modules.distributions.for_space import CategoricalSpec as CategoricalSpec
    from juggler.runtime.modules.models import ActorCritic as ActorCritic
    from juggler.runtime.modules.models import Catalog as Catalog
    from juggler.runtime.modules.models import (
        DeterministicActorCritic as DeterministicActorCritic,
    )
    from juggler.runtime.modules.models import (
        ImplicitActorCritic as ImplicitActorCritic,
    )
    from juggler.runtime.modules.models import QNetwork as QNetwork
    from juggler.runtime.modules.models import SoftActorCritic as SoftActorCritic
    from juggler.runtime.modules.module_specs import MultiRLModule as MultiRLModule
    from juggler.runtime.modules.module_specs import MultiRLModuleSpec as MultiRLModuleSpec
    from juggler.runtime.modules.module_specs import RLModuleSpec as RLModuleSpec
    from juggler.runtime.modules.module_specs import build_module as build_module
    from juggler.runtime.modules.rl_module import AnyOf as AnyOf
    from juggler.runtime.modules.rl_module import Maybe as Maybe
    from juggler.runtime.modules.rl_module import RLModule as RLModule
    from juggler.runtime.modules.rl_module import TensorSpec as TensorSpec
    from juggler.runtime.wire.trees import Tree as Tree

# Else gRPC starts threads of its own in all that is forked from a process that uses it, even before
# that becomes another program: what environments and videos start has hung there, or ended. None
# of Juggler's processes forks to go on with gRPC. It is read when gRPC is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Its core writes lines of its own to stderr, over what a terminal shows. Juggler itself says why a
# connection is not made or is lost. GRPC_VERBOSITY=debug brings them back.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

#: Names of earlier releases, with what to use instead.
_RETIRED = {
    "BehaviourPolicy": "use juggler.Actor, which acts for rows of environments",
    "Sample": "a sample is a tree of columns by name: see docs/cores.md, state and sample",
}


def __getattr__(name: str) -> typing.Any:
    if name == "__all__":
        return list(_public())
    module = _public().get(name)
    if module is None:
        instead = f": {_RETIRED[name]}" if name in _RETIRED else ""
        raise AttributeError(f"module 'juggler' has no attribute {name!r}{instead}")
    # Only now: the driver process must not pay for torch, nor a user of the wire for the driver.
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


@functools.cache
def _public() -> dict[str, str]:
    """Return the module of each public name."""
    import re

    # The imports above are read, so that each name stands there once.
    loader: typing.Any = __spec__ and __spec__.loader
    source = loader.get_source(__name__)  # in an archive, too
    found = re.findall(r"^    from (\S+) import (?:\(\s+)?(\w+) as", source, re.MULTILINE)
    return dict(sorted((name, module) for module, name in found))


def __dir__() -> list[str]:
    rooms = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted([*rooms, *_public()])
