"""Networks as pairs of pure functions over nested dicts of named arrays.

Every network here keeps its last layer under "head" and everything before it under "body", so that an algorithm that shares
one and keeps the other splits by path.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.errors import UserError, nearest
from fedbayes.models.convolution import Padding, conv2d, depthwise_conv2d, max_pool
from fedbayes.models.likelihoods import Bernoulli, Categorical, Likelihood, Normal, likelihood_named
from fedbayes.models.model import Model, Network, from_flax, network_outputs, remembered
from fedbayes.models.targets import in_units

Init = str  # "torch" or "lecun"; not a Literal, so that a wrong word meets our error and not a type checker's


@remembered
def mlp(
    shape: tuple[int, ...],
    likelihood: Likelihood,
    hidden: tuple[int, ...] = (256,),
    shift: Any = 0.0,
    scale: Any = 1.0,
    activation: Callable[[Array], Array] = jax.nn.relu,
    init: Init = "torch",
) -> Model:
    """Dense layers over rows of any shape, flattened; no hidden layer makes it linear.

    >>> mlp((28, 28), Categorical(10))
    Model(mlp, Categorical(classes=10))
    """

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        widths = (math.prod(shape), *hidden)
        body = _Dense(widths, activation, init, rngs)
        return Network(body, _linear(widths[-1], network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="mlp")


@remembered
def cnn(
    shape: tuple[int, ...],
    likelihood: Likelihood,
    channels: tuple[int, ...] = (32, 64),
    hidden: tuple[int, ...] = (128,),
    shift: Any = 0.0,
    scale: Any = 1.0,
    init: Init = "torch",
) -> Model:
    """The network for FEMNIST: 3 × 3 convolutions of 32 and 64 channels, max-pooling, a dense layer of 128.

    Reference: Reddi et al., Adaptive Federated Optimization, 2020 (table 4). Their dropout is left out: the posterior over
    weights takes its place.

    >>> params = cnn((28, 28), Categorical(62)).init(jax.random.key(0))
    >>> params["body"]["dense0"]["kernel"].shape
    (9216, 128)
    """
    h, w, c = _image(shape, "cnn")
    rows, columns = (h - 2 * len(channels)) // 2, (w - 2 * len(channels)) // 2
    if rows < 1 or columns < 1:
        raise UserError(f"cnn needs images of at least {2 * len(channels) + 2} pixels a side, but rows have shape {shape}")

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        widths = (rows * columns * channels[-1], *hidden)
        body = _Convolutional((h, w, c), channels, widths, init, rngs)
        return Network(body, _linear(widths[-1], network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="cnn")


@remembered
def mobilenet(
    shape: tuple[int, ...],
    likelihood: Likelihood,
    width: float = 1.0,
    group: int = 8,
    blocks: tuple[tuple[int, int], ...] | None = None,
    shift: Any = 0.0,
    scale: Any = 1.0,
    init: Init = "torch",
) -> Model:
    """MobileNet for 32 × 32 images, in a form that learns without batch statistics.

    A 3 × 3 convolution and thirteen blocks of a depthwise and a pointwise convolution. `width` multiplies the channels;
    `blocks`, channels and stride of the convolution and of each block, replaces `MOBILENET_BLOCKS` for another depth. Batch
    statistics differ between clients and are no parameters with a posterior; statistics of a group of `group` channels are
    of one row alone. With these in the place of batch statistics and nothing else changed, the network does not learn:
    after a few blocks all rows look alike. So a block has no activation between its two convolutions, its ReLU has mean 0
    and variance 1 for a standard normal, and its input is added where the shape is the same.

    References: Howard et al., MobileNets, 2017; Oh et al., FedBABU, 2022; Hsieh et al., The Non-IID Data Quagmire, 2020.

    >>> params = mobilenet((32, 32, 3), Categorical(100), width=0.25).init(jax.random.key(0))
    >>> params["head"]["kernel"].shape
    (256, 100)
    """
    h, w, c = _image(shape, "mobilenet")
    widths = [(max(group, int(width * d) // group * group), stride) for d, stride in blocks or MOBILENET_BLOCKS]

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        body = _Separable((h, w, c), widths, group, init, rngs)
        return Network(body, _linear(widths[-1][0], network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="mobilenet")


MOBILENET_BLOCKS = (
    *((32, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
    *((512, 1),) * 5,
    *((1024, 2), (1024, 1)),
)
"""Channels and stride of the first convolution and of each block after it."""


@remembered
def linear(shape: tuple[int, ...], likelihood: Likelihood, shift: Any = 0.0, scale: Any = 1.0, init: Init = "torch") -> Model:
    """A linear model with an intercept: logistic regression, least squares, Poisson regression.

    >>> linear((4,), Categorical(3))
    Model(linear, Categorical(classes=3))
    """
    return dataclasses.replace(mlp(shape, likelihood, (), shift, scale, init=init), name="linear")


NETWORKS: dict[str, Callable[..., Model]] = {"linear": linear, "mlp": mlp, "cnn": cnn, "mobilenet": mobilenet}


def network(name: str, clients: Any, likelihood: Likelihood | str | None = None, **options: Any) -> Model:
    """The network of that name for the rows of a data set: categorical where it has classes, else normal with a learned scale.

    `clients` has `shape`, `classes`, `shift` and `scale`; the options are those of the network's function.

    >>> import types
    >>> digits = types.SimpleNamespace(shape=(8, 8), classes=tuple(range(10)), shift=0.0, scale=16.0)
    >>> network("mlp", digits, hidden=(32,))
    Model(mlp, Categorical(classes=10))
    """
    if name not in NETWORKS:
        raise UserError(f'there is no network "{name}"; {nearest(name, NETWORKS)}')
    known = [option for option in inspect.signature(NETWORKS[name]).parameters if option not in ("shape", "shift", "scale")]
    for option in options:
        if option not in known:
            raise UserError(f"{name} has no option {option}; it has {', '.join(known)}")
        if option in ("hidden", "channels") and isinstance(options[option], int):
            raise UserError(f"{option} is {options[option]}, but it is a tuple of widths, such as ({options[option]},)")
    classes = None if clients.classes is None else len(clients.classes)
    if likelihood is None:
        likelihood = Normal(scale=None) if classes is None else Categorical(classes)
    elif isinstance(likelihood, str):
        likelihood = likelihood_named(likelihood, classes)
        if classes is not None and not isinstance(likelihood, Bernoulli | Categorical):
            # Labels are numbered as they come, so their numbers mean nothing as numbers.
            raise UserError(f"the target is labels, but {likelihood} is for numbers; load it with task counts or regression")
    shape = tuple(int(size) for size in clients.shape)
    model = NETWORKS[name](shape, likelihood, shift=clients.shift, scale=clients.scale, **options)
    return model if classes is not None else in_units(model, *clients.target_moments())


class _Dense(nnx.Module):
    def __init__(self, widths: tuple[int, ...], activation: Callable[[Array], Array], init: Init, rngs: nnx.Rngs):
        self.activation, self.inputs, self.depth = activation, widths[0], len(widths) - 1
        for i in range(self.depth):
            setattr(self, f"dense{i}", _linear(widths[i], widths[i + 1], init, rngs))

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        x = x.reshape(len(x), self.inputs)
        for i in range(self.depth):
            x = self.activation(getattr(self, f"dense{i}")(x))
        return x


class _Convolutional(nnx.Module):
    def __init__(
        self, image: tuple[int, int, int], channels: tuple[int, ...], widths: tuple[int, ...], init: Init, rngs: nnx.Rngs
    ):
        self.image, self.inputs, self.depths = image, widths[0], (len(channels), len(widths) - 1)
        for i, (c, d) in enumerate(zip((image[2], *channels), channels, strict=False)):
            setattr(self, f"conv{i}", _Convolution(c, d, init, rngs))
        for i in range(self.depths[1]):
            setattr(self, f"dense{i}", _linear(widths[i], widths[i + 1], init, rngs))

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        x = x.reshape(len(x), *self.image)
        last = self.depths[0] - 1
        for i in range(self.depths[0]):
            x = jax.nn.relu(getattr(self, f"conv{i}")(x, pool=2 if i == last else 1))
        x = x.reshape(len(x), self.inputs)
        for i in range(self.depths[1]):
            x = jax.nn.relu(getattr(self, f"dense{i}")(x))
        return x


class _Separable(nnx.Module):
    def __init__(self, image: tuple[int, int, int], blocks: list[tuple[int, int]], group: int, init: Init, rngs: nnx.Rngs):
        self.image = image
        self.strides = tuple(stride for _, stride in blocks)
        widths = [d for d, _ in blocks]
        self.stem = _Convolution(image[2], widths[0], init, rngs, stride=self.strides[0], padding="SAME", bias=False)
        self.norm = nnx.GroupNorm(widths[0], num_groups=None, group_size=group, rngs=rngs)
        for i, (c, d) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"depthwise{i}", _Depthwise(c, self.strides[i + 1], init, rngs))
            setattr(self, f"pointwise{i}", _Convolution(c, d, init, rngs, size=1, bias=False))
            setattr(self, f"norm{i}", nnx.GroupNorm(d, num_groups=None, group_size=group, rngs=rngs))

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        x = x.reshape(len(x), *self.image)
        x = _centred_relu(self.norm(self.stem(x)))
        for i in range(len(self.strides) - 1):
            y = getattr(self, f"pointwise{i}")(getattr(self, f"depthwise{i}")(x))
            y = _centred_relu(getattr(self, f"norm{i}")(y))
            x = x + y if x.shape == y.shape else y
        return x.mean(axis=(1, 2))


def _centred_relu(x: Array) -> Array:
    """ReLU with mean 0 and variance 1 for a standard normal: the next convolution sees what differs between rows."""
    mean = 1 / math.sqrt(2 * math.pi)
    return (jax.nn.relu(x) - mean) / math.sqrt(0.5 - mean**2)


class _Convolution(nnx.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        init: Init,
        rngs: nnx.Rngs,
        size: int = 3,
        stride: int = 1,
        padding: Padding = "VALID",
        bias: bool = True,
    ):
        kernel, zero = _initialisers(init, size * size * inputs)
        self.stride = stride
        self.padding = padding
        self.kernel = nnx.Param(kernel(rngs.params(), (size, size, inputs, outputs)))
        self.bias = nnx.Param(zero(rngs.params(), (outputs,))) if bias else None

    def __call__(self, x: Float[Array, "n h w c"], pool: int = 1) -> Float[Array, "n p q d"]:
        # The maximum of y + bias is the maximum of y, plus the bias; so the bias is added to fewer numbers after the pool.
        y = max_pool(conv2d(x, self.kernel[...], self.stride, self.padding), pool)
        return y if self.bias is None else y + self.bias[...].reshape(1, 1, 1, -1)


class _Depthwise(nnx.Module):
    def __init__(self, channels: int, stride: int, init: Init, rngs: nnx.Rngs):
        kernel, _ = _initialisers(init, 9)
        self.stride = stride
        self.kernel = nnx.Param(kernel(rngs.params(), (3, 3, channels)))

    def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n p q c"]:
        return depthwise_conv2d(x, self.kernel[...], self.stride, "SAME")


def _linear(inputs: int, outputs: int, init: Init, rngs: nnx.Rngs) -> nnx.Linear:
    kernel, bias = _initialisers(init, inputs)
    return nnx.Linear(inputs, outputs, kernel_init=kernel, bias_init=bias, rngs=rngs)


def _initialisers(init: Init, inputs: int) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Of a kernel and a bias: PyTorch's default, U(±1/sqrt(inputs)) for both; or N(0, 1/inputs), cut at ±2, and zero."""
    if init == "torch":

        def uniform(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            bound = 1 / math.sqrt(inputs)
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        return uniform, uniform
    if init == "lecun":

        def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
            deviation = 0.87962566103423978  # of a standard normal cut at ±2
            return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) / (deviation * math.sqrt(inputs))

        return normal, lambda key, shape, dtype=jnp.float32: jnp.zeros(shape, dtype)
    raise UserError(f'there is no initialisation "{init}"; use torch or lecun')


def _image(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(shape) not in (2, 3):
        needs = "images, rows of shape (height, width) or (height, width, channels)"
        raise UserError(f"{name} needs {needs}, but rows have shape {shape}; use mlp")
    h, w, c = (*shape, 1)[:3]
    return h, w, c
