"""dm_env_rpc, in both directions: simulators that serve it, and Gymnasium environments served."""
