"""RLModules: policies and value functions, their action distributions and default models."""
