"""Silos in one process: an algorithm over data that differs from silo to silo in size, shape and latents.

There are few silos and many rounds, so whole stretches of rounds are one compiled loop. Silos of equal shapes are one vmapped
group, others are compiled with their own shapes. Keys, steps and reductions are those of the simulator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes.algorithm import AnyStructured, client_of
from fedbayes.engine import keys, reduce
from fedbayes.engine import round as steps
from fedbayes.engine.cohort import each, jit_inline
from fedbayes.engine.local_state import States
from fedbayes.engine.round import Diverged, Round
from fedbayes.engine.silo_data import Silos, grouped, naming_silo, read, stacked
from fedbayes.errors import UserError
from fedbayes.primitives.padding import cut
from fedbayes.trees import Form, finite, put_together, take_apart

STRETCH = 1000  # most rounds in one compiled call
ADVICE = "try a smaller lr or a smaller start"
CALL = 0.5  # seconds that a call should take, so that a progress bar moves and Ctrl-C is heard


class SiloSimulation:
    """An algorithm over silos: its server state, the silos' states, and the round that it has reached.

    Args:
        algorithm: With its facts planned (`silo_data.plan` does so).
        silos: Each silo's data by its name.
        cohort: How many silos take part in a round, or which share of them; all by default.
        in_turn: One silo a round, each in its turn.
        seed: Of everything that is random.
        loop: Run silos one by one, so that the one whose numbers are not finite is named.
    """

    def __init__(
        self,
        algorithm: AnyStructured,
        silos: Mapping[str, Any] | Silos,
        *,
        cohort: int | float | None = None,
        in_turn: bool = False,
        seed: int = 0,
        loop: bool = False,
    ) -> None:
        self.algorithm, self.seed, self.round, self.choice = algorithm, steps.checked_seed(seed), 0, None
        if in_turn and cohort is not None:
            raise UserError("in_turn visits one silo a round, so it cannot be combined with a cohort")
        self.names, self.own_parts, self.parts = read(silos, algorithm, together=not loop)
        self.in_turn, self.cohort = in_turn, steps.cohort_size(cohort, len(self.names), "silos")
        self.groups = grouped(self.parts)
        self.everyone = self.cohort == len(self.names) and not in_turn
        self.compiled = not loop and (self.everyone or len(self.groups) == 1)
        server_key, local_key = keys.of_start(seed)
        self.state = naming_silo(self.names[0], steps.init_server, algorithm, server_key)
        self.states = []
        for group in self.groups:
            name, arrays = self.names[group.places[0]], self.parts[group.places[0]][1]
            fresh = naming_silo(name, steps.init_local, algorithm, group.form, local_key, arrays)
            self.states.append(stacked([fresh] * len(group.places)))
        self.local = SiloStates(self)
        self._pace = 1

    def data(self, name: str) -> Any:
        """A silo's data, as arrays."""
        place = self.index(name)
        return cut(self.algorithm.structured, put_together(*self.own_parts[place]), put_together(*self.parts[place]))

    def index(self, name: str) -> int:
        """A silo's place."""
        if str(name) not in self.names:
            raise UserError(f"there is no silo {name!r}; there are {', '.join(self.names)}")
        return self.names.index(str(name))

    def own(self, name: str, *, padded: bool = False) -> Any:
        """A silo's own state, for `data(name)`; or padded, for `parts`."""
        group, row = self._where(self.index(name))
        own = jax.tree.map(lambda leaf: leaf[row], self.states[group])
        if padded or self.parts[self.index(name)][0].shapes == take_apart(self.data(name))[0].shapes:
            return own
        bare = jax.eval_shape(lambda: self.algorithm.init_local(jax.random.key(0), self.data(name)))
        return jax.tree.map(lambda leaf, like: leaf[tuple(map(slice, like.shape))], own, bare)

    def put(self, name: str, own: Any) -> None:
        """Give a silo another state of its own, padded or not."""
        group, row = self._where(self.index(name))
        self.states[group] = jax.tree.map(
            lambda leaf, one: leaf.at[(row, *map(slice, one.shape))].set(one), self.states[group], own
        )

    def down(self) -> Any:
        """What the next round's silos receive."""
        return steps.broadcast(self.algorithm, keys.of_round(self.seed, self.round + 1), self.state)

    def chosen(self, round: int) -> np.ndarray:
        """The places of the silos that take part in a round."""
        everyone = np.arange(len(self.names), dtype=np.int32)
        return steps.take_part(self.seed, round, everyone, self.cohort, in_turn=self.in_turn)

    def advance(self, rounds: int) -> Iterator[Round]:
        """Run some rounds, stretch by stretch. A round that diverges leaves the state after the one before it."""
        last = self.round + rounds
        while self.round < last:
            began, count = time.perf_counter(), min(self._pace if self.compiled else 1, last - self.round)
            trace = self._stretch(count) if self.compiled else self._one_round()
            self.round += count
            seconds = time.perf_counter() - began
            if count == self._pace and not self.algorithm.stops:  # which is asked after every round
                self._pace = int(np.clip(CALL / max(seconds / count, 1e-9), 1, min(STRETCH, 4 * self._pace)))
            yield Round(self.round, self.chosen(self.round), trace, seconds)

    def _stretch(self, count: int) -> dict[str, np.ndarray]:
        """Rounds as one compiled call; where one of them is not finite, those before it alone."""
        picks = None
        if not self.everyone:
            drawn = [self.chosen(self.round + 1 + offset) for offset in range(count)]
            picks = jnp.asarray(np.stack(drawn + [drawn[-1]] * (STRETCH - count)))
        layout = tuple((group.form, group.places) for group in self.groups)
        arrays = tuple(group.arrays for group in self.groups)
        start, seed = jnp.int32(self.round), jax.random.key(self.seed)

        def run(count: int) -> Any:
            given = (self.state, self.states, arrays, picks)
            state, states, trace = _stretch(self.algorithm, layout, seed, start, jnp.int32(count), *given)
            return state, states, {name: np.asarray(values)[:count] for name, values in trace.items()}

        state, states, trace = run(count)
        fine = np.logical_and.reduce([np.isfinite(values) for values in trace.values()])
        if not fine.all() or not bool(finite((state, states))):
            good = int((~fine).argmax()) if not fine.all() else 0
            if good:
                self.state, self.states, _ = run(good)
                self.round += good
            kept = self.state, list(self.states)
            self._one_round()  # which names the silo, if it can
            self.state, self.states = kept
            where = f"in round {self.round + 1}" if not fine.all() else f"within {count} rounds after round {self.round}"
            raise Diverged(f"the bound is not finite {where}; {ADVICE}")
        self.state, self.states = state, states
        return trace

    def _one_round(self) -> dict[str, np.ndarray]:
        """One round, silo by silo."""
        round = self.round + 1
        key, down = keys.of_round(self.seed, round), self.down()
        partial, stacks, after = None, [], {}
        for place in self.chosen(round):
            name, (form, arrays) = self.names[place], self.parts[place]
            given = (keys.fold(key, np.uint32(place)), down, self.own(name, padded=True), arrays)
            up, after[name], fine = steps.client(self.algorithm, form, *given)
            if not bool(fine):
                raise Diverged(f"round {round}, silo {name!r}: its numbers are not finite; try a smaller lr")
            partial = steps.accumulate(reduce.empty(up) if partial is None else partial, up)
            stacks.append(reduce.stacked(up))
        assert partial is not None
        state, metrics, fine = steps.close(self.algorithm, key, self.state, down, partial, steps.stack(stacks))
        if not bool(fine):
            raise Diverged(f"the bound is not finite in round {round}; {ADVICE}")
        self.state = state
        for name, own in after.items():
            self.put(name, own)
        return {name: np.asarray(value)[None] for name, value in metrics.items()}

    def _where(self, place: int) -> tuple[int, int]:
        return next((i, group.places.index(place)) for i, group in enumerate(self.groups) if place in group.places)


