"""Networks and likelihoods: what maps a row to numbers, and what the numbers say about y."""

from fedbayes.models.convolution import conv2d, depthwise_conv2d, max_pool
from fedbayes.models.likelihoods import Bernoulli, Categorical, Likelihood, Normal, Poisson
from fedbayes.models.networks import (
    Model,
    cnn,
    from_equinox,
    from_flax,
    from_functions,
    mlp,
    mobilenet,
    network,
    with_learned_scale,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Likelihood",
    "Model",
    "Normal",
    "Poisson",
    "cnn",
    "conv2d",
    "depthwise_conv2d",
    "from_equinox",
    "from_flax",
    "from_functions",
    "max_pool",
    "mlp",
    "mobilenet",
    "network",
    "with_learned_scale",
]
