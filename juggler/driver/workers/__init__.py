"""The driver's side of its workers: who they are, what they are told, what they say."""
