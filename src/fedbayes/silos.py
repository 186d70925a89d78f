"""Silos in one process: an algorithm over data that differs from silo to silo in size, shape and latents.

There are few silos and many rounds, so whole stretches of rounds are one compiled loop. Silos of equal shapes are one vmapped
group, others are compiled with their own shapes. Keys and reductions are those of the simulator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes import keys, provenance, reduce, trees
from fedbayes.cohort import AnyAlgorithm, broadcast, each, server_step, up_of
from fedbayes.errors import UserError
from fedbayes.models.sites import Values
from fedbayes.models.structured import encode
from fedbayes.simulator import Diverged, cohort_size, drawn
from fedbayes.states import States
from fedbayes.trees import Form, put_together, take_apart

STRETCH = 1000
"""Most rounds in one compiled call."""
CALL = 0.5
"""Seconds that a call should take, so that a progress bar moves and Ctrl-C is heard."""


class Group(NamedTuple):
    """Silos of one form: their places among all, and their arrays, stacked."""

    form: Form
    places: tuple[int, ...]
    arrays: tuple[Array, ...]


class SiloSimulation:
    """An algorithm over silos: its server state, the silos' states, and the round that it has reached.

    Args:
        algorithm: With its facts planned (`algorithm.planned(rounds, silos=…, rows=…)`); `plan` does so.
        silos: Each silo's data by its name.
        cohort: How many silos take part in a round, or which share of them; all by default.
        in_turn: One silo a round, each in its turn.
        seed: Of everything that is random.
        loop: Run silos one by one, so that the one whose numbers are not finite is named.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        silos: Mapping[str, Any],
        *,
        cohort: int | float | None = None,
        in_turn: bool = False,
        seed: int = 0,
        loop: bool = False,
    ) -> None:
        self.algorithm, self.seed, self.names, self.round = algorithm, seed, tuple(map(str, silos)), 0
        if seed < 0:
            raise UserError(f"seed is {seed}, but a seed is not negative")
        self.in_turn, self.cohort = in_turn, cohort_size(cohort, len(silos), "silos")
        if in_turn and cohort is not None:
            raise UserError("in_turn visits one silo a round, so it cannot be combined with a cohort")
        self.parts = read(silos)
        self.groups = _groups(self.parts)
        everyone = self.cohort == len(silos) and not in_turn
        self.compiled = not loop and (everyone or len(self.groups) == 1) and not (in_turn and len(self.groups) > 1)
        server_key, local_key = keys.of_start(seed)
        self.state = named(self.names[0], _init_server, algorithm, self.parts[0][0], server_key, self.parts[0][1])
        self.states = []
        for group in self.groups:
            name, arrays = self.names[group.places[0]], self.parts[group.places[0]][1]
            fresh = named(name, _init_local, algorithm, group.form, local_key, arrays)
            self.states.append(_stack([fresh] * len(group.places)))
        self.local = SiloStates(self)
        self._pace = 1

    def data(self, name: str) -> Any:
        """A silo's data, as arrays."""
        return put_together(*self.parts[self.index(name)])

    def index(self, name: str) -> int:
        """A silo's place."""
        if str(name) not in self.names:
            raise UserError(f"there is no silo {name!r}; there are {', '.join(self.names)}")
        return self.names.index(str(name))

    def own(self, name: str) -> Any:
        """A silo's own state."""
        group, row = self._where(self.index(name))
        return jax.tree.map(lambda leaf: leaf[row], self.states[group])

    def put(self, name: str, own: Any) -> None:
        """Give a silo another state of its own."""
        group, row = self._where(self.index(name))
        self.states[group] = jax.tree.map(lambda leaf, one: leaf.at[row].set(one), self.states[group], own)

    def down(self) -> Any:
        """What the next round's silos receive."""
        return broadcast(self.algorithm, keys.of_round(self.seed, self.round + 1), self.state)

    def advance(self, rounds: int) -> Iterator[Float[np.ndarray, " rounds"]]:
        """Run `rounds` rounds; gives the bound of each, stretch by stretch."""
        last = self.round + rounds
        while self.round < last:
            began, count = time.perf_counter(), min(self._pace if self.compiled else 1, last - self.round)
            bounds = self._stretch(count) if self.compiled else self._one_round()
            if not np.isfinite(bounds).all():
                bad = self.round - len(bounds) + int((~np.isfinite(bounds)).argmax()) + 1
                raise Diverged(
                    f"the bound is not finite in round {bad}; try a smaller lr or a smaller start, or loop=True to see the silo"
                )
            if count == self._pace:
                seconds = (time.perf_counter() - began) / count
                self._pace = int(np.clip(CALL / max(seconds, 1e-9), 1, min(STRETCH, 4 * self._pace)))
            yield bounds

    def _chosen(self, round: int) -> np.ndarray:
        """The places of the silos that take part in a round."""
        if self.in_turn:
            return np.array([(round - 1) % len(self.names)], np.int32)
        return drawn(np.random.default_rng([self.seed, round]), np.arange(len(self.names), dtype=np.int32), self.cohort)

    def _stretch(self, count: int) -> Float[np.ndarray, " rounds"]:
        taking = None
        if self.in_turn or self.cohort < len(self.names):
            picks = [self._chosen(self.round + 1 + offset) for offset in range(count)]
            taking = jnp.asarray(np.stack(picks + [picks[-1]] * (STRETCH - count)))
        layout = tuple((group.form, group.places) for group in self.groups)
        arrays = tuple(group.arrays for group in self.groups)
        seed, start, steps = jax.random.key(self.seed), jnp.int32(self.round), jnp.int32(count)
        self.state, self.states, bounds = _stretch(
            self.algorithm, layout, seed, start, steps, self.state, self.states, arrays, taking
        )
        self.round += count
        return np.asarray(bounds)[:count]

    def _one_round(self) -> Float[np.ndarray, " rounds"]:
        self.round += 1
        key = keys.of_round(self.seed, self.round)
        down = broadcast(self.algorithm, key, self.state)
        partial, stacks = None, []
        for place in self._chosen(self.round):
            own = self.own(self.names[place])
            form, arrays = self.parts[place]
            up, new, fine = one_silo(self.algorithm, form, keys.fold(key, np.uint32(place)), down, own, arrays)
            if not bool(fine):
                raise Diverged(f"round {self.round}, silo {self.names[place]!r}: its numbers are not finite; try a smaller lr")
            self.put(self.names[place], new)
            partial = reduce.empty(up) if partial is None else partial
            up = jax.tree.map(lambda leaf: leaf[None], up)
            partial = reduce.add(partial, up, jnp.ones(1))
            stacks.append(reduce.stacked(up))
        assert partial is not None
        stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)
        self.state, _, _ = server_step(self.algorithm, key, self.state, down, partial, stacked)
        return np.asarray(self.state.bound)[None]

    def _where(self, place: int) -> tuple[int, int]:
        return next((i, group.places.index(place)) for i, group in enumerate(self.groups) if place in group.places)


