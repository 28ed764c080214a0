"""Shared by all processes of a run: wire, actors, episodes, modules, connectors."""
