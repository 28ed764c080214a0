"""EnvRunner whose environments are simulators that dial in."""
