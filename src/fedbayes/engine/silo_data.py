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
from fedbayes.models.sites import Values
from fedbayes.models.structured import encode
from fedbayes.trees import Form, put_together, take_apart
from fedbayes.wire import provenance

Part = tuple[Form, tuple[Array, ...]]  # one silo's data


class Group(NamedTuple):
    """Silos of one form: their places among all, and their arrays, stacked."""

    form: Form
    places: tuple[int, ...]
    arrays: tuple[Array, ...]


def read(silos: Mapping[str, Any], algorithm: AnyStructured) -> list[Part]:
    """The silos' data as the algorithm takes it, taken apart; an error names its silo."""
    if not silos:
        raise UserError("there is no silo; give at least one, as a name and its data")
    if len(set(map(str, silos))) < len(silos):
        raise UserError("two silos have the same name; give each its own")
    return [
        naming_silo(name, lambda content: take_apart(algorithm.prepared(content)), content) for name, content in silos.items()
    ]


def grouped(parts: Sequence[Part]) -> list[Group]:
    """Silos of equal forms together, as one vmapped group."""
    places: dict[Form, list[int]] = {}
    for place, (form, _) in enumerate(parts):
        places.setdefault(form, []).append(place)
    return [Group(form, tuple(found), stacked([parts[place][1] for place in found])) for form, found in places.items()]


def stacked(rows: Sequence[Any]) -> Any:
    """Trees of equal shapes, stacked leaf by leaf."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def plan(algorithm: AnyStructured, silos: Mapping[str, Any], rounds: int) -> AnyStructured:
    """The algorithm with the facts of the run (rounds, silos, observations, form), after a check of the model in each silo."""
    parts, total = read(silos, algorithm), 0
    first: dict[str, tuple[str, Any]] = {}
    for name, (form, arrays) in zip(map(str, silos), parts, strict=True):
        total += naming_silo(name, from_shapes, algorithm.structured.rows, form, arrays)
        thetas = naming_silo(name, _theta, algorithm, form, arrays)
        for theta, shape in thetas.items():
            where, known = first.setdefault(theta, (name, shape))
            if known != shape:
                shapes = f"{known} in silo {where!r} and {shape} in silo {name!r}"
                raise UserError(f"the parameter {theta} has shape {shapes}, but it is shared; make its shape the same for all")
        if missing := [theta for theta in first if theta not in thetas]:
            raise UserError(f"the parameter {missing[0]} is not in silo {name!r}; name it in population, which all silos share")
        if new := [theta for theta in thetas if first[theta][0] == name != str(next(iter(silos)))]:
            raise UserError(f"the parameter {new[0]} is only in silo {name!r}; name it in population, which all silos share")
        naming_silo(name, algorithm.family.check_draws, algorithm.structured, put_together(form, arrays))
    return algorithm.planned(rounds, silos=len(silos), rows=total, form=parts[0][0])


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
