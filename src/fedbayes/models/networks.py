"""Networks as pairs of pure functions over nested dicts of named arrays.

Every network here keeps its last layer under "head" and everything before it under "body", so that an algorithm that shares
one and keeps the other splits by path. `from_flax`, `from_equinox` and `from_functions` take anybody's own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Params
from fedbayes.errors import UserError
from fedbayes.models.convolution import Padding, conv2d, depthwise_conv2d, max_pool
from fedbayes.models.likelihoods import Categorical, Likelihood, Normal, likelihood_named

Init = str  # "torch" or "lecun"; not a Literal, so that a wrong word meets our error and not a type checker's
Apply = Callable[[Params, Shaped[Array, "n ..."]], Float[Array, "n k"]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A network and what its outputs mean: two pure functions and a likelihood.

    >>> model = mlp((4,), Categorical(3), hidden=(8,))
    >>> params = model.init(jax.random.key(0))
    >>> jax.tree.map(jnp.shape, params)
    {'body': {'dense0': {'bias': (8,), 'kernel': (4, 8)}}, 'head': {'bias': (3,), 'kernel': (8, 3)}}
    >>> model.apply(params, jnp.zeros((5, 4))).shape
    (5, 3)
    """

    init: Callable[[PRNGKeyArray], Params]
    """From a key to parameters: nested dicts of named arrays."""
    apply: Apply
    """From parameters and rows to `likelihood.outputs` numbers per row; may be jitted, mapped and differentiated."""
    likelihood: Likelihood
    """What the numbers mean."""
    name: str = "custom"

    def __repr__(self) -> str:
        return f"Model({self.name}, {self.likelihood})"


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
        return _Network(body, _linear(widths[-1], _network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="mlp")


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
        return _Network(body, _linear(widths[-1], _network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="cnn")


def mobilenet(
    shape: tuple[int, ...],
    likelihood: Likelihood,
    width: float = 1.0,
    groups: int = 8,
    blocks: tuple[tuple[int, int], ...] | None = None,
    shift: Any = 0.0,
    scale: Any = 1.0,
    init: Init = "torch",
) -> Model:
    """MobileNet for 32 × 32 images, as FedBABU uses it, with group instead of batch normalisation.

    A 3 × 3 convolution and thirteen blocks of a depthwise and a pointwise convolution. `width` multiplies the channels;
    `blocks`, channels and stride of the convolution and of each block, replaces `MOBILENET_BLOCKS` for another depth. Batch
    statistics differ between clients and are no parameters with a posterior, group statistics are of one row alone.

    References: Howard et al., MobileNets, 2017; Oh et al., FedBABU, 2022; Hsieh et al., The Non-IID Data Quagmire, 2020.

    >>> params = mobilenet((32, 32, 3), Categorical(100), width=0.25).init(jax.random.key(0))
    >>> params["head"]["kernel"].shape
    (256, 100)
    """
    h, w, c = _image(shape, "mobilenet")
    widths = [(max(groups, int(width * d) // groups * groups), stride) for d, stride in blocks or MOBILENET_BLOCKS]

    def factory(rngs: nnx.Rngs) -> nnx.Module:
        body = _Separable((h, w, c), widths, groups, init, rngs)
        return _Network(body, _linear(widths[-1][0], _network_outputs(likelihood), init, rngs))

    return from_flax(factory, likelihood, shape=shape, shift=shift, scale=scale, name="mobilenet")


MOBILENET_BLOCKS = (
    *((32, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
    *((512, 1),) * 5,
    *((1024, 2), (1024, 1)),
)
"""Channels and stride of the first convolution and of each block after it."""


def from_flax(
    factory: Callable[[nnx.Rngs], nnx.Module],
    likelihood: Likelihood,
    shape: tuple[int, ...] | None = None,
    shift: Any = None,
    scale: Any = None,
    name: str = "flax",
) -> Model:
    """A Flax (nnx) module that maps rows to outputs. With a learned scale, the module gives the mean alone.

    Rows reach the module as (x − shift) / scale in float32 where either is given, else as they are. With `shape`, the shape of
    one row, the outputs are checked against the likelihood here and not in the first round.

    >>> model = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs), Categorical(3), shape=(4,))
    >>> sorted(model.init(jax.random.key(0)))
    ['bias', 'kernel']
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    paths = []
    for path, variable in nnx.to_flat_state(abstract):
        if not isinstance(variable, nnx.Param):
            raise UserError(
                f"the Flax module keeps {type(variable).__name__} at {'/'.join(map(str, path))}, but a model is a pure "
                "function of its parameters; use group or layer in place of batch normalisation, and leave out dropout"
            )
        paths.append(path)

    def init(key: PRNGKeyArray) -> Params:
        state = nnx.state(factory(nnx.Rngs(key)))
        return _nested({path: variable.get_value() for path, variable in nnx.to_flat_state(state)})

    def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n k"]:
        state = nnx.from_flat_state([(path, nnx.Param(_at(params, path))) for path in paths])
        module: Any = nnx.merge(graph, state)
        output: Array = module(x)
        return output

    return from_functions(init, apply, likelihood, shape=shape, shift=shift, scale=scale, name=name)


def from_equinox(
    factory: Callable[[PRNGKeyArray], Any],
    likelihood: Likelihood,
    shape: tuple[int, ...] | None = None,
    shift: Any = None,
    scale: Any = None,
    name: str = "equinox",
) -> Model:
    """An Equinox module that maps one row to its outputs; its floating-point arrays are the parameters.

    `shape`, `shift` and `scale` are as for `from_flax`.

    >>> import equinox
    >>> model = from_equinox(lambda key: equinox.nn.MLP(4, 3, 8, 1, key=key), Categorical(3), shape=(4,))
    >>> model.init(jax.random.key(0))["layers"]["0"]["weight"].shape
    (8, 4)
    """
    import equinox

    example = factory(jax.random.key(0))
    if any(isinstance(leaf, equinox.nn.StateIndex) for leaf in jax.tree.leaves(example, is_leaf=_is_state_index)):
        raise UserError(
            "the Equinox module keeps running state, but a model is a pure function of its parameters; "
            "use equinox.nn.GroupNorm or LayerNorm in place of BatchNorm"
        )
    parameters, static = equinox.partition(example, equinox.is_inexact_array)
    leaves, structure = jax.tree_util.tree_flatten_with_path(parameters)
    paths = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in leaves]

    def init(key: PRNGKeyArray) -> Params:
        values = jax.tree.leaves(equinox.filter(factory(key), equinox.is_inexact_array))
        return _nested(dict(zip(paths, values, strict=True)))

    def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n k"]:
        module = equinox.combine(jax.tree.unflatten(structure, [_at(params, path) for path in paths]), static)
        output: Array = jax.vmap(module)(x)
        return output

    return from_functions(init, apply, likelihood, shape=shape, shift=shift, scale=scale, name=name)


def from_functions(
    init: Callable[[PRNGKeyArray], Params],
    apply: Apply,
    likelihood: Likelihood,
    shape: tuple[int, ...] | None = None,
    shift: Any = None,
    scale: Any = None,
    name: str = "functions",
) -> Model:
    """Any pair of pure functions; `init` gives nested dicts of arrays. With a learned scale, `apply` gives the mean alone.

    `shape`, `shift` and `scale` are as for `from_flax`.

    >>> def init(key):
    ...     return {"weights": jax.random.normal(key, (4, 1))}
    >>> def apply(params, x):
    ...     return x @ params["weights"]
    >>> model = from_functions(init, apply, Normal(scale=None), shape=(4,))
    >>> sorted(model.init(jax.random.key(0)))
    ['log_scale', 'weights']
    """
    abstract = jax.eval_shape(init, jax.random.key(0))
    if not isinstance(abstract, dict):
        raise UserError(f"a model's init gives nested dicts of named arrays, not {type(abstract).__name__}; return a dict")
    model = Model(init, _standardised(apply, shift, scale), likelihood, name)
    if likelihood == Normal(scale=None):
        model = with_learned_scale(model)
        abstract = jax.eval_shape(model.init, jax.random.key(0))
    if shape is not None:
        rows = 3  # not 1, which would hide an output that has no axis for rows
        x = jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
        found = jax.eval_shape(model.apply, abstract, x).shape
        if found != (rows, likelihood.outputs):
            raise UserError(
                f"{rows} rows of shape {shape} through the model {name} give {found}, but {likelihood} needs "
                f"{(rows, likelihood.outputs)}: {likelihood.outputs} numbers per row; change the last layer"
            )
    return model


def with_learned_scale(model: Model) -> Model:
    """A network that gives means, with one more parameter: the logarithm of the noise's scale, the same for every row.

    >>> means = Model(lambda key: {"mean": jnp.zeros(())}, lambda params, x: jnp.full((len(x), 1), params["mean"]), Normal())
    >>> model = with_learned_scale(means)
    >>> model.apply(model.init(jax.random.key(0)), jnp.zeros((5, 2))).shape
    (5, 2)
    """

    def init(key: PRNGKeyArray) -> Params:
        return {**model.init(key), "log_scale": jnp.zeros((), jnp.float32)}

    def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n 2"]:
        mean = model.apply({name: value for name, value in params.items() if name != "log_scale"}, x)
        if mean.shape != (len(x), 1):
            raise UserError(f"a network with a learned scale gives one mean per row, {(len(x), 1)}, but gave {mean.shape}")
        return jnp.concatenate([mean, jnp.broadcast_to(params["log_scale"], mean.shape)], axis=-1)

    return dataclasses.replace(model, init=init, apply=apply, likelihood=Normal(scale=None))


NETWORKS: dict[str, Callable[..., Model]] = {"mlp": mlp, "cnn": cnn, "mobilenet": mobilenet}


def network(name: str, clients: Any, likelihood: Likelihood | str | None = None, **options: Any) -> Model:
    """The network of that name for the rows of a data set: categorical where it has classes, else normal with a learned scale.

    `clients` has `shape`, `classes`, `shift` and `scale`; the options are those of the network's function.

    >>> import types
    >>> digits = types.SimpleNamespace(shape=(8, 8), classes=tuple(range(10)), shift=0.0, scale=16.0)
    >>> network("mlp", digits, hidden=(32,))
    Model(mlp, Categorical(classes=10))
    """
    if name not in NETWORKS:
        near = difflib.get_close_matches(name, list(NETWORKS), n=1) or list(NETWORKS)
        raise UserError(f'there is no network "{name}"; did you mean {" or ".join(near)}?')
    known = [option for option in inspect.signature(NETWORKS[name]).parameters if option not in ("shape", "shift", "scale")]
    for option in options:
        if option not in known:
            raise UserError(f"{name} has no option {option}; it has {', '.join(known)}")
    classes = None if clients.classes is None else len(clients.classes)
    if likelihood is None:
        likelihood = Normal(scale=None) if classes is None else Categorical(classes)
    elif isinstance(likelihood, str):
        likelihood = likelihood_named(likelihood, classes)
    shape = tuple(int(size) for size in clients.shape)
    model = NETWORKS[name](shape, likelihood, shift=clients.shift, scale=clients.scale, **options)
    if classes is not None:
        return model
    from fedbayes.models.targets import in_units

    return in_units(model, *clients.target_moments())


class _Network(nnx.Module):
    def __init__(self, body: nnx.Module, head: nnx.Module):
        self.body = body
        self.head = head

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        output: Array = self.head(self.body(x))
        return output


class _Dense(nnx.Module):
    def __init__(self, widths: tuple[int, ...], activation: Callable[[Array], Array], init: Init, rngs: nnx.Rngs):
        self.activation = activation
        self.inputs = widths[0]
        self.depth = len(widths) - 1
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
        self.image = image
        self.inputs = widths[0]
        self.depths = (len(channels), len(widths) - 1)
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
    def __init__(self, image: tuple[int, int, int], blocks: list[tuple[int, int]], groups: int, init: Init, rngs: nnx.Rngs):
        self.image = image
        self.strides = tuple(stride for _, stride in blocks)
        widths = [d for d, _ in blocks]
        self.stem = _Convolution(image[2], widths[0], init, rngs, stride=self.strides[0], padding="SAME", bias=False)
        self.norm = nnx.GroupNorm(widths[0], num_groups=groups, rngs=rngs)
        for i, (c, d) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"depthwise{i}", _Depthwise(c, self.strides[i + 1], init, rngs))
            setattr(self, f"depthwise_norm{i}", nnx.GroupNorm(c, num_groups=groups, rngs=rngs))
            setattr(self, f"pointwise{i}", _Convolution(c, d, init, rngs, size=1, bias=False))
            setattr(self, f"pointwise_norm{i}", nnx.GroupNorm(d, num_groups=groups, rngs=rngs))

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        x = x.reshape(len(x), *self.image)
        x = jax.nn.relu(self.norm(self.stem(x)))
        for i in range(len(self.strides) - 1):
            x = jax.nn.relu(getattr(self, f"depthwise_norm{i}")(getattr(self, f"depthwise{i}")(x)))
            x = jax.nn.relu(getattr(self, f"pointwise_norm{i}")(getattr(self, f"pointwise{i}")(x)))
        return x.mean(axis=(1, 2))


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


def _network_outputs(likelihood: Likelihood) -> int:
    return 1 if likelihood == Normal(scale=None) else likelihood.outputs


def _image(shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(shape) == 2:
        return shape[0], shape[1], 1
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    raise UserError(
        f"{name} needs images, rows of shape (height, width) or (height, width, channels), but rows have shape {shape}; use mlp"
    )


def _standardised(apply: Apply, shift: Any, scale: Any) -> Apply:
    if shift is None and scale is None:
        return apply
    # Kept as NumPy arrays: a JAX array here would be made before the user has chosen a device.
    shift = np.asarray(0.0 if shift is None else shift, np.float32)
    scale = np.asarray(1.0 if scale is None else scale, np.float32)

    def standardised(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n k"]:
        try:
            # Broadcast by JAX and not by NumPy, which would put an array as large as the batch into the compiled code.
            shifts, scales = (jnp.broadcast_to(jnp.asarray(value), x.shape) for value in (shift, scale))
        except ValueError:
            raise UserError(
                f"rows have shape {x.shape[1:]}, which shift {shift.shape} and scale {scale.shape} do not fit"
            ) from None
        return apply(params, (x.astype(jnp.float32) - shifts) / scales)

    return standardised


def _nested(flat: dict[tuple[Any, ...], Array]) -> Params:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        at = nested
        for part in path[:-1]:
            at = at.setdefault(str(part), {})
        at[str(path[-1])] = value
    return nested


def _at(params: Params, path: tuple[Any, ...]) -> Array:
    value: Any = params
    for part in path:
        value = value[str(part)]
    return value


def _is_state_index(leaf: Any) -> bool:
    import equinox

    return isinstance(leaf, equinox.nn.StateIndex)
