"""Silos' data: taken apart into arrays and form, grouped by form, and what an algorithm may know of it before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbayes import trees
from fedbayes.algorithm import AnyStructured
from fedbayes.errors import UserError
from fedbayes.models.linked import Linked, plain
from fedbayes.models.sites import Values
from fedbayes.models.structured import encode
from fedbayes.primitives import padding
from fedbayes.primitives.padding import Grown, Part
from fedbayes.trees import Form, put_together, take_apart
from fedbayes.wire import provenance


class Group(NamedTuple):
    """Silos of one form: their places among all, and their arrays, stacked."""

    form: Form
    places: tuple[int, ...]
    arrays: tuple[Array, ...]


class Silos(NamedTuple):
    """Silos' data, read: as it is, and as the algorithm takes it, both taken apart."""

    names: tuple[str, ...]
    own: list[Part]
    parts: list[Part]


def read(silos: Mapping[str, Any] | Silos, algorithm: AnyStructured, *, together: bool = True) -> Silos:
    """The silos' data as the algorithm takes it; an error names its silo.

    With `together`, silos of different sizes are padded for a method whose programs take long to compile (`padding.py`).
    """
    if isinstance(silos, Silos):
        return silos
    if not silos:
        raise UserError("there is no silo; give at least one, as a name and its data")
    names = tuple(map(str, silos))
    if len(set(names)) < len(silos):
        raise UserError("two silos have the same name; give each its own")
    own = [naming_silo(name, take_apart, plain(content)) for name, content in zip(names, silos.values(), strict=True)]
    grown = [Grown(content, None) for content in silos.values()]
    if together and algorithm.samples and len({form for form, _ in own}) > 1:
        grown = padding.together(algorithm.structured, own)

    def prepared(place: int) -> Part:
        data = algorithm.prepared(grown[place].data)
        if grown[place].before is None:
            return take_apart(data)
        if isinstance(data, Linked) and data.why:  # a block has terms of all rows, and they are no longer its own
            return take_apart(algorithm.prepared(put_together(*own[place])))
        return take_apart(padding.marked(algorithm.structured, data, grown[place].before))

    return Silos(names, own, [naming_silo(name, prepared, place) for place, name in enumerate(names)])


def grouped(parts: Sequence[Part]) -> list[Group]:
    """Silos of equal forms together, as one vmapped group."""
    places: dict[Form, list[int]] = {}
    for place, (form, _) in enumerate(parts):
        places.setdefault(form, []).append(place)
    return [Group(form, tuple(found), stacked([parts[place][1] for place in found])) for form, found in places.items()]


def stacked(rows: Sequence[Any]) -> Any:
    """Trees of equal shapes, stacked leaf by leaf."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def plan(algorithm: AnyStructured, silos: Mapping[str, Any] | Silos, rounds: int) -> AnyStructured:
    """The algorithm with the facts of the run (rounds, silos, observations, form), after a check of the model in each silo."""
    (names, own, parts), total = read(silos, algorithm, together=False), 0
    first: dict[str, tuple[str, Any]] = {}
    for name, (form, arrays) in zip(names, parts, strict=True):
        total += naming_silo(name, from_shapes, algorithm.structured.rows, *own[names.index(name)])
        thetas = naming_silo(name, _theta, algorithm, form, arrays)
        for theta, shape in thetas.items():
            where, known = first.setdefault(theta, (name, shape))
            if known != shape:
                shapes = f"{known} in silo {where!r} and {shape} in silo {name!r}"
                raise UserError(f"the parameter {theta} has shape {shapes}, but it is shared; make its shape the same for all")
        if missing := [theta for theta in first if theta not in thetas]:
            raise UserError(f"the parameter {missing[0]} is not in silo {name!r}; name it in population, which all silos share")
        if new := [theta for theta in thetas if first[theta][0] == name != names[0]]:
            raise UserError(f"the parameter {new[0]} is only in silo {name!r}; name it in population, which all silos share")
        naming_silo(name, algorithm.family.check_draws, algorithm.structured, put_together(form, arrays))
    return algorithm.planned(rounds, silos=len(names), rows=total, form=parts[0][0])


def _theta(algorithm: AnyStructured, form: Form, arrays: tuple[Array, ...]) -> dict[str, Any]:
    """The shape of each parameter of θ; where one starts depends on no data, as all silos see it."""

    def start(given: tuple[Array, ...]) -> Values:
        data = put_together(form, given)
        start, encoder = jnp.zeros(algorithm.structured.size()), algorithm.family.encoder
        own = {} if encoder is None else encode(encoder, {}, data, start)[1]
        return {**algorithm.structured.theta(data), **own}

    shapes = jax.eval_shape(start, arrays)
    for path, flow in zip(trees.named(shapes), provenance.trace(start, {"data": arrays}), strict=True):
        if flow.depends:
            advice = "start it from a constant"
            raise UserError(f"the parameter {path} starts from the silo's data, which would reach every silo; {advice}")
    return jax.tree.map(jnp.shape, shapes)


def from_shapes(function: Callable[[Any], Any], form: Form, arrays: tuple[Array, ...]) -> Any:
    """What `function` says of a silo's data from its shapes, without computing anything."""
    found = []
    jax.eval_shape(lambda given: found.append(function(put_together(form, given))), arrays)
    return found[0]


def naming_silo(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` gives; an error that a user is meant to read says which silo it is about."""
    try:
        return function(*arguments)
    except UserError as problem:
        raise UserError(f"silo {name!r}: {problem}") from None
