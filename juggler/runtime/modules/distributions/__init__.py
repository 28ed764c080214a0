"""Action distributions, which give a meaning to a policy's outputs.

A `DistributionSpec` belongs to an action space. It has the number of outputs that a policy needs,
draws noise, and applies action masks. An `ActionDistribution` belongs to the outputs of one
forward pass. Sampling is a function of outputs and noise, so that an EnvRunner can draw the noise
of a whole fragment at once.
"""
