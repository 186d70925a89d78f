"""Which terms of a silo's log density depend on which latents, found from the model with numbers.

A term is one element of one site's log density. Blocks (elements of a plate, or of a vector of latents outside plates) are
numbered in binary. For each bit, two derivatives are taken along random directions: one moves the blocks that have the bit, the
other those that lack it. A term that depends on one block responds to one of the two for every bit, which spells the block's
number; a term that depends on two blocks responds to both where their numbers differ. Where there is no dependence the
derivative is exactly 0, so all pairs of blocks are told apart without a tolerance, in 2 log₂(blocks) evaluations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedbayes.models.linked import Linked, Place
from fedbayes.models.sites import Plate, Values
from fedbayes.models.structured import Structured, remember
from fedbayes.trees import Form, arrays_of, put_together, take_apart
from fedbayes.wire import provenance

POINTS = 3
"""Random points at which derivatives are taken: at one alone a dependence may be missed, as where a rectifier is off."""
OUTER = 64
"""Latents of a plate up to which crossed effects are resolved by drawing the plate with the silo's own latents."""
LARGE = 1000
"""Latents in vectors outside plates above which one bit is tried before all of them are."""
NONE, MANY = -1, -2


class Group(NamedTuple):
    """Latents that may form blocks together: those of a plate, or one vector outside plates along one of its axes."""

    name: str
    blocks: int
    width: int
    members: tuple[tuple[str, int], ...]
    """Sites, each with the axis of its unconstrained value along which blocks lie."""
    plated: bool

    @property
    def latents(self) -> int:
        """How many numbers it has."""
        return self.blocks * self.width


class Shape(NamedTuple):
    """What is known of a silo's model from shapes alone."""

    latents: tuple[tuple[str, tuple[int, ...]], ...]
    groups: tuple[Group, ...]
    vectors: tuple[Group, ...]
    """Candidates: a site outside plates once for each axis, the longest first."""
    declared: dict[str, tuple[Plate, int]]
    """The outermost plate of each site, and how many axes `to_event` made one event of."""
    subsampled: bool


Found = dict[str, dict[str, np.ndarray]]  # by group and site: the block that each term depends on, NONE or MANY


def linked(structured: Structured, data: Any, *, regroup: bool = True) -> Any:
    """A silo's data with the structure that was found in it; the data alone where plates already say all of it.

    Without `regroup` latents stay with their plates, and only rows are given to blocks.
    """
    if isinstance(data, Linked):
        return data
    form, arrays = take_apart(data)
    data, shape = put_together(form, arrays), _shape(structured, form, arrays)
    vectors = shape.vectors if regroup and not shape.subsampled else ()
    if sum(group.latents for group in vectors) > LARGE:
        vectors = _apart(vectors, _probed(structured, form, vectors, 1, 1, shape, arrays))
    if not shape.groups and not vectors:
        return data
    found = _probed(structured, form, (*shape.groups, *vectors), None, POINTS, shape, arrays)
    vectors = _longest(_apart(vectors, found))
    groups, layout, why = _resolved((*shape.groups, *vectors), found, regroup=regroup)
    links = _links(groups, found, shape.declared) if groups and not why else {}
    if shape.subsampled and (links or layout):
        site = next(iter(links), "a latent")
        links, layout, why = {}, (), f"{site} reads latents by index in a model whose rows are subsampled"
    if not (links or layout or why):
        return data
    rows = [site for site in links if site not in dict(shape.latents)]
    indexed = [group.name for group in groups if any((found[_key(group)][site] >= 0).any() for site in rows)]
    return Linked(data, links, layout, tuple(sorted(indexed)), why)


def inseparable(structured: Structured, data: Any) -> str:
    """Why draws cannot be weighed block by block, if so: which site depends on the latents of which blocks."""
    found = linked(structured, data)
    return found.why if isinstance(found, Linked) else ""


def moving(structured: Structured, data: Any) -> frozenset[str]:
    """Groups whose prior's curvature, −∇² log p(Z_b | Z_S, Z_G), moves with Z_G or with the silo's own latents Z_S.

    Told from the program, without numbers: a scale that is a latent is found, a location is not.
    """

    def find() -> frozenset[str]:
        shapes, whole = arrays_of(data)
        latents = structured.local_latents(data)
        real = {one.name: jax.ShapeDtypeStruct(one.shape, jnp.zeros(0).dtype) for one in latents}
        z_G = jax.ShapeDtypeStruct((structured.size(),), jnp.zeros(0).dtype)

        def curvature(z_G: Any, real: Values, direction: Values, given: Any) -> Values:
            def prior(real: Values) -> Array:
                data = whole(given)
                terms = structured.elements(structured.theta(data), z_G, real, data)
                return sum((jnp.sum(terms[name]) for name in real), jnp.zeros(()))

            return jax.jvp(jax.grad(prior), (real,), (direction,))[1]

        flows = provenance.trace(curvature, {"z_G": z_G, "real": real, "direction": real, "data": shapes})
        silo = {f"real/{one.name}" for one in latents if not one.plate.name}
        names = dict(zip(sorted(real), flows, strict=True))
        return frozenset(
            one.plate.name for one in latents if {"z_G", *(silo if one.plate.name else ())} & set(names[one.name].depends)
        )

    return remember(structured, "moving", data, find)


