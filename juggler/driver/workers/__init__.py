"""The driver's side of its workers: ids, commands and messages."""
