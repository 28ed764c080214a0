"""What a checkpoint is, and reading one: all that a policy needs of a run."""
