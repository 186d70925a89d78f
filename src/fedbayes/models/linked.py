"""A silo's data together with the dependency structure that was found in it (`primitives/dependence.py` finds it)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int


class Place(NamedTuple):
    """The group of blocks that a latent site belongs to, where that is not its outermost plate."""

    site: str
    group: str
    """A plate, or the site that the group is named after; "" for latents of the silo as a whole."""
    axis: int
    """The axis of the unconstrained value along which the blocks lie."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linked:
    """A silo's data with the block of latents that each term of its log density belongs to.

    Which rows read which group's latents depends on the numbers in the data (`a[data["county"]]`), so it is found once from
    concrete data and then travels with them, as data: silos of equal shapes still share one compiled program.
    """

    data: Any
    links: dict[str, Int[Array, ...]]
    """By site, for each element of its log density: a block, counted over all groups; one past the last is no block."""
    layout: tuple[Place, ...] = dataclasses.field(metadata={"static": True})
    """Latents whose blocks are not the elements of their outermost plate."""
    indexed: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Groups whose elements have a number that rows refer to, so that they are the same elements in other rows."""
    why: str = dataclasses.field(metadata={"static": True})
    """Why blocks do not stand apart; empty where they do."""


def plain(data: Any) -> Any:
    """A silo's data as the model reads it."""
    return data.data if isinstance(data, Linked) else data


def like(trained: Any, data: Any) -> Any:
    """Other rows of a silo, laid out as the data that it was trained on."""
    return Linked(data, {}, trained.layout, trained.indexed, trained.why) if isinstance(trained, Linked) else data


def layout_of(data: Any) -> dict[str, Place]:
    """Where latents have a place of their own, by site."""
    return {place.site: place for place in data.layout} if isinstance(data, Linked) else {}
