"""Connectors: small callables over whole batches, between environment, module and learner."""
