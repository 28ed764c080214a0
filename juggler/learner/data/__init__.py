"""Batches on their way to an update: validation, storage, collation."""
