"""What every process of a run shares: wire, actors, episodes, modules, connectors."""
