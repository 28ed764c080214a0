"""Action distributions, which give a meaning to a policy's outputs.

A `DistributionSpec` belongs to an action space. It has the number of outputs that a policy needs,
draws noise, and applies action masks. An `ActionDistribution` belongs to the outputs of one
forward pass. Sampling is a function of outputs and noise, so that an EnvRunner can draw the noise
of a whole fragment at once.
"""

from juggler.runtime.modules.distributions.base import (
    ActionDistribution,
    Actions,
    ClippedGaussian,
    ClippedGaussianSpec,
    DiagGaussian,
    DistributionSpec,
    GaussianSpec,
    SquashedGaussian,
    SquashedGaussianSpec,
)
from juggler.runtime.modules.distributions.for_space import (
    Bernoulli,
    BernoulliSpec,
    Categorical,
    CategoricalSpec,
    Composite,
    CompositeSpec,
    MultiCategorical,
    MultiCategoricalSpec,
    distribution_for,
)

__all__ = [
    "ActionDistribution",
    "Actions",
    "Bernoulli",
    "BernoulliSpec",
    "Categorical",
    "CategoricalSpec",
    "ClippedGaussian",
    "ClippedGaussianSpec",
    "Composite",
    "CompositeSpec",
    "DiagGaussian",
    "DistributionSpec",
    "GaussianSpec",
    "MultiCategorical",
    "MultiCategoricalSpec",
    "SquashedGaussian",
    "SquashedGaussianSpec",
    "distribution_for",
]
