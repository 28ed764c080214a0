"""The driver's work with its workers: commands, messages, evaluations and matches."""
