"""The Actor: contexts, recurrent states, module, draw and action connectors."""
