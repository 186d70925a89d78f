"""Silos of different sizes in one compiled program: rows and units that count nothing, up to sizes that many silos share.

A compiled sampler takes seconds for each shape of data, and silos rarely have equally many rows or units. Sizes that differ
between silos are made equal by copies of the first element. A row that was added has no term in the log density. A latent that
was added has a standard normal one in place of the model's, so that it says nothing of any other. Both need that elements stand
apart given the latents, which is found from numbers: the terms of all others must stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes.errors import UserError
from fedbayes.models.linked import Linked
from fedbayes.models.sites import Values
from fedbayes.models.structured import Structured, block_starts
from fedbayes.primitives.dependence import as_declared
from fedbayes.trees import Form, put_together, take_apart

POINTS, TRIED = 2, 3
"""Random latents, and silos of each class, at which terms are compared."""
SMALL, RATIO = 1024, 4
"""Rows up to which silos of all sizes are padded to one, and the ratio between sizes up to which larger ones are."""
Part = tuple[Form, tuple[Array, ...]]
"""A silo's data, taken apart."""
Shapes = dict[str, tuple[int, ...]]
Size = tuple[tuple[int, int], ...]
"""What has one size in each silo: leaves of the data, each with an axis, or −1 for a number that is the size."""


class Grown(NamedTuple):
    """A silo's data, longer than it was, and the shape that each site's terms had, of sites that are longer in some silo.

    There are no shapes where the data is as it was.
    """

    data: Any
    before: Shapes | None


def classes(sizes: Sequence[int]) -> list[list[int]]:
    """Places of silos that are padded to the largest of them, where compiling once more would take longer than the added rows.

    >>> classes([3, 900, 256]), classes([20_000, 800, 6000, 1000])
    ([[1, 2, 0]], [[0, 2], [3, 1]])
    """
    found: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        most = sizes[found[-1][0]] if found else 0
        if found and (most <= SMALL or RATIO * sizes[place] >= most):
            found[-1].append(place)
        else:
            found.append([place])
    return found


def together(structured: Structured, parts: Sequence[Part]) -> list[Grown]:
    """The silos' data, those of different sizes padded where that changes nothing."""
    found = [Grown(put_together(*part), None) for part in parts]
    alike: dict[Any, list[int]] = {}
    for place, (form, _) in enumerate(parts):
        kinds = tuple(type(leaf) if isinstance(leaf, int) else leaf for leaf in form.plain)
        alike.setdefault((form.treedef, kinds, tuple((len(shape), dtype) for shape, dtype in form.shapes)), []).append(place)
    for places in alike.values():
        sizes = _sizes([parts[place] for place in places])
        for members in classes([max((_size(parts[place], one) for one in sizes), default=0) for place in places]):
            chosen = [places[member] for member in members]
            for place, grown in zip(chosen, _grown(structured, [parts[place] for place in chosen], sizes), strict=True):
                found[place] = grown
    return found


def marked(structured: Structured, prepared: Any, before: Shapes | None) -> Any:
    """Padded data, linked, with terms that belong to no block where they were added, and latents that are standard normal."""
    if before is None:
        return prepared
    whole = prepared if isinstance(prepared, Linked) else Linked(prepared, {}, (), (), "")
    latents = {one.name for one in structured.local_latents(whole)}
    starts, nowhere = block_starts(structured.local_latents(whole))
    declared, links = structured.declared(whole), dict(whole.links)
    shapes = _shapes(structured, whole.data)
    for site in before:
        shape = shapes[site]
        block = np.asarray(links[site]) if site in links else as_declared(shape, *declared[site], starts, nowhere)
        own = np.ones(shape, bool)
        for axis, (now, then) in enumerate(zip(shape, before[site], strict=True)):
            own &= np.arange(now).reshape([-1 if one == axis else 1 for one in range(len(shape))]) < then
        added = -1 - block if site in latents else np.full(shape, nowhere + 1)
        links[site] = jnp.asarray(np.where(own, block, added), jnp.int32)
    return Linked(whole.data, links, whole.layout, whole.indexed, whole.why)


def cut(structured: Structured, data: Any, prepared: Any) -> Any:
    """A silo's own data with the structure that was found in its padded form."""
    if not isinstance(prepared, Linked):
        return data
    shapes = _shapes(structured, data)
    bare = Linked(data, {}, prepared.layout, prepared.indexed, prepared.why)
    there, nowhere = block_starts(structured.local_latents(prepared))
    here, end = block_starts(structured.local_latents(bare))
    number = np.full(nowhere + 1, end, np.int32)
    edges = [*sorted(here.values()), end]
    for name, start in there.items():
        count = edges[edges.index(here[name]) + 1] - here[name]
        number[start : start + count] = here[name] + np.arange(count)
    links = {
        site: jnp.asarray(number[np.asarray(link)[tuple(map(slice, shapes[site]))]]) for site, link in prepared.links.items()
    }
    return Linked(data, links, prepared.layout, prepared.indexed, prepared.why)


