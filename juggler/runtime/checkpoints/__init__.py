"""The format of checkpoints, and reading them: all that a policy needs of a run."""
