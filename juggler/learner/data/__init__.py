"""Batches before an update: validation, storage, collation."""
