"""Candidates for settings of `adapt`, from what an algorithm declares, in the order in which they are tried."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedbayes.algorithm import AnyNetwork, Lengths


class Candidates(NamedTuple):
    """Settings to choose from; the first candidate, which moves a client little, is kept where none is ahead of it."""

    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


def candidates(algorithm: AnyNetwork) -> Candidates:
    """All combinations of the values that an algorithm declares, of settings that have their default value.

    >>> import fedbayes as fb
    >>> names, values = candidates(fb.FedAvg(fb.models.linear((2,), fb.models.Categorical(2))))
    >>> names, len(values), values[0]
    (('tune.lr', 'tune.steps'), 13, (0.001, 10.0))
    """
    default = {field.name: field.default for field in dataclasses.fields(algorithm)}
    grids = {name: grid for name, grid in algorithm.choices.items() if at(algorithm, name) == at(default, name)}
    if not grids:
        return Candidates((), ())
    others = itertools.product(*(grid[1:] for grid in grids.values()))
    every = (tuple(grid[0] for grid in grids.values()), *others)
    return Candidates(tuple(grids), tuple(tuple(map(float, one)) for one in every))


def at(config: Any, name: str) -> Any:
    """A setting by its dotted name."""
    first, _, rest = name.partition(".")
    value = config[first] if isinstance(config, dict) else getattr(config, first)
    return at(value, rest) if rest else value


class Lanes(NamedTuple):
    """Candidates in groups that take equally many steps, so that under `vmap` none waits for a longer one."""

    names: tuple[str, ...]
    lengths: tuple[str, ...]
    values: Float[Array, "groups lanes names"]
    """Of each group the candidates' settings other than lengths; shorter groups are padded."""
    length: Float[Array, "groups lengths"]
    """The lengths that a group shares."""
    members: Int[Array, " groups"]
    """Candidates of a group."""
    places: tuple[Int[Array, " candidates"], Int[Array, " candidates"]]
    """Group and lane of each candidate."""

    @classmethod
    def of(cls, algorithm: AnyNetwork, settings: Candidates) -> Lanes:
        """The candidates, in groups.

        >>> import fedbayes as fb
        >>> algorithm = fb.FedAvg(fb.models.linear((2,), fb.models.Categorical(2)))
        >>> lanes = Lanes.of(algorithm, candidates(algorithm))
        >>> lanes.lengths, lanes.length[:, 0].tolist(), lanes.members.tolist()
        (('tune.steps',), [10.0, 50.0], [7, 6])
        """
        names, every = settings
        table, long = np.asarray(every, np.float32), np.array([isinstance(algorithm.choices[name], Lengths) for name in names])
        shared, group = np.unique(table[:, long], axis=0, return_inverse=True)
        group, count = group.reshape(-1), np.bincount(group.reshape(-1))
        lane = np.array([np.sum(group[:place] == one) for place, one in enumerate(group)])
        values = np.repeat(table[:1, None, ~long], len(shared), axis=0).repeat(count.max(), axis=1)
        values[group, lane] = table[:, ~long]
        rest, lengths = (tuple(np.array(names)[which].tolist()) for which in (~long, long))
        places = jnp.asarray(group), jnp.asarray(lane)
        return cls(rest, lengths, jnp.asarray(values), jnp.asarray(shared), jnp.asarray(count), places)
