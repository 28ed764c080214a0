"""Maps keys and algorithms of other libraries to Juggler's names.

The guides' tables have the same keys; a test compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final


def _each(answers: Mapping[str, str]) -> dict[str, str]:
    """Expand answers by joint names to answers by single names."""
    return {name: answer for names, answer in answers.items() for name in names.split()}


#: Keys of a run in RLlib, Stable-Baselines3, CleanRL and Acme. The value is a key here, possibly
#: with an explanation, or "the connector ...", or "none" if there is no counterpart.
RUN_KEYS: Final = _each(
    {
        "action_noise": "exploration_noise",
        "adam_epsilon eps epsilon": "optimizer_epsilon",
        "adam_momentum_decay": "adam_betas, its first number",
        "adam_variance_decay": "adam_betas, its second number",
        "alpha": "temperature",
        "anneal_lr lr_schedule": "lr, which takes a schedule",
        "autotune": 'temperature, which is learned if it is "none"',
        "baseline_cost value_cost": "value_coefficient, twice as much",
        "batch_mode": "none: episodes continue from one fragment to the next",
        "broadcast_interval": "weights_interval",
        "buffer_size": "replay_capacity",
        "capture_video": "evaluation_video, with evaluation_seconds",
        "checkpoint_freq checkpoint_frequency save_freq": (
            "checkpoint_seconds, or checkpoint_updates with synchronous = true"
        ),
        "circular_buffer_iterations_per_batch": "batch_uses",
        "circular_buffer_num_batches": "buffer_batches",
        "clip_coef clip_param clip_range ppo_clipping_epsilon": "clip",
        "clip_obs": "the connector mean_std_filter, its clip",
        "clip_range_vf clip_value value_clipping_epsilon": "value_clip",
        "clip_reward": "the connector normalize_rewards, its limit",
        "clip_rewards": "the connector clip_rewards",
        "clip_vloss": "value_clip, a number",
        "count_steps_by": "none: all counts are steps of agents",
        "cuda device num_gpus num_gpus_per_learner": "devices",
        "custom_model": "module",
        "custom_model_config policy_kwargs": "model",
        "decay": "rmsprop_decay",
        "discount": "gamma",
        "end_e exploration_fraction start_e": "exploration_epsilon, which takes a schedule",
        "ent_coef": "entropy_coefficient, and temperature in sac",
        "entropy_coeff entropy_cost": "entropy_coefficient",
        "entropy_coeff_schedule": "entropy_coefficient, which takes a schedule",
        "env_config": "env_kwargs",
        "env_id": "env",
        "eval_every eval_freq evaluation_interval": "evaluation_seconds",
        "evaluation_duration n_eval_episodes num_eval_episodes": "evaluation_episodes",
        "evaluation_num_env_runners evaluation_num_workers": "num_evaluators",
        "exp_name run_name storage_path": "run_dir",
        "exploration_final_eps exploration_initial_eps": "exploration_epsilon",
        "gae use_gae": "none: ppo always uses it, with lambda_",
        "gae_lambda": "lambda_",
        "gradient_steps": "replay_ratio, the number of times that a step is drawn",
        "gym_env_vectorize_mode remote_worker_envs": "vectorize",
        "kl_coeff": "kl_coefficient",
        "kl_target": "target_kl",
        "learning_rate": "lr",
        "learning_starts": "replay_begin",
        "max_abs_reward": "the connector clip_rewards, its limit",
        "max_grad_norm max_gradient_norm max_norm": "grad_clip",
        "max_num_actor_steps timesteps_total total_timesteps": "stop_steps",
        "max_requests_in_flight_per_env_runner": "none: two requests are in flight",
        "max_to_keep num_to_keep": "keep_checkpoints",
        "minibatch_size sgd_minibatch_size": ("minibatches, the number of minibatches in a sample"),
        "n_envs num_envs": "envs_per_runner, for each of num_env_runners",
        "n_epochs num_epochs num_sgd_iter update_epochs": "epochs",
        "n_steps num_steps rollout_fragment_length sequence_length unroll_length": "fragment_steps",
        "noise_clip": "target_noise_clip",
        "norm_adv normalize_advantage": "normalize_advantages",
        "norm_obs observation_filter": "the connector mean_std_filter",
        "norm_reward": "the connector normalize_rewards",
        "normalize_actions": "the connector rescale_actions",
        "normalize_value": "none: reward_scale, or the connector normalize_rewards, does instead",
        "num_cpus_per_learner": "learner_threads",
        "num_envs_per_env_runner num_envs_per_worker": "envs_per_runner",
        "num_iterations num_updates training_iteration": "stop_steps, which counts steps",
        "num_minibatches": "minibatches",
        "num_rollout_workers num_workers": "num_env_runners",
        "opt_type": "optimizer",
        "policies": "modules",
        "policies_to_train": "none: set train = false in the table of a module",
        "policy_delay policy_frequency": "policy_period",
        "policy_mapping_fn": "agents, or mapping, a function",
        "replay_buffer_capacity replay_buffer_num_slots": "replay_capacity, in steps",
        "replay_buffer_replay_ratio": "replay_share",
        "replay_proportion": "replay_share, which is p / (1 + p) for a proportion of p",
        "stats_window_size": "none: it is always of the last 100 episodes",
        "stop": "stop_return, stop_steps or stop_seconds",
        "target_network_frequency target_network_update_freq target_update_interval": (
            "target_period"
        ),
        "target_policy_noise": "target_noise",
        "tau": "target_share",
        "tensorboard_log": "none: TensorBoard's events are in run_dir",
        "torch_deterministic": "synchronous, which gives the same numbers every time",
        "train_batch_size train_batch_size_per_learner": "batch_size, over all learners",
        "train_freq": "batch_size, of steps that arrive",
        "use_sde weight_decay": "none",
        "verbose": "progress",
        "vf_clip_param": "none: value_clip limits how far values may move",
        "vf_coef vf_loss_coeff": "value_coefficient",
        "vtrace": "none: impala and appo always have it",
        "vtrace_clip_pg_rho_threshold": "rho_bar_pg",
        "vtrace_clip_rho_threshold": "rho_bar",
    }
)

#: Keys of a model, in the same form.
MODEL_KEYS: Final = _each(
    {
        "activation_fn fcnet_activation": "activation",
        "conv_filters features_extractor_class": "encoder",
        "custom_action_dist": "distribution, a key of the run",
        "fcnet_hiddens net_arch": "hidden_sizes",
        "features_extractor_kwargs": "none: your own model has its own keys in model",
        "framestack": "the connector frame_stack",
        "log_std_init": "none: it begins at 0; free_log_std",
        "lstm_cell_size": "recurrent_size",
        "lstm_use_prev_action lstm_use_prev_reward": "the connector previous_actions_and_rewards",
        "max_seq_len": "none: a sequence has fragment_steps at most",
        "optimizer_class": "optimizer, a key of the run",
        "optimizer_kwargs": "optimizer_epsilon and adam_betas, keys of the run",
        "ortho_init": "initializer",
        "share_features_extractor vf_share_layers": "shared_value_layers",
        "squash_output": "squash",
        "use_lstm": 'recurrent = "lstm"',
    }
)

#: Algorithms of other libraries, in lower case and without punctuation.
_ALGORITHMS: Final = _each(
    {
        "a2c": (
            "ppo is the nearest here: with epochs = 1 and minibatches = 1, it makes A2C's update"
        ),
        "a3c": "impala is the nearest here: it corrects for policies that are some updates older",
        "acer": (
            "impala is the nearest here: it corrects for policies that are some updates older, "
            "and learns from old steps too with replay_share"
        ),
        "acktr pg reinforce vpg": "ppo is the nearest here",
        "apex apexdqn": (
            "dqn is the nearest here, with priority_exponent and n_step, and "
            "exploration_ladder for many EnvRunners"
        ),
        "ars es": "no algorithm here is an evolution strategy: ppo works with many EnvRunners, too",
        "awac awr bcq cql dt marwil td3bc": "iql and bc learn from data sets here",
        "c51 ddqn doubledqn duelingdqn iqn qlearning qrdqn rainbow simpleq": (
            "dqn is the nearest here, with priority_exponent and n_step"
        ),
        "crossq redq tqc": (
            "sac is the nearest here, with replay_ratio for more updates of each step"
        ),
        "d4pg": "td3 is the nearest here",
        "ddpg": "td3 is its successor: it is DDPG with two critics, target_noise and policy_period",
        "discretesac": "sac is for Discrete actions, too",
        "dreamer dreamerv3 muzero": (
            "no algorithm here learns a model of its environment; sac and dqn "
            "need the fewest steps, and r2d2 has a memory"
        ),
        "drqn": "r2d2 is the nearest here",
        "gail": "it is the key imitation here, with an algorithm such as ppo",
        "ippo": "it is ppo here, with several modules in the tables agents and modules",
        "maddpg mappo qmix vdn": (
            "ppo is the nearest here, with critic_sees for a value function that sees what all "
            "agents do"
        ),
        "maskableppo": "it is ppo here: an action mask in infos is always kept to",
        "mpo": "sac is the nearest here",
        "ppo2": "it is ppo here",
        "ppolstm recurrentppo": 'it is ppo here, with recurrent = "lstm" in the table model',
        "rnd": "it is the key intrinsic here, with an algorithm such as ppo",
        "sarsa": "pqn is the nearest here",
        "trpo": "ppo is the nearest here: clip, and perhaps target_kl, replace TRPO's constraint",
    }
)


def algorithm_here(name: str) -> str:
    """Return the counterpart of another library's algorithm; "": unknown."""
    return _ALGORITHMS.get(re.sub(r"[^a-z0-9]", "", name.lower()), "")


def called_here(key: str, table: Mapping[str, str] = RUN_KEYS) -> str:
    """End an error about another library's key, or return "".

    Args:
        key: as given.
        table: RUN_KEYS or MODEL_KEYS.
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
