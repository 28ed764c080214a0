"""What keys and algorithms of other libraries are called here. The guides' tables say the same of
keys, which a test of them compares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_FRAGMENTS = "none: episodes go on from one fragment to the next"
_STATS = "none: it is always of the last 100 episodes"
_CHECKPOINTS = "checkpoint_seconds, or checkpoint_updates with synchronous = true"
_EXPLORATION = "exploration_epsilon, which takes a schedule"
_GAE = "none: ppo always has it, with lambda_"
_MINIBATCHES = "minibatches, which says how many there are in a sample"
_STEPS = "stop_steps, which counts steps"

#: Keys of a run: of RLlib, Stable-Baselines3, CleanRL and Acme. What is here is a key, perhaps with
#: words behind it, or "the connector ..."; or "none", where nothing is.
RUN_KEYS: Final = {
    "action_noise": "exploration_noise",
    "adam_epsilon": "optimizer_epsilon",
    "adam_momentum_decay": "adam_betas, its first number",
    "adam_variance_decay": "adam_betas, its second number",
    "alpha": "temperature",
    "anneal_lr": "lr, which takes a schedule",
    "autotune": 'temperature, which is learned where it is "none"',
    "baseline_cost": "value_coefficient, twice as much",
    "batch_mode": _FRAGMENTS,
    "broadcast_interval": "weights_interval",
    "buffer_size": "replay_capacity",
    "capture_video": "evaluation_video, with evaluation_seconds",
    "checkpoint_freq": _CHECKPOINTS,
    "checkpoint_frequency": _CHECKPOINTS,
    "circular_buffer_iterations_per_batch": "batch_uses",
    "circular_buffer_num_batches": "buffer_batches",
    "clip_coef": "clip",
    "clip_obs": "the connector mean_std_filter, its clip",
    "clip_param": "clip",
    "clip_range": "clip",
    "clip_range_vf": "value_clip",
    "clip_reward": "the connector normalize_rewards, its limit",
    "clip_rewards": "the connector clip_rewards",
    "clip_value": "value_clip",
    "clip_vloss": "value_clip, a number",
    "count_steps_by": "none: all counts are steps of agents",
    "cuda": "devices",
    "custom_model": "module",
    "custom_model_config": "model",
    "decay": "rmsprop_decay",
    "device": "devices",
    "discount": "gamma",
    "end_e": _EXPLORATION,
    "ent_coef": "entropy_coefficient, and temperature in sac",
    "entropy_coeff": "entropy_coefficient",
    "entropy_coeff_schedule": "entropy_coefficient, which takes a schedule",
    "entropy_cost": "entropy_coefficient",
    "env_config": "env_kwargs",
    "env_id": "env",
    "eps": "optimizer_epsilon",
    "epsilon": "optimizer_epsilon",
    "eval_every": "evaluation_seconds",
    "eval_freq": "evaluation_seconds",
    "evaluation_duration": "evaluation_episodes",
    "evaluation_interval": "evaluation_seconds",
    "evaluation_num_env_runners": "num_evaluators",
    "evaluation_num_workers": "num_evaluators",
    "exp_name": "run_dir",
    "exploration_final_eps": "exploration_epsilon",
    "exploration_fraction": _EXPLORATION,
    "exploration_initial_eps": "exploration_epsilon",
    "gae": _GAE,
    "gae_lambda": "lambda_",
    "gradient_steps": "replay_ratio, which says how often a step is drawn",
    "gym_env_vectorize_mode": "vectorize",
    "kl_coeff": "kl_coefficient",
    "kl_target": "target_kl",
    "learning_rate": "lr",
    "learning_starts": "replay_begin",
    "lr_schedule": "lr, which takes a schedule",
    "max_abs_reward": "the connector clip_rewards, its limit",
    "max_grad_norm": "grad_clip",
    "max_gradient_norm": "grad_clip",
    "max_norm": "grad_clip",
    "max_num_actor_steps": "stop_steps",
    "max_requests_in_flight_per_env_runner": "requests_per_runner",
    "max_to_keep": "keep_checkpoints",
    "minibatch_size": _MINIBATCHES,
    "n_envs": "envs_per_runner, of each of num_env_runners",
    "n_epochs": "epochs",
    "n_eval_episodes": "evaluation_episodes",
    "n_steps": "fragment_steps",
    "noise_clip": "target_noise_clip",
    "norm_adv": "normalize_advantages",
    "norm_obs": "the connector mean_std_filter",
    "norm_reward": "the connector normalize_rewards",
    "normalize_actions": "the connector rescale_actions",
    "normalize_advantage": "normalize_advantages",
    "normalize_value": "none: reward_scale, or the connector normalize_rewards, does instead",
    "num_cpus_per_learner": "learner_threads",
    "num_envs": "envs_per_runner, of each of num_env_runners",
    "num_envs_per_env_runner": "envs_per_runner",
    "num_envs_per_worker": "envs_per_runner",
    "num_epochs": "epochs",
    "num_eval_episodes": "evaluation_episodes",
    "num_gpus": "devices",
    "num_gpus_per_learner": "devices",
    "num_iterations": _STEPS,
    "num_minibatches": "minibatches",
    "num_rollout_workers": "num_env_runners",
    "num_sgd_iter": "epochs",
    "num_steps": "fragment_steps",
    "num_to_keep": "keep_checkpoints",
    "num_updates": _STEPS,
    "num_workers": "num_env_runners",
    "observation_filter": "the connector mean_std_filter",
    "opt_type": "optimizer",
    "policies": "modules",
    "policies_to_train": "none: say train = false in the table of a module",
    "policy_delay": "policy_period",
    "policy_frequency": "policy_period",
    "policy_kwargs": "model",
    "policy_mapping_fn": "agents, or mapping, a function",
    "ppo_clipping_epsilon": "clip",
    "remote_worker_envs": "vectorize",
    "replay_buffer_capacity": "replay_capacity, in steps",
    "replay_buffer_num_slots": "replay_capacity, in steps",
    "replay_buffer_replay_ratio": "replay_share",
    "replay_proportion": "replay_share, which is p / (1 + p) for a proportion of p",
    "rollout_fragment_length": "fragment_steps",
    "run_name": "run_dir",
    "save_freq": _CHECKPOINTS,
    "sequence_length": "fragment_steps",
    "sgd_minibatch_size": _MINIBATCHES,
    "start_e": _EXPLORATION,
    "stats_window_size": _STATS,
    "stop": "stop_return, stop_steps or stop_seconds",
    "storage_path": "run_dir",
    "target_network_frequency": "target_period",
    "target_network_update_freq": "target_period",
    "target_policy_noise": "target_noise",
    "target_update_interval": "target_period",
    "tau": "target_share",
    "tensorboard_log": "none: TensorBoard's events are in run_dir",
    "timesteps_total": "stop_steps",
    "torch_deterministic": "synchronous, which gives the same numbers every time",
    "total_timesteps": "stop_steps",
    "train_batch_size": "batch_size, over all learners",
    "train_batch_size_per_learner": "batch_size, over all learners",
    "train_freq": "batch_size, of steps that arrive",
    "training_iteration": _STEPS,
    "unroll_length": "fragment_steps",
    "update_epochs": "epochs",
    "use_gae": _GAE,
    "use_sde": "none",
    "value_clipping_epsilon": "value_clip",
    "value_cost": "value_coefficient, twice as much",
    "verbose": "progress",
    "vf_clip_param": "none: value_clip says how far values may move",
    "vf_coef": "value_coefficient",
    "vf_loss_coeff": "value_coefficient",
    "vtrace": "none: impala and appo always have it",
    "vtrace_clip_pg_rho_threshold": "rho_bar_pg",
    "vtrace_clip_rho_threshold": "rho_bar",
    "weight_decay": "none",
}

#: Keys of a model, likewise.
MODEL_KEYS: Final = {
    "activation_fn": "activation",
    "conv_filters": "encoder",
    "custom_action_dist": "distribution, a key of the run",
    "fcnet_activation": "activation",
    "fcnet_hiddens": "hidden_sizes",
    "features_extractor_class": "encoder",
    "features_extractor_kwargs": "none: a model of your own has keys of its own in model",
    "framestack": "the connector frame_stack",
    "log_std_init": "none: it begins at 0; free_log_std",
    "lstm_cell_size": "recurrent_size",
    "lstm_use_prev_action": "the connector previous_actions_and_rewards",
    "lstm_use_prev_reward": "the connector previous_actions_and_rewards",
    "max_seq_len": "none: a sequence has fragment_steps at most",
    "net_arch": "hidden_sizes",
    "optimizer_class": "optimizer, a key of the run",
    "optimizer_kwargs": "optimizer_epsilon and adam_betas, keys of the run",
    "ortho_init": "initializer",
    "share_features_extractor": "shared_value_layers",
    "squash_output": "squash",
    "use_lstm": 'recurrent = "lstm"',
    "vf_share_layers": "shared_value_layers",
}


_PPO = "ppo is the nearest here"
_DQN = "dqn is the nearest here, with priority_exponent and n_step"
_SAC = "sac is the nearest here, with replay_ratio for more updates of each step"
_MODELS = (
    "no algorithm here learns a model of its environment; of those here, sac and dqn need the "
    "fewest steps, and r2d2 has a memory"
)
_CENTRAL = (
    "ppo is the nearest here, with critic_sees for a value function that sees what all agents do"
)
_DATA = "iql and bc learn from data sets here"
_ACTORS = "impala is the nearest here: it corrects for policies that are some updates older"

#: Algorithms that others have, in small letters and without other signs.
_ALGORITHMS: Final = {
    "a2c": "ppo is the nearest here: with epochs = 1 and minibatches = 1, it makes A2C's update",
    "a3c": _ACTORS,
    "acer": f"{_ACTORS}, and learns from old steps too with replay_share",
    "acktr": _PPO,
    "apex": f"{_DQN}, and exploration_ladder for many EnvRunners",
    "apexdqn": f"{_DQN}, and exploration_ladder for many EnvRunners",
    "ars": "no algorithm here is an evolution strategy: ppo works with many EnvRunners, too",
    "awac": _DATA,
    "awr": _DATA,
    "bcq": _DATA,
    "c51": _DQN,
    "cql": _DATA,
    "crossq": _SAC,
    "d4pg": "td3 is the nearest here",
    "ddpg": "td3 is its successor: it is DDPG with two critics, target_noise and policy_period",
    "ddqn": _DQN,
    "discretesac": "sac is for Discrete actions, too",
    "doubledqn": _DQN,
    "dreamer": _MODELS,
    "dreamerv3": _MODELS,
    "drqn": "r2d2 is the nearest here",
    "dt": _DATA,
    "duelingdqn": _DQN,
    "es": "no algorithm here is an evolution strategy: ppo works with many EnvRunners, too",
    "gail": "it is the key imitation here, beside an algorithm such as ppo",
    "iqn": _DQN,
    "ippo": "ppo is it here, with several modules in the tables agents and modules",
    "maddpg": _CENTRAL,
    "mappo": _CENTRAL,
    "marwil": _DATA,
    "maskableppo": "ppo is it here: an action mask in infos is always kept to",
    "mpo": "sac is the nearest here",
    "muzero": _MODELS,
    "pg": _PPO,
    "ppo2": "ppo is it here",
    "ppolstm": 'ppo is it here, with recurrent = "lstm" in the table model',
    "qlearning": _DQN,
    "qmix": _CENTRAL,
    "qrdqn": _DQN,
    "rainbow": _DQN,
    "recurrentppo": 'ppo is it here, with recurrent = "lstm" in the table model',
    "redq": _SAC,
    "reinforce": _PPO,
    "rnd": "it is the key intrinsic here, beside an algorithm such as ppo",
    "sarsa": "pqn is the nearest here",
    "simpleq": _DQN,
    "td3bc": _DATA,
    "tqc": _SAC,
    "trpo": f"{_PPO}: clip, and perhaps target_kl, are in place of TRPO's constraint",
    "vdn": _CENTRAL,
    "vpg": _PPO,
}


def algorithm_here(name: str) -> str:
    """What is to be used here in place of another library's algorithm; "": it is not known."""
    return _ALGORITHMS.get(re.sub(r"[^a-z0-9]", "", name.lower()), "")


def called_here(key: str, table: Mapping[str, str] = RUN_KEYS) -> str:
    """How an error about an unknown key ends that other libraries have; "" where none does.

    Args:
        key: as somebody gave it.
        table: of the place where it was given, RUN_KEYS or MODEL_KEYS.
    """
    what, where = table.get(key, ""), "here"
    if not what and table is RUN_KEYS and (what := MODEL_KEYS.get(key, "")):
        where = "here" if "of the run" in what else "here, in the table model"
    kind, colon, why = what.partition(":")
    if kind == "none":
        return f": there is no such key here{colon}{why}"
    if what.startswith("the connector"):
        return f": it is {what} here"
    name, comma, more = what.partition(",")
    return name and f": it is called {name} {where}{comma}{more}"