def _shape(structured: Structured, form: Form, arrays: tuple[Array, ...]) -> Shape:
    found: list[Shape] = []

    def look(given: tuple[Array, ...]) -> None:
        data = put_together(form, given)
        latents, declared, vectors = structured.local_latents(data), structured.declared(data), []
        groups: dict[str, Group] = {}
        for one in latents:
            rank = len(one.shape)
            if one.plate.name:
                axis = rank - one.transform.domain.event_dim + one.plate.dim
                old = groups.get(one.plate.name, Group(one.plate.name, one.plate.size, 0, (), True))
                groups[old.name] = old._replace(width=old.width + one.width, members=(*old.members, (one.name, axis)))
            else:
                axes = sorted((axis for axis in range(rank) if one.shape[axis] > 1), key=lambda axis: -one.shape[axis])
                vectors += [
                    Group(one.name, one.shape[axis], one.width // one.shape[axis], ((one.name, axis),), False) for axis in axes
                ]
        shapes = tuple((one.name, one.shape) for one in latents)
        subsampled = bool(structured.everyone(data))
        found.append(Shape(shapes, tuple(groups.values()), tuple(vectors), declared, subsampled))

    jax.eval_shape(look, arrays)
    return found[0]


def _probed(
    structured: Structured,
    form: Form,
    groups: tuple[Group, ...],
    bits: int | None,
    points: int,
    shape: Shape,
    arrays: tuple[Array, ...],
) -> Found:
    found = jax.device_get(_probe(structured, form, groups, bits, points, shape.latents, arrays))
    return {_key(group): blocks for group, blocks in zip(groups, found, strict=True)}


def _key(group: Group) -> str:
    return group.name if group.plated else f"{group.name} {group.members[0][1]}"


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _probe(
    structured: Structured,
    form: Form,
    groups: tuple[Group, ...],
    bits: int | None,
    points: int,
    latents: tuple[tuple[str, tuple[int, ...]], ...],
    arrays: tuple[Array, ...],
) -> list[Values]:
    """For each group: which of its blocks each term depends on. With `bits`, the highest bits alone tell NONE and MANY."""
    data = put_together(form, arrays)
    theta, shapes = structured.theta(data), dict(latents)
    chosen = [range(max(1, (group.blocks - 1).bit_length())) for group in groups]
    chosen = chosen if bits is None else [some[-bits:] for some in chosen]
    directions = [(number, bit) for number, some in enumerate(chosen) for bit in some]

    def numbers(name: str, shape: tuple[int, ...]) -> Array:
        """The block that each number of a latent lies in, for each group; −1 where it is not of the group."""
        axes = [dict(group.members).get(name) for group in groups]
        none = jnp.full(shape, -1, jnp.int32)
        return jnp.stack([none if axis is None else jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in axes])

    blocks = {name: numbers(name, shape) for name, shape in shapes.items()}

    def moves(given: tuple[Any, Array, Array, Array]) -> Values:
        """Which terms move with the blocks of a group that have a bit, or with those that lack it."""
        key, group, bit, side = given
        for_point, for_direction = jax.random.split(key)
        real, direction = _normal(for_point, shapes), _normal(for_direction, shapes)
        z_G = 0.3 * jax.random.normal(for_point, (structured.size(),))
        within = {name: (number[group] >= 0) & ((number[group] >> bit) & 1 == side) for name, number in blocks.items()}
        tangents = {name: jnp.where(within[name], direction[name], 0.0) for name in real}
        moved = jax.jvp(lambda real: structured.elements(theta, z_G, real, data), (real,), (tangents,))[1]
        return {name: jnp.isfinite(value) & (value != 0) for name, value in moved.items()}

    # One loop over points, groups, bits and sides, so that the model's derivative is compiled once.
    keys, every = jax.random.split(jax.random.key(1), points), np.array(directions, np.int32)
    loop = [jnp.asarray(np.tile(np.repeat(column, 2), points)) for column in every.T]
    sides = jnp.asarray(np.tile(np.arange(2, dtype=np.int32), points * len(every)))
    found = jax.lax.map(moves, (jnp.repeat(keys, 2 * len(every)), *loop, sides))
    found = {name: jnp.any(leaf.reshape(points, len(every), 2, *leaf.shape[1:]), axis=0) for name, leaf in found.items()}

    def spelt(move: Array) -> Array:
        """From (bit, side, …): the block's number, NONE or MANY."""
        without, having = move[:, 0], move[:, 1]
        powers = 2 ** jnp.arange(len(move), dtype=jnp.int32).reshape(-1, *(1,) * (move.ndim - 2))
        number = jnp.where(jnp.any(without | having, axis=0), jnp.sum(jnp.where(having, powers, 0), axis=0), NONE)
        return jnp.where(jnp.any(without & having, axis=0), MANY, number)

    edges = np.cumsum([0, *map(len, chosen)]).tolist()
    return [{name: spelt(leaf[start:end]) for name, leaf in found.items()} for start, end in itertools.pairwise(edges)]


def _normal(key: Any, shapes: dict[str, tuple[int, ...]]) -> Values:
    keys = jax.random.split(key, len(shapes) + 1)[1:]
    return {name: 0.3 * jax.random.normal(one, shape) for one, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _apart(vectors: Sequence[Group], found: Found) -> tuple[Group, ...]:
    """Of the candidates, those that no term reads in several places."""
    return tuple(group for group in vectors if not any((where == MANY).any() for where in found[_key(group)].values()))


def _longest(vectors: Sequence[Group]) -> tuple[Group, ...]:
    """For each site the first of its axes."""
    return tuple({group.name: group for group in reversed(vectors)}.values())[::-1]


def _resolved(groups: tuple[Group, ...], found: Found, *, regroup: bool) -> tuple[tuple[Group, ...], tuple[Place, ...], str]:
    """Groups of which no term reads two at once: equal ones are merged, and of crossed ones the smaller becomes the silo's.

    Also gives the place of each latent that was moved, and, where terms still read several blocks, a sentence that says so.
    """
    for group in groups:
        for site, where in found[_key(group)].items():
            if (where == MANY).any():
                return groups, (), f"{site} depends on latents of several elements of plate {group.name!r} at once"
    members = {group.name: list(group.members) for group in groups}
    silo: list[tuple[str, int]] = []
    current = list(groups)
    while crossed := next(_crossed(current, found), None):
        site, one, other, same = crossed
        if same and regroup:
            kept, gone = (other, one) if other.plated and not one.plated else (one, other)
            members[kept.name] += members.pop(gone.name)
            wider = kept._replace(width=kept.width + gone.width)
            _merge(found, kept, gone)
            current = [wider if group is kept else group for group in current if group is not gone]
            continue
        movable = [group for group in (one, other) if regroup and (not group.plated or group.latents <= OUTER)]
        if not movable:
            plates = "plates " if one.plated and other.plated else ""
            return groups, (), f"{site} depends on latents of {plates}{one.name} and {other.name} at once"
        smaller = min(movable, key=lambda group: group.latents)
        silo += members.pop(smaller.name)
        current = [group for group in current if group is not smaller]
    own = {group.name: dict(group.members) for group in groups if group.plated}
    layout = [Place(site, "", axis) for site, axis in silo if any(site in sites for sites in own.values())]
    for name, sites in members.items():
        layout += [Place(site, name, axis) for site, axis in sites if site not in own.get(name, {})]
    return tuple(current), tuple(sorted(layout)), ""


def _crossed(groups: Sequence[Group], found: Found) -> Iterator[tuple[str, Group, Group, bool]]:
    """Pairs of groups that some term reads at once, those first that are the same groups under two names."""
    pairs = []
    for one, other in itertools.combinations(groups, 2):
        sites = []
        same = one.blocks == other.blocks
        for site, here in found[_key(one)].items():
            there = found[_key(other)][site]
            if (both := (here >= 0) & (there >= 0)).any():
                sites.append(site)
                same = same and bool((here[both] == there[both]).all())
        if sites:
            pairs.append((sites[-1], one, other, same))
    yield from sorted(pairs, key=lambda pair: not pair[3])


def _merge(found: Found, kept: Group, gone: Group) -> None:
    here, there = found[_key(kept)], found[_key(gone)]
    found[_key(kept)] = {site: np.where(where >= 0, where, there[site]) for site, where in here.items()}


def _links(groups: tuple[Group, ...], found: Found, declared: dict[str, tuple[Plate, int]]) -> dict[str, Array]:
    """For each site that is not in the plate whose latents it reads: the block of each of its terms."""
    ordered = sorted(groups, key=lambda group: group.name)
    starts = dict(zip([group.name for group in ordered], np.cumsum([0, *(group.blocks for group in ordered)]), strict=False))
    total, links = sum(group.blocks for group in groups), {}
    for site, (plate, depth) in declared.items():
        shape = next(found[_key(group)][site].shape for group in groups)
        before = block = as_declared(shape, plate, depth, starts, total)
        for group in groups:
            where = found[_key(group)][site]
            block = np.where(where >= 0, starts[group.name] + where, block).astype(np.int32)
        if (block != before).any():
            links[site] = jnp.asarray(block)
    return links


def as_declared(shape: tuple[int, ...], plate: Plate, depth: int, starts: dict[str, int], total: int) -> np.ndarray:
    """The block of each term of a site as its plate says it, counted over all groups; `total` where it has none."""
    axis = len(shape) - depth + plate.dim
    if plate.name not in starts or axis < 0:
        return np.full(shape, total, np.int32)
    number = np.arange(shape[axis]).reshape(-1, *(1,) * (len(shape) - axis - 1))
    return np.broadcast_to(starts[plate.name] + number, shape).astype(np.int32)
