"""A model: a network as two pure functions over nested dicts of named arrays, and what its outputs mean.

`from_flax`, `from_equinox` and `from_functions` take anybody's own network.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.errors import UserError
from fedbayes.models.likelihoods import Likelihood, Normal
from fedbayes.trees import Params

Apply = Callable[[Params, Shaped[Array, "n ..."]], Float[Array, "n k"]]
P = ParamSpec("P")


class Recipe(NamedTuple):
    """The function of this package that made a model, and its arguments."""

    maker: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Model:
    """A network and what its outputs mean: two pure functions and a likelihood.

    >>> from fedbayes.models import Categorical, mlp
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
    features: Apply | None = None
    """From parameters and rows to the numbers that the last layer sees; None where the network has no such place."""
    readout: Apply | None = None
    """From parameters and features to outputs: `apply` is `readout` of `features`."""
    recipe: Recipe | None = dataclasses.field(default=None, compare=False)
    """How a file may say to make it again; None for anybody's own network."""

    def __repr__(self) -> str:
        return f"Model({self.name}, {self.likelihood})"


def remembered(make: Callable[P, Model]) -> Callable[P, Model]:
    """Let the models that a function makes know how they were made."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> Model:
        model, bound = make(*args, **options), signature.bind(*args, **options)
        bound.apply_defaults()
        return dataclasses.replace(model, recipe=Recipe(make.__name__, dict(bound.arguments)))

    return made


class Network(nnx.Module):
    """A body and a head after it. `from_flax` knows such a module's features: what the body gives.

    >>> module = Network(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1)))
    >>> module(jnp.zeros((5, 4))).shape
    (5, 3)
    """

    def __init__(self, body: nnx.Module, head: nnx.Module):
        self.body = body
        self.head = head

    def __call__(self, x: Float[Array, "n ..."]) -> Float[Array, "n k"]:
        """The head of the body."""
        output: Array = self.head(self.body(x))
        return output


def from_flax(
    factory: Callable[[nnx.Rngs], nnx.Module] | linen.Module,
    likelihood: Likelihood,
    shape: tuple[int, ...] | None = None,
    shift: Any = None,
    scale: Any = None,
    name: str = "flax",
) -> Model:
    """A function that makes a Flax (nnx) module of rows to outputs, or a linen module, which needs `shape`.

    With a learned scale, the module gives the mean alone.

    Rows reach the module as (x − shift) / scale in float32 where either is given, else as they are. With `shape`, the shape of
    one row, the outputs are checked against the likelihood here and not in the first round.

    >>> from fedbayes.models import Categorical
    >>> model = from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs), Categorical(3), shape=(4,))
    >>> sorted(model.init(jax.random.key(0)))
    ['bias', 'kernel']
    """
    if isinstance(factory, linen.Module):
        return from_functions(*_linen(factory, shape), likelihood, shape=shape, shift=shift, scale=scale, name=name)
    if isinstance(factory, nnx.Module):
        kind = type(factory).__name__
        advice = f"it takes a function that makes one: lambda rngs: {kind}(…, rngs=rngs)"
        raise UserError(f"from_flax got the module {kind}, but {advice}")
    module = nnx.eval_shape(lambda: factory(nnx.Rngs(0)))

    def init(key: PRNGKeyArray) -> Params:
        state = nnx.state(factory(nnx.Rngs(key)))
        return _nested({path: variable.get_value() for path, variable in nnx.to_flat_state(state)})

    halves = {}
    if isinstance(module, Network):
        halves = {"features": _pure(module.body, ("body",)), "readout": _pure(module.head, ("head",))}
    return from_functions(init, _pure(module), likelihood, shape=shape, shift=shift, scale=scale, name=name, **halves)


def _linen(module: Any, shape: tuple[int, ...] | None) -> tuple[Callable[[PRNGKeyArray], Params], Apply]:
    """A linen module as two functions; it finds its sizes from a row."""
    if shape is None:
        raise UserError("a linen module reads its sizes off a row, but shape is missing; give that of one row: clients.shape")

    def init(key: PRNGKeyArray) -> Params:
        variables = module.init(key, jnp.zeros((1, *shape)))
        if others := sorted(set(variables) - {"params"}):
            raise _stateful(", ".join(others))
        return variables["params"]

    return init, lambda params, x: module.apply({"params": params}, x)


def _stateful(kept: str) -> UserError:
    advice = "use group or layer in place of batch normalisation, and leave out dropout"
    return UserError(f"the Flax module keeps {kept}, but a model is a pure function of its parameters; {advice}")


def _pure(module: nnx.Module, at: tuple[str, ...] = ()) -> Apply:
    """A module as a function of its parameters, which lie at a path of the whole network's."""
    graph, abstract = nnx.split(module)
    paths = []
    for path, variable in nnx.to_flat_state(abstract):
        if not isinstance(variable, nnx.Param):
            raise _stateful(f"{type(variable).__name__} at {'/'.join(map(str, path))}")
        paths.append(path)

    def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n k"]:
        state = nnx.from_flat_state([(path, nnx.Param(_at(params, (*at, *path)))) for path in paths])
        merged: Any = nnx.merge(graph, state)
        output: Array = merged(x)
        return output

    return apply


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

    >>> from fedbayes.models import Categorical
    >>> import equinox
    >>> model = from_equinox(lambda key: equinox.nn.MLP(4, 3, 8, 1, key=key), Categorical(3), shape=(4,))
    >>> model.init(jax.random.key(0))["layers"]["0"]["weight"].shape
    (8, 4)
    """
    import equinox

    example = factory(jax.random.key(0))

    def stateful(leaf: Any) -> bool:
        return isinstance(leaf, equinox.nn.StateIndex)

    if any(map(stateful, jax.tree.leaves(example, is_leaf=stateful))):
        advice = "use equinox.nn.GroupNorm or LayerNorm in place of BatchNorm"
        raise UserError(f"the Equinox module keeps running state, but a model is a pure function of its parameters; {advice}")
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
    features: Apply | None = None,
    readout: Apply | None = None,
) -> Model:
    """Any pair of pure functions; `init` gives nested dicts of arrays. With a learned scale, `apply` gives the mean alone.

    `shape`, `shift` and `scale` are as for `from_flax`. With `features` and `readout`, of which `apply` is the composition,
    methods that look at a network's last layer take it too.

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
    whole = _standardised(apply, shift, scale)
    model = Model(init, whole, likelihood, name, features and _standardised(features, shift, scale), readout)
    if likelihood == Normal(scale=None):
        model = with_learned_scale(model)
        abstract = jax.eval_shape(model.init, jax.random.key(0))
    if shape is not None:
        rows = 3  # not 1, which would hide an output that has no axis for rows
        x = jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
        found = jax.eval_shape(model.apply, abstract, x).shape
        if found != (rows, likelihood.outputs):
            needs = f"{likelihood} needs {(rows, likelihood.outputs)}: {likelihood.outputs} numbers per row"
            raise UserError(f"{rows} rows of shape {shape} through {name} give {found}, but {needs}; change the last layer")
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

    def beside(inner: Apply) -> Apply:
        def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n 2"]:
            mean = inner({name: value for name, value in params.items() if name != "log_scale"}, x)
            if mean.shape != (len(x), 1):
                raise UserError(f"a network with a learned scale gives one mean per row, {(len(x), 1)}, but gave {mean.shape}")
            return jnp.concatenate([mean, jnp.broadcast_to(params["log_scale"], mean.shape)], axis=-1)

        return apply

    return dataclasses.replace(after(model, beside), init=init, likelihood=Normal(scale=None))


def after(model: Model, change: Callable[[Apply], Apply]) -> Model:
    """The model with its outputs changed, whether they are computed from rows or from features."""
    readout = model.readout and change(model.readout)
    return dataclasses.replace(model, apply=change(model.apply), readout=readout, recipe=None)


def network_outputs(likelihood: Likelihood) -> int:
    """How many numbers the network itself gives per row: a learned scale is a leaf beside it."""
    return 1 if likelihood == Normal(scale=None) else likelihood.outputs


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
            own = f"shift {shift.shape} and scale {scale.shape}"
            raise UserError(f"rows have shape {x.shape[1:]}, which {own} do not fit") from None
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


def _at(params: Params, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda value, part: value[str(part)], path, params)