def _sizes(parts: Sequence[Part]) -> list[Size]:
    """What differs between silos: axes and numbers of the data that have the same size as each other in every silo."""
    seen: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for leaf, axis in _places(parts[0]):
        sizes = tuple(_size(part, ((leaf, axis),)) for part in parts)
        if len(set(sizes)) > 1 and min(sizes) > 0:
            seen.setdefault(sizes, []).append((leaf, axis))
    return [tuple(found) for found in seen.values()]


def _places(part: Part) -> list[tuple[int, int]]:
    form, arrays = part
    rest, found = iter(arrays), []
    for leaf, value in enumerate(form.plain):
        if value is None:
            found += [(leaf, axis) for axis in range(next(rest).ndim)]
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((leaf, -1))
    return found


def _size(part: Part, size: Size) -> int:
    form, arrays = part
    leaf, axis = size[0]
    value = form.plain[leaf]
    return int(value) if axis < 0 else arrays[sum(one is None for one in form.plain[:leaf])].shape[axis]  # type: ignore[call-overload]


def _longer(part: Part, targets: dict[tuple[int, int], int]) -> Part:
    """The data with copies of the first element at the end of each axis, up to its target."""
    form, arrays = part
    leaves: list[Any] = []
    rest = iter(arrays)
    for leaf, value in enumerate(form.plain):
        if value is not None:
            leaves.append(targets.get((leaf, -1), value))
            continue
        array = np.asarray(next(rest))
        for axis in range(array.ndim):
            more = targets.get((leaf, axis), array.shape[axis]) - array.shape[axis]
            array = np.concatenate([array, np.repeat(array.take([0], axis), more, axis)], axis) if more else array
        leaves.append(array)
    return take_apart(jax.tree.unflatten(form.treedef, leaves))


def _grown(structured: Structured, parts: Sequence[Part], sizes: Sequence[Size]) -> list[Grown]:
    """Silos of one class at the sizes of the largest, as far as elements stand apart."""
    for chosen in (sizes, *([one] for one in sizes if len(sizes) > 1)):
        targets = {place: max(_size(part, one) for part in parts) for one in chosen for place in one}
        longer = [_longer(part, targets) for part in parts]
        order = sorted(range(len(parts)), key=lambda place: sum(array.size for array in parts[place][1]))
        changed = [place for place in order if longer[place][0] != parts[place][0]]
        tried = {changed[at] for at in np.linspace(0, len(changed) - 1, TRIED).astype(int)} if changed else set()
        if tried and all(_alike(structured, parts[place], longer[place]) for place in tried):
            before, after = ([_shapes(structured, put_together(*part)) for part in both] for both in (parts, longer))
            sites = {site for then, now in zip(before, after, strict=True) for site in now if then[site] != now[site]}
            shapes = ({site: then[site] for site in sorted(sites)} for then in before)
            return [Grown(put_together(*more), then) for more, then in zip(longer, shapes, strict=True)]
    return [Grown(put_together(*part), None) for part in parts]


def _shapes(structured: Structured, data: Any) -> Shapes:
    """The shape of each site's terms."""
    form, arrays = take_apart(data)

    def at_zero(arrays: tuple[Array, ...]) -> Values:
        latents = structured.local_latents(put_together(form, arrays))
        zeros = {one.name: jnp.zeros(one.shape) for one in latents}
        return _terms(structured, form, jnp.zeros(structured.size()), zeros, arrays)

    return {site: leaf.shape for site, leaf in jax.eval_shape(at_zero, arrays).items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _terms(structured: Structured, form: Form, z_G: Float[Array, " n"], real: Values, arrays: tuple[Array, ...]) -> Values:
    """Each site's terms at latents on the real line."""
    return structured.elements({}, z_G, real, put_together(form, arrays))


def _latents(size: int, room: Shapes, latents: Shapes, point: int) -> tuple[Array, Values]:
    """Random Z_G and latents of a silo, which are the same for the elements that both sizes have."""
    normal = np.random.default_rng(point)
    z_G = jnp.asarray(0.3 * normal.normal(size=size), float)
    drawn = {name: 0.3 * normal.normal(size=room[name]) for name in latents}
    return z_G, {name: jnp.asarray(drawn[name][tuple(map(slice, shape))], float) for name, shape in latents.items()}


def _alike(structured: Structured, own: Part, longer: Part) -> bool:
    """Whether the silo's own terms are the same in both, at random latents, and nothing but what was added is new."""
    data = put_together(*longer)
    try:
        if structured.everyone(data):
            return False
        room = {one.name: one.shape for one in structured.local_latents(data)}
        latents = {one.name: one.shape for one in structured.local_latents(put_together(*own))}
        after = _shapes(structured, data)
        if room.keys() != latents.keys() or any(len(room[name]) != len(latents[name]) for name in room):
            return False
        for point in range(POINTS):
            mine, other = (
                _terms(structured, form, *_latents(structured.size(), room, shapes, point), arrays)
                for (form, arrays), shapes in ((own, latents), (longer, room))
            )
            if mine.keys() != after.keys():
                return False
            for site, terms in mine.items():
                if len(after[site]) != terms.ndim:
                    return False
                same = other[site][tuple(map(slice, terms.shape))]
                if not np.allclose(terms, same, rtol=1e-4, atol=1e-5, equal_nan=True):
                    return False
    except (UserError, TypeError, ValueError, IndexError):
        return False
    return True
