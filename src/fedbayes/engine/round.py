"""The one round: who takes part, broadcast, client, accumulate, close.

    down       = broadcast(server)                   once
    up, local  = client(down, local, data)           for each client that takes part
    partial    = accumulate(partial, up)             as uploads come, in any order
    server     = close(server, down, partial)        once

Everything that runs rounds schedules these steps: the simulator over clients (vmapped cohorts, `clients.py`), over silos
(compiled stretches, `silos.py`), the coordinator of a deployment and its sites. A round that fails changes no state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import AnyAlgorithm, client_of
from fedbayes.engine import keys, reduce
from fedbayes.errors import UserError

ADVICE = "try a smaller step size, less momentum or standardised features"


class Diverged(UserError):
    """Training left the finite numbers; the state before the round is kept."""


class Round(NamedTuple):
    """What happened in a round, or in a stretch of rounds up to this one."""

    round: int
    clients: np.ndarray
    """Who took part in the last round, by place."""
    trace: dict[str, np.ndarray]
    """Of each round, the scalars among the reduced uploads and the algorithm's own metrics."""
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """The mean over the rounds of each scalar."""
        return {name: float(values.mean()) for name, values in self.trace.items()}


class Closed(NamedTuple):
    """The next server state, the round's scalars, and whether all is finite."""

    state: Any
    metrics: dict[str, Float[Array, ""]]
    fine: Bool[Array, ""]


# Who takes part


def take_part(
    seed: int, round: int, everyone: np.ndarray, cohort: int, *, dropout: float = 0.0, in_turn: bool = False
) -> np.ndarray:
    """The clients of a round, in order: drawn without replacement, less those that drop out; or one, each in its turn.

    >>> take_part(0, 1, np.arange(3), 3), take_part(0, 5, np.arange(3), 3, in_turn=True)
    (array([0, 1, 2]), array([1]))
    """
    if in_turn:
        return everyone[[(round - 1) % len(everyone)]]
    draw = np.random.default_rng([seed, round])
    ids = np.sort(draw.choice(everyone, cohort, replace=False)) if cohort < len(everyone) else everyone
    if dropout:
        answered = draw.random(len(ids)) >= dropout
        answered[draw.integers(len(ids))] |= not answered.any()  # a round needs somebody
        ids = ids[answered]
    return ids


def cohort_size(cohort: int | float | None, population: int, who: str = "clients") -> int:
    """A number of clients, or a share of them, checked against how many there are.

    >>> cohort_size(0.1, 100), cohort_size(None, 7)
    (10, 7)
    """
    if population == 0:
        raise UserError("no client is left to train: all are held out; hold out fewer")
    if cohort is None:
        return population
    if not isinstance(cohort, int | float | np.number) or not math.isfinite(cohort) or (cohort > 1 and cohort != int(cohort)):
        raise UserError(f"the cohort is {cohort!r}, but it is a whole number of {who}, or a share of them up to 1")
    size = round(cohort * population) if isinstance(cohort, float) and cohort <= 1 else int(cohort)
    if size > population:
        raise UserError(f"the cohort is {size} {who} a round, but only {population} take part; choose at most that many")
    if size < 1:
        raise UserError(f"the cohort is {cohort}, but a round needs at least one of the {who}")
    return size


def round_count(rounds: Any) -> int:
    """A number of rounds, checked."""
    if not isinstance(rounds, int | np.integer):
        raise UserError(f"rounds is {rounds!r}, but it is a whole number")
    if rounds < 1:
        raise UserError(f"rounds is {rounds}, but a run has at least one")
    return int(rounds)


def checked_seed(seed: Any) -> int:
    """A seed, checked."""
    if not isinstance(seed, int | np.integer):
        raise UserError(f"seed is {seed!r}, but a seed is a whole number")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}, but a seed is not negative and below 2^63")
    return int(seed)


# The start


@functools.partial(jax.jit, static_argnums=0)
def init_server(algorithm: AnyAlgorithm, key: PRNGKeyArray) -> Any:
    """`algorithm.init_server`, compiled."""
    return trees.strong(algorithm.init_server(key))


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_local(algorithm: AnyAlgorithm, form: trees.Form, key: PRNGKeyArray, arrays: tuple[Array, ...]) -> Any:
    """`algorithm.init_local`, compiled."""
    return trees.strong(algorithm.init_local(key, trees.put_together(form, arrays)))


# The steps


@functools.partial(jax.jit, static_argnums=0)
def broadcast(algorithm: AnyAlgorithm, key: PRNGKeyArray, server: Any) -> Any:
    """`algorithm.broadcast` with the round's key, compiled."""
    return algorithm.broadcast(keys.fold(key, np.uint32(keys.BROADCAST)), server)


@functools.partial(jax.jit, static_argnums=(0, 1))
def client(
    algorithm: AnyAlgorithm, form: trees.Form, key: PRNGKeyArray, down: Any, local: Any, arrays: tuple[Array, ...]
) -> tuple[Any, Any, Bool[Array, ""]]:
    """One client's round: what it sends, what it keeps, and whether all of it is finite; the key is the client's own."""
    up, new = client_of(algorithm, form, key, down, local, arrays)
    return up, new, trees.finite((up, new))


@functools.partial(jax.jit, donate_argnums=0)
def accumulate(partial: reduce.Partial, up: Any) -> reduce.Partial:
    """The running sum with one upload more, in place: a large one is never in memory a second time."""
    return reduce.add(partial, jax.tree.map(lambda leaf: leaf[None], up), jnp.ones(1))


def stack(uploads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The Stack fields of uploads, one row for each."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *uploads)


def closed(
    algorithm: AnyAlgorithm, key: PRNGKeyArray, server: Any, down: Any, partial: reduce.Partial, stacks: dict[str, Any]
) -> Closed:
    """The next server state from the reduced uploads; the key is the server's own."""
    up = reduce.finish(algorithm.up_type, partial, stacks)
    state = algorithm.server(key, server, down, up)
    scalars = {name: leaf for name, leaf in trees.named(up).items() if leaf.ndim == 0 and name in algorithm.up_type._fields}
    return Closed(state, {**scalars, **algorithm.metrics(state)}, trees.finite(state))


@functools.partial(jax.jit, static_argnums=0)
def close(
    algorithm: AnyAlgorithm, key: PRNGKeyArray, server: Any, down: Any, partial: reduce.Partial, stacks: dict[str, Any]
) -> Closed:
    """`closed`, compiled, with the round's key. Without `down`, which may be large, the broadcast is made once more."""
    down = broadcast(algorithm, key, server) if down is None else down
    return closed(algorithm, keys.fold(key, np.uint32(keys.SERVER)), server, down, partial, stacks)
