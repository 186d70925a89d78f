"""Networks and likelihoods: what maps a row to numbers, and what the numbers say about y."""

from fedbayes.models.convolution import conv2d, depthwise_conv2d, max_pool
from fedbayes.models.likelihoods import Bernoulli, Categorical, Likelihood, Normal, Poisson
from fedbayes.models.model import Model, Network, from_equinox, from_flax, from_functions, with_learned_scale
from fedbayes.models.networks import cnn, linear, mlp, mobilenet, network
from fedbayes.models.targets import in_units

__all__ = [
    "Bernoulli", "Categorical", "Likelihood", "Model", "Network", "Normal", "Poisson", "cnn", "conv2d", "depthwise_conv2d",
    "from_equinox", "from_flax", "from_functions", "in_units", "linear", "max_pool", "mlp", "mobilenet", "network",
    "with_learned_scale",
]  # fmt: skip
