"""Several runs of one configuration: sweeps over its keys, and seeds."""
