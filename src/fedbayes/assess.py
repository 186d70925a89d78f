"""Every client of a simulation, scored on its own test rows in three stances.

global: `predict` with a fresh local state. personal: with the client's own. adapted: after `adapt` on its training rows.
All clients are scored, not only those of the last round; those that were held out never trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from fedbayes import keys, trees
from fedbayes.algorithm import Data
from fedbayes.evaluate import Score, blockwise, is_numeric, summary
from fedbayes.simulate import AnyAlgorithm, Simulation, each, put_back, slice_of

STANCES = ("global", "personal", "adapted")
BLOCK = 128
"""Test rows that are predicted at once."""
CHUNK = 256
"""Clients in one compiled call."""


class Evaluation(NamedTuple):
    """One `Score` for each client and stance, and which clients were held out."""

    round: int
    scores: dict[str, Score]
    unseen: np.ndarray
    numeric: bool

    def summary(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """stance → participating or unseen → figure → rows, clients, spread, worst_tenth."""
        found: dict[str, dict[str, Any]] = {}
        for stance, scores in self.scores.items():
            found[stance] = {}
            for group, members in (("participating", ~self.unseen), ("unseen", self.unseen)):
                if figures := summary(Score(*(value[members] for value in scores)), self.numeric):
                    found[stance][group] = figures
        return found


def assess(
    simulation: Simulation, stances: tuple[str, ...] = STANCES, progress: Callable[[int], None] | None = None
) -> Evaluation:
    """Score every client in the given stances, as the simulation stands now."""
    clients, algorithm = simulation.clients, simulation.algorithm
    key, down = keys.of_round(simulation.seed, simulation.round), simulation.down()
    empty: dict[str, list[np.ndarray]] = {}
    for bucket in simulation.buckets:
        slots = simulation.slots(len(bucket.ids), bucket.train_length + bucket.test_length, CHUNK)
        for start in range(0, len(bucket.ids), slots):
            ids = bucket.ids[start : start + slots]
            padded = np.zeros(slots, np.uint32)
            padded[: len(ids)] = ids
            local = simulation.local.get(ids, slots)
            train = clients.train(ids, bucket.train_length, slots)
            test = clients.test(ids, bucket.test_length, slots)
            width = simulation.width if simulation.mode == "vmap" else 1
            scores = _assess(
                algorithm, width, stances, key, down, simulation.fresh, padded, np.int32(len(ids)), local, train, test
            )
            for stance, found in scores.items():
                columns = empty.setdefault(stance, [])
                for place, value in enumerate(found):
                    if len(columns) <= place:
                        columns.append(np.zeros((len(clients), *value.shape[1:]), np.float32))
                    columns[place][ids] = np.asarray(value)[: len(ids)]
            if progress is not None:
                progress(len(ids))
    scores = {stance: Score(*empty[stance]) for stance in stances}
    return Evaluation(simulation.round, scores, clients.unseen, is_numeric(algorithm.model.likelihood))  # type: ignore[attr-defined]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _assess(
    algorithm: AnyAlgorithm,
    width: int,
    stances: tuple[str, ...],
    key: PRNGKeyArray,
    down: Any,
    fresh: Any,
    ids: Int[Array, " slots"],
    count: Int[Array, ""],
    local: Any,
    train: Data,
    test: Data,
) -> dict[str, Score]:
    likelihood = algorithm.model.likelihood  # type: ignore[attr-defined]

    def one(id: Any, local: Any, train: Data, test: Data) -> dict[str, Score]:
        client_key = keys.fold(key, id)

        def scored(state: Any) -> Score:
            draw = keys.fold(client_key, np.uint32(keys.PREDICT))
            return blockwise(
                lambda x: algorithm.predict(draw, down, state, x), likelihood, test.x, test.y, test.mask, BLOCK
            )

        found = {}
        for stance in stances:
            if stance == "global":
                state = fresh
            elif stance == "personal":
                state = local
            else:
                state = algorithm.adapt(keys.fold(client_key, np.uint32(keys.ADAPT)), down, local, train)
            found[stance] = scored(state)
        return found

    shapes = jax.eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], (ids, local, train, test)))
    start = trees.zeros(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ids.shape[0], *leaf.shape), leaf.dtype), shapes))

    def group(number: Any, done: dict[str, Score]) -> dict[str, Score]:
        place = number * width
        part = each(one, width)(*slice_of((ids, local, train, test), place, width))
        return put_back(done, part, place)  # type: ignore[no-any-return]

    return jax.lax.fori_loop(0, (count + width - 1) // width, group, start)  # type: ignore[no-any-return]
