"""Built-in algorithms, one folder each."""
