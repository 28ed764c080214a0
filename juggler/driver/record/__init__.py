"""What a run leaves behind and shows: metrics, its directory, its display."""
