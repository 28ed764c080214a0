"""Recording, writing and replay of data sets of episodes."""
