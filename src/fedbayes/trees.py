"""Pytrees: names of leaves, splitting by path, and a few reductions over whole trees."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedbayes.errors import UserError

Params = Any
"""A pytree of arrays, as a network's `init` returns it: nested dicts of named arrays."""


def named(tree: Any) -> dict[str, Any]:
    """Each leaf by its path.

    >>> sorted(named({"body": {"0": 1.0}, "head": (2.0, 3.0)}))
    ['body/0', 'head/0', 'head/1']
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def split(tree: Params, prefixes: Sequence[str], *, whole: bool = False) -> tuple[Params, Params]:
    """The leaves whose path starts with one of the prefixes, and the others; `merge` puts them together again.

    Both have the shape of `tree` with None where a leaf is in the other one, so neither holds what it should not send. Only
    with `whole` may the prefixes cover everything.

    >>> split({"body": 1.0, "head": 2.0}, ["head"])
    ({'body': None, 'head': 2.0}, {'body': 1.0, 'head': None})
    """
    paths = list(named(tree))
    if isinstance(prefixes, str):
        raise UserError(f"the layers are {prefixes!r}, but they are a tuple of paths, such as ({prefixes!r},)")
    for prefix in prefixes:
        if not any(_under(path, prefix) for path in paths):
            raise UserError(f"no parameter lies under {prefix!r}; the network has {', '.join(paths)}")
    inside = [any(_under(path, prefix) for prefix in prefixes) for path in paths]
    if all(inside) and not whole:
        raise UserError(f"{', '.join(prefixes)} covers every parameter of the network, so nothing is left to share")
    leaves, treedef = jax.tree.flatten(tree)
    chosen = [leaf if yes else None for leaf, yes in zip(leaves, inside, strict=True)]
    others = [None if yes else leaf for leaf, yes in zip(leaves, inside, strict=True)]
    return jax.tree.unflatten(treedef, chosen), jax.tree.unflatten(treedef, others)


def frozen(tree: Params, prefixes: Sequence[str], scale: float) -> tuple[Params, Params]:
    """The part that stays at its start, here multiplied by a scale, and the part that is trained.

    >>> frozen({"body": 1.0, "head": 2.0}, ["head"], 3.0)
    ({'body': None, 'head': 6.0}, {'body': 1.0, 'head': None})
    """
    if not prefixes and scale != 1:
        raise UserError(f"head_scale is {scale:g}, but no layer is frozen; leave it out, or give the frozen layers as head")
    fixed, trained = split(tree, prefixes)
    return jax.tree.map(lambda leaf: scale * leaf, fixed), trained


def _under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")


def merge(one: Params, other: Params) -> Params:
    """The inverse of `split`.

    >>> merge(*split({"body": 1.0, "head": 2.0}, ["head"]))
    {'body': 1.0, 'head': 2.0}
    """
    return jax.tree.map(lambda a, b: b if a is None else a, one, other, is_leaf=lambda leaf: leaf is None)


def choose(first: Any, one: Params, other: Params) -> Params:
    """One tree where `first` is true, else the other; it may be traced.

    >>> choose(jnp.bool_(False), {"w": 1.0}, {"w": 2.0})["w"].item()
    2.0
    """
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def squared_distance(one: Params, other: Params) -> Float[Array, ""]:
    """Sum over all leaves of (one − other)²."""
    terms = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), one, other)
    return jax.tree.reduce(jnp.add, terms, jnp.float32(0))


def normal_like(key: PRNGKeyArray, tree: Params) -> Params:
    """Standard normal noise in the shape of a tree. Models that were saved predict with these numbers: they stay as they are.

    >>> tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    >>> first, second = jax.random.split(jax.random.key(0))
    >>> noise = normal_like(jax.random.key(0), tree)
    >>> bool(jnp.all(noise["a"] == jax.random.normal(first, (2, 3)))), bool(jnp.all(noise["b"] == jax.random.normal(second, 2)))
    (True, True)
    """
    leaves, structure = jax.tree.flatten(tree)
    keys, most = jax.random.split(key, len(leaves)), max(leaf.size for leaf in leaves)
    if len(leaves) * most <= AT_ONCE:  # one program for all leaves, of which each takes what it needs, compiles much faster
        drawn = jax.vmap(lambda key: jax.random.normal(key, (most,)))(keys)
        noise = [row[: leaf.size].reshape(leaf.shape) for row, leaf in zip(drawn, leaves, strict=True)]
    else:
        noise = [jax.random.normal(one, leaf.shape) for one, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, noise)


AT_ONCE = 100_000  # normal numbers, at most, of which some may be drawn in vain


def normal_around(key: PRNGKeyArray, mean: Params, variance: Params) -> Params:
    """A normal draw with these means and variances.

    >>> normal_around(jax.random.key(0), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"].tolist()
    [1.0, 1.0]
    """
    return jax.tree.map(lambda m, v, e: m + jnp.sqrt(v) * e, mean, variance, normal_like(key, mean))


def finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number in every floating leaf is finite."""
    flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack(flags).all() if flags else jnp.bool_(True)


@contextlib.contextmanager
def other_peoples_code() -> Iterator[None]:
    """Let arrays of different types and ranks meet, as they do inside NumPyro and Optax; our own code is strict."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def quietly(module: str) -> Any:
    """Import a package that warns of its own future, which is no news to our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


def arrays_of(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """The shapes of the arrays in a tree, with None where a leaf is a plain value; and what puts the plain values back.

    >>> shapes, whole = arrays_of({"n": 3, "y": jnp.zeros(3)})
    >>> shapes["n"], whole({"n": None, "y": 1})["n"]
    (None, 3)
    """
    leaves, treedef = jax.tree.flatten(tree)
    plain = [not hasattr(leaf, "shape") for leaf in leaves]
    shapes = [None if skip else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf, skip in zip(leaves, plain, strict=True)]

    def whole(given: Any) -> Any:
        rest = iter(jax.tree.leaves(given))
        return jax.tree.unflatten(treedef, [leaf if skip else next(rest) for leaf, skip in zip(leaves, plain, strict=True)])

    return jax.tree.unflatten(treedef, shapes), whole


class Form(NamedTuple):
    """The static (non-array) part of a silo's data. Silos of one form share a compiled program."""

    treedef: Any
    plain: tuple[Hashable, ...]
    """A value where a leaf is a plain one, else None."""
    shapes: tuple[Any, ...]


def take_apart(data: Any) -> tuple[Form, tuple[Array, ...]]:
    """A silo's data as arrays and the rest: numbers, strings and None stay what they are, so that they can be sizes.

    >>> form, arrays = take_apart({"n": 3, "y": np.ones(3)})
    >>> len(arrays), put_together(form, arrays)["n"]
    (1, 3)
    """
    if isinstance(data, pd.DataFrame):
        data = {str(name): column.to_numpy() for name, column in data.items()}
    leaves, treedef = jax.tree.flatten(data)
    arrays: list[Array] = []
    plain: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, np.integer | np.bool_) or (
            isinstance(leaf, int | float | str) and not isinstance(leaf, np.floating)
        ):
            plain.append(leaf.item() if isinstance(leaf, np.generic) else leaf)
            continue
        try:
            arrays.append(jnp.asarray(leaf.to_numpy() if isinstance(leaf, pd.Series) else leaf))
        except (TypeError, ValueError):
            kind = getattr(getattr(leaf, "dtype", None), "name", type(leaf).__name__)
            raise UserError(f"its data holds {kind}, but data is arrays of numbers; turn text into numbers first") from None
        plain.append(None)
    return Form(treedef, tuple(plain), tuple((leaf.shape, str(leaf.dtype)) for leaf in arrays)), tuple(arrays)


def put_together(form: Form, arrays: Sequence[Any]) -> Any:
    """The inverse of `take_apart`."""
    rest = iter(arrays)
    return jax.tree.unflatten(form.treedef, [next(rest) if leaf is None else leaf for leaf in form.plain])


def zeros_of(form: Form) -> Any:
    """Data of this form whose arrays are zeros.

    >>> zeros_of(take_apart({"n": 3, "y": np.ones(2)})[0])["y"].tolist()
    [0.0, 0.0]
    """
    return put_together(form, [jnp.zeros(shape, dtype) for shape, dtype in form.shapes])


def strong(tree: Any) -> Any:
    """Arrays without weak types: else what comes out of a round has another type than what went in, and compiles again."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), tree)


def zeros(tree: Any) -> Any:
    """Zeros with the shapes and dtypes of `tree`, whose leaves may be ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def size(tree: Any) -> int:
    """Bytes of all leaves."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
