"""Action distributions, which give a meaning to a policy's outputs.

A `DistributionSpec` belongs to an action space. It says how many outputs a policy needs for it, how
to draw noise, and how to apply an action mask. An `ActionDistribution` belongs to the outputs of
one forward pass. Sampling is a function of outputs and noise, so that an EnvRunner can draw the
noise of a whole fragment at once.
"""

from juggler.runtime.modules.distributions.base import ActionDistribution, Actions, DistributionSpec
from juggler.runtime.modules.distributions.bernoulli import Bernoulli, BernoulliSpec
from juggler.runtime.modules.distributions.categorical import Categorical, CategoricalSpec
from juggler.runtime.modules.distributions.clipped_gaussian import (
    ClippedGaussian,
    ClippedGaussianSpec,
)
from juggler.runtime.modules.distributions.composite import Composite, CompositeSpec
from juggler.runtime.modules.distributions.for_space import distribution_for
from juggler.runtime.modules.distributions.gaussian import DiagGaussian, GaussianSpec
from juggler.runtime.modules.distributions.multi_categorical import (
    MultiCategorical,
    MultiCategoricalSpec,
)
from juggler.runtime.modules.distributions.squashed_gaussian import (
    SquashedGaussian,
    SquashedGaussianSpec,
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