class SiloStates:
    """The silos' states on disk, a store for each group: what `Run` commits with a checkpoint and rewinds to."""

    def __init__(self, simulation: SiloSimulation, folder: Path | None = None) -> None:
        self._simulation = simulation
        fresh = [jax.tree.map(lambda leaf: leaf[0], states) for states in simulation.states]
        self._stores = [
            States(one, len(group.places), None if folder is None else folder / str(number))
            for number, (one, group) in enumerate(zip(fresh, simulation.groups, strict=True))
        ]

    def commit(self, round: int) -> None:
        """Write all states as those after `round`."""
        for store, group, states in zip(self._stores, self._simulation.groups, self._simulation.states, strict=True):
            store.put(np.arange(len(group.places)), jax.device_get(states), round)
            store.commit(round)

    def rewind(self, round: int) -> None:
        """Make the simulation's states those that were committed after `round`."""
        for store in self._stores:
            store.rewind(round)
        if round:
            places = [np.arange(len(group.places)) for group in self._simulation.groups]
            self._simulation.states = [
                jax.tree.map(jnp.asarray, store.get(ids)) for store, ids in zip(self._stores, places, strict=True)
            ]

    def digest(self) -> int:
        """A checksum of whose state is of which round."""
        return sum(store.digest() for store in self._stores) % 2**32


