"""Silos of different lengths in one compiled program: rows that count nothing, up to a length that many silos share.

A compiled sampler takes seconds for each shape of data, and silos rarely have equally many rows. Where rows stand apart given
the latents, copies of the first row are added, and their terms of the log density belong to no block, so that nothing counts
them. Whether rows stand apart is found from numbers: the terms of all other rows must stay what they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes.errors import UserError
from fedbayes.models.linked import Linked, plain
from fedbayes.models.structured import Structured
from fedbayes.primitives.dependence import linked
from fedbayes.trees import put_together, take_apart

LEAST = 8
POINTS = 2


def bucket(n: int) -> int:
    """The length that n rows are padded to: at most a quarter more.

    >>> [bucket(n) for n in (3, 17, 36, 44, 500, 512)]
    [8, 24, 40, 48, 512, 512]
    """
    step = max(LEAST, 2 ** (n.bit_length() - 1) // 4)
    return -(-n // step) * step


def padded(structured: Structured, data: Any) -> Any:
    """A silo's data with its dependency structure, padded where that changes nothing."""
    data = plain(data)
    axes: dict[str, int] = {}
    if not structured.everyone(data) and (found := _padded(structured, data)) is not None:
        longer, axes = found
    if not axes:
        return linked(structured, data)
    joined = linked(structured, longer)
    whole = joined if isinstance(joined, Linked) else Linked(longer, {}, (), (), "")
    if whole.why:
        return linked(structured, data)
    shapes = _shapes(structured, whole.data)
    sizes = {one.plate.name: one.plate.size for one in structured.local_latents(whole) if one.plate.name}
    nowhere = sum(sizes.values())  # the number of no block; one more is not even counted there
    before, links = _shapes(structured, data), dict(whole.links)
    for site, axis in axes.items():
        shape = shapes[site]
        known = links.get(site, jnp.full(shape, nowhere, jnp.int32))
        place = jnp.arange(shape[axis]).reshape([-1 if one == axis else 1 for one in range(len(shape))])
        links[site] = jnp.where(jnp.broadcast_to(place, shape) < before[site][axis], known, nowhere + 1).astype(jnp.int32)
    return Linked(whole.data, links, whole.layout, whole.indexed, whole.why)


def cut(structured: Structured, data: Any, prepared: Any) -> Any:
    """A silo's own data with the structure that was found in its padded form."""
    if not isinstance(prepared, Linked):
        return data
    shapes = _shapes(structured, data)
    links = {site: link[tuple(map(slice, shapes[site]))] for site, link in prepared.links.items()}
    return Linked(data, links, prepared.layout, prepared.indexed, prepared.why)


def _padded(structured: Structured, data: Any) -> tuple[Any, dict[str, int]] | None:
    """The data with more rows, and the axis along which each site's terms became longer; None where rows do not stand apart."""
    form, arrays = take_apart(data)
    data = put_together(form, arrays)
    latents = [(one.name, one.shape) for one in structured.local_latents(data)]
    before = _shapes(structured, data)
    rows = [shape[0] for site, shape in before.items() if shape and site not in dict(latents)]
    if not rows:
        return None
    n = max(rows)
    N = bucket(n)
    # One row more shows whether rows can be added; a silo that fills its bucket is laid out as the others in it.
    longer = put_together(form, _longer(arrays, n, max(N, n + 1)))
    try:
        after = _shapes(structured, longer)
        same = [(one.name, one.shape) for one in structured.local_latents(longer)] == latents
    except (UserError, TypeError, ValueError, IndexError):
        return None
    if not same or after.keys() != before.keys():
        return None
    axes = {}
    for site, shape in after.items():
        differ = [axis for axis in range(len(shape)) if axis >= len(before[site]) or shape[axis] != before[site][axis]]
        if len(shape) != len(before[site]) or len(differ) > 1 or (differ and site in dict(latents)):
            return None
        if differ:
            axes[site] = differ[0]
    if not axes or not _alike(structured, data, longer, before, dict(latents)):
        return None
    return put_together(form, _longer(arrays, n, N)), axes


def _longer(arrays: tuple[Any, ...], n: int, N: int) -> tuple[Any, ...]:
    def one(leaf: Any) -> Any:
        if not (leaf.ndim and leaf.shape[0] == n):
            return leaf
        return jnp.concatenate([leaf, jnp.broadcast_to(leaf[:1], (N - n, *leaf.shape[1:]))])

    return tuple(one(leaf) for leaf in arrays)


def _shapes(structured: Structured, data: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each site's terms."""
    form, arrays = take_apart(data)

    def terms(arrays: Any) -> Any:
        data = put_together(form, arrays)
        real = {one.name: jnp.zeros(one.shape) for one in structured.local_latents(data)}
        return structured.elements({}, jnp.zeros(structured.size()), real, data)

    return {site: leaf.shape for site, leaf in jax.eval_shape(terms, arrays).items()}


def _alike(structured: Structured, data: Any, longer: Any, before: dict[str, Any], latents: dict[str, Any]) -> bool:
    """Whether the terms of the silo's own rows are the same in both, at random latents."""
    for point in range(POINTS):
        random = np.random.default_rng(point)
        z_G = jnp.asarray(0.3 * random.normal(size=structured.size()), jnp.zeros(0).dtype)
        real = {site: jnp.asarray(0.3 * random.normal(size=shape), z_G.dtype) for site, shape in latents.items()}
        own, other = (structured.elements({}, z_G, real, one) for one in (data, longer))
        for site, shape in before.items():
            if not np.allclose(own[site], other[site][tuple(map(slice, shape))], rtol=1e-4, atol=1e-5, equal_nan=True):
                return False
    return True
