"""From episodes to weights: algorithms, returns, optimizers, and the Learner."""
