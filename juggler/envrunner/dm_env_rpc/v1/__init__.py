"""Generated from proto/juggler/envrunner/dm_env_rpc/v1 by `make proto`."""