def read(silos: Mapping[str, Any]) -> list[tuple[Form, tuple[Array, ...]]]:
    """The silos' data taken apart; what cannot be read names its silo."""
    if not silos:
        raise UserError("there is no silo; give at least one, as a name and its data")
    if len(set(map(str, silos))) < len(silos):
        raise UserError("two silos have the same name; give each its own")
    return [named(name, take_apart, content) for name, content in silos.items()]


def plan(algorithm: AnyAlgorithm, silos: Mapping[str, Any], rounds: int) -> AnyAlgorithm:
    """The algorithm with what it may know of a run before it: rounds, silos and observations; and the model checked."""
    structured = getattr(algorithm, "structured", None)
    if structured is None:
        raise UserError(
            f"{type(algorithm).__name__} trains a network over clients, but silos were given; use SFVI, SFVIAvg or PVI for them"
        )
    total = 0
    first: dict[str, tuple[str, Any]] = {}
    for name, (form, arrays) in zip(map(str, silos), read(silos), strict=True):
        total += named(name, from_shapes, structured.rows, form, arrays)
        thetas = named(name, _theta, algorithm, form, arrays)
        for theta, shape in thetas.items():
            where, known = first.setdefault(theta, (name, shape))
            if known != shape:
                raise UserError(
                    f"the parameter {theta} has shape {known} in silo {where!r} and {shape} in silo {name!r}, but it is "
                    "shared; make its shape the same for all"
                )
        if missing := [theta for theta in first if theta not in thetas]:
            raise UserError(f"the parameter {missing[0]} is not in silo {name!r}; name it in population, which all silos share")
        if new := [theta for theta in thetas if first[theta][0] == name != str(next(iter(silos)))]:
            raise UserError(f"the parameter {new[0]} is only in silo {name!r}; name it in population, which all silos share")
        named(name, algorithm.family.check_draws, structured, put_together(form, arrays))  # type: ignore[attr-defined]
    return algorithm.planned(rounds, silos=len(silos), rows=total)


def _theta(algorithm: Any, form: Form, arrays: tuple[Array, ...]) -> dict[str, Any]:
    """The shape of each parameter of θ; where one starts depends on no data, as all silos see it."""

    def start(given: tuple[Array, ...]) -> Values:
        data = put_together(form, given)
        own = {} if algorithm.family.encoder is None else encode(algorithm.family.encoder, {}, data)[1]
        return {**algorithm.structured.theta(data), **own}

    shapes = jax.eval_shape(start, arrays)
    for path, flow in zip(trees.named(shapes), provenance.trace(start, {"data": arrays}), strict=True):
        if flow.depends:
            raise UserError(
                f"the parameter {path} starts from the silo's data, which would reach every silo; start it from a constant"
            )
    return jax.tree.map(jnp.shape, shapes)


def from_shapes(function: Callable[[Any], Any], form: Form, arrays: tuple[Array, ...]) -> Any:
    """What `function` says of a silo's data from its shapes, without computing anything."""
    found = []
    jax.eval_shape(lambda given: found.append(function(put_together(form, given))), arrays)
    return found[0]