class SiloStates:
    """The silos' states on disk, a store for each group: what a checkpoint commits and a resumed run rewinds to."""

    def __init__(self, simulation: SiloSimulation, folder: Path | None = None) -> None:
        self._simulation = simulation
        fresh = [jax.tree.map(lambda leaf: leaf[0], states) for states in simulation.states]
        self._stores = [
            States(one, len(group.places), None if folder is None else folder / str(number))
            for number, (one, group) in enumerate(zip(fresh, simulation.groups, strict=True))
        ]

    def commit(self, round: int) -> list[int]:
        """Write all states as those after `round`; gives a checksum of each group's."""
        found = []
        for store, group, states in zip(self._stores, self._simulation.groups, self._simulation.states, strict=True):
            store.put(np.arange(len(group.places)), jax.device_get(states), round)
            found.append(store.commit(round))
        return found

    def restore(self, round: int, kept: list[int] | None) -> None:
        """Make the simulation's states those that were committed after `round`."""
        for number, store in enumerate(self._stores):
            store.restore(round, None if kept is None else kept[number])
        if round:
            pairs = zip(self._stores, self._simulation.groups, strict=True)
            states = [store.get(np.arange(len(group.places))) for store, group in pairs]
            self._simulation.states = jax.tree.map(jnp.asarray, states)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stretch(
    algorithm: AnyStructured,
    layout: tuple[tuple[Form, tuple[int, ...]], ...],
    seed: Any,
    start: Any,
    count: Any,
    server: Any,
    states: list[Any],
    arrays: Sequence[Any],
    picks: Any,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """`count` rounds; `picks` says for each who takes part, where not all do (all silos are one group then)."""
    # All keys at once: in a loop their derivation would take as long as a small model's step.
    roles = [keys.BROADCAST, keys.SERVER, *range(sum(len(places) for _, places in layout))]
    fold = jax.vmap(jax.vmap(keys.fold, in_axes=(None, 0)), in_axes=(0, None))
    rounds = jax.vmap(lambda number: keys.fold(seed, start + 1 + number))(jnp.arange(STRETCH))
    all_keys = fold(rounds, jnp.asarray(roles, jnp.uint32))

    # A silo alone in its group goes without the group's axis, which would cost copies.
    alone = [len(places) == 1 for _, places in layout]
    states, arrays = _without_axis(alone, states), _without_axis(alone, arrays)

    @jit_inline  # traced once, although it is asked for its shapes and then for its program
    def one_round(number: Any, server: Any, states: list[Any]) -> Any:
        down = algorithm.broadcast(all_keys[number, 0], server)
        partial, stacks, after = None, [], []
        for (form, places), own, content in zip(layout, states, arrays, strict=True):
            rows = jnp.arange(len(places)) if picks is None else picks[number]
            everyone = picks is None or len(places) == 1
            chosen = (own, content) if everyone else jax.tree.map(lambda leaf, rows=rows: leaf[rows], (own, content))
            if partial is not None:
                # One group after the other: a model's own factorisations, side by side, can wait for each other (`small.py`).
                chosen, partial = jax.lax.optimization_barrier((chosen, partial))

            def one(key: Any, own: Any, content: Any, form: Form = form, down: Any = down) -> Any:
                return client_of(algorithm, form, key, down, own, content)

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
        state, metrics, _ = steps.closed(algorithm, all_keys[number, 1], server, down, partial, stacked)
        return state, after, metrics

    def iteration(number: Any, carry: Any) -> Any:
        server, states, trace = carry
        server, states, metrics = one_round(number, server, states)
        return server, states, {name: trace[name].at[number].set(value) for name, value in metrics.items()}

    _, _, metrics = jax.eval_shape(one_round, jnp.int32(0), server, states)
    trace = {name: jnp.zeros((STRETCH, *value.shape), value.dtype) for name, value in metrics.items()}
    server, states, trace = jax.lax.fori_loop(0, count, iteration, (server, states, trace))
    whole = [jax.tree.map(lambda leaf: leaf[None], own) if one else own for own, one in zip(states, alone, strict=True)]
    return server, whole, trace


def _without_axis(alone: Sequence[bool], groups: Sequence[Any]) -> list[Any]:
    return [jax.tree.map(lambda leaf: leaf[0], tree) if one else tree for tree, one in zip(groups, alone, strict=True)]


def _first(ups: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ups)
