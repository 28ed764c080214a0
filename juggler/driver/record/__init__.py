"""What a run leaves behind and shows: checkpoints, metrics, its directory, its display."""