def named(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` gives; an error that a user is meant to read says which silo it is about."""
    try:
        return function(*arguments)
    except UserError as problem:
        raise UserError(f"silo {name!r}: {problem}") from None


def _groups(parts: list[tuple[Form, tuple[Array, ...]]]) -> list[Group]:
    places: dict[Form, list[int]] = {}
    for place, (form, _) in enumerate(parts):
        places.setdefault(form, []).append(place)
    return [Group(form, tuple(found), _stack([parts[place][1] for place in found])) for form, found in places.items()]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_server(algorithm: Any, form: Form, key: Any, arrays: tuple[Array, ...]) -> Any:
    return trees.strong(algorithm.init_server(key, put_together(form, arrays)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_local(algorithm: AnyAlgorithm, form: Form, key: Any, arrays: tuple[Array, ...]) -> Any:
    return trees.strong(algorithm.init_local(key, put_together(form, arrays)))


def _stack(rows: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_silo(algorithm: AnyAlgorithm, form: Form, key: Any, down: Any, own: Any, arrays: tuple[Array, ...]) -> Any:
    """A round of one silo: what it sends, what it keeps, and whether all of it is finite."""
    up, new = algorithm.client(key, down, own, put_together(form, arrays))
    return up, new, trees.finite((up, new))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stretch(
    algorithm: AnyAlgorithm,
    layout: tuple[tuple[Form, tuple[int, ...]], ...],
    seed: Any,
    start: Any,
    count: Any,
    server: Any,
    states: list[Any],
    arrays: Sequence[Any],
    taking: Any,
) -> tuple[Any, list[Any], Float[Array, " rounds"]]:
    """`count` rounds; `taking` says for each who takes part, where not all do (all silos are one group then)."""
    # All keys at once: in a loop their derivation would take as long as a small model's step.
    roles = [keys.BROADCAST, keys.SERVER, *range(sum(len(places) for _, places in layout))]
    fold = jax.vmap(jax.vmap(keys.fold, in_axes=(None, 0)), in_axes=(0, None))
    all_keys = fold(
        jax.vmap(lambda number: keys.fold(seed, start + 1 + number))(jnp.arange(STRETCH)), jnp.asarray(roles, jnp.uint32)
    )

    # A silo alone in its group goes without the group's axis, which would cost copies.
    alone = [len(places) == 1 for _, places in layout]
    states, arrays = _without_axis(alone, states), _without_axis(alone, arrays)

    def iteration(number: Any, carry: Any) -> Any:
        server, states, bounds = carry
        down = algorithm.broadcast(all_keys[number, 0], server)
        partial, stacks, after = None, [], []
        for (form, places), own, content in zip(layout, states, arrays, strict=True):
            rows = jnp.arange(len(places)) if taking is None else taking[number]
            everyone = taking is None or len(places) == 1
            chosen = (own, content) if everyone else jax.tree.map(lambda leaf, rows=rows: leaf[rows], (own, content))

            def one(key: Any, own: Any, content: Any, form: Form = form, down: Any = down) -> Any:
                return algorithm.client(key, down, own, put_together(form, content))

            if len(places) == 1:
                up, new = one(all_keys[number, 2 + places[0]], *chosen)
                ups = jax.tree.map(lambda leaf: leaf[None], up)
            else:
                ups, new = each(one, rows.size)(all_keys[number, 2 + jnp.asarray(places)[rows]], *chosen)
            partial = reduce.add(reduce.empty(_first(ups)) if partial is None else partial, ups, jnp.ones(rows.size))
            stacks.append(reduce.stacked(ups))
            after.append(new if everyone else jax.tree.map(lambda leaf, x, rows=rows: leaf.at[rows].set(x), own, new))
        assert partial is not None
        stacked = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)
        up = reduce.finish(up_of(algorithm), partial, stacked)
        server = algorithm.server(all_keys[number, 1], server, down, up)
        return server, after, jax.lax.dynamic_update_index_in_dim(bounds, server.bound, number, 0)

    server, states, bounds = jax.lax.fori_loop(0, count, iteration, (server, states, jnp.zeros(STRETCH)))
    return (
        server,
        [jax.tree.map(lambda leaf: leaf[None], own) if one else own for own, one in zip(states, alone, strict=True)],
        bounds,
    )


def _without_axis(alone: Sequence[bool], groups: Sequence[Any]) -> list[Any]:
    return [jax.tree.map(lambda leaf: leaf[0], tree) if one else tree for tree, one in zip(groups, alone, strict=True)]


def _first(ups: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ups)
