"""What acts: a module, what it remembers, and the connectors around it."""
