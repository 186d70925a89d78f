"""Rounds in one process: a cohort is one compiled call for each bucket of equally padded clients.

Clients of a bucket run in groups of `width` under `vmap`, group after group in a compiled loop that adds their uploads to a
running sum, so memory is that of one group. `clients="loop"` runs them one by one from Python with the same numbers, slower,
and says which client failed at which step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedbayes import keys, reduce, trees
from fedbayes.algorithm import Data
from fedbayes.cohort import (
    AnyAlgorithm,
    Outcome,
    Padding,
    Rows,
    broadcast,
    init_local,
    init_server,
    run_client,
    run_cohort,
    server_step,
)
from fedbayes.data.clients import Clients
from fedbayes.errors import UserError
from fedbayes.states import States

MEMORY = 512 * 2**20
"""Bytes of rows and states that one compiled call may hold."""
RESIDENT = 256 * 2**20
"""Bytes of a data set up to which all its rows lie on the device for the whole run."""
ONE_LENGTH = 32 * 2**20
"""Bytes of a cohort's rows up to which all clients are padded to one length."""
CACHE = 2**18
"""Bytes of parameters that the clients of a vmapped group may hold together: what stays in a core's cache. See benchmarks/."""


class Bucket(NamedTuple):
    """Clients padded to the same lengths."""

    ids: np.ndarray
    train: Padding
    test: Padding


class Diverged(UserError):
    """Training left the finite numbers; the state before the round is kept."""


class Round(NamedTuple):
    """What happened in a round: who took part, the scalars among the reduced uploads, and how long it took."""

    round: int
    clients: np.ndarray
    metrics: dict[str, float]
    seconds: float


def buckets(data: Clients, cohort: int, most: int = 4) -> list[Bucket]:
    """All clients, padded to one length, or to up to `most` lengths that halve from one to the next.

    Padding costs memory and hardly any time (a client's loops end with its own rows), but every length is compiled anew, so
    clients are divided only where a cohort padded to one length would not be small.
    """
    counts = np.maximum(data.train_counts, 1)
    row = int(np.prod(data.shape, dtype=int)) * data.x.dtype.itemsize
    if cohort * int(counts.max()) * row <= ONE_LENGTH:
        most = 1
    group = np.minimum(np.floor(np.log2(counts.max() / counts) + 1e-9).astype(int), most - 1)
    found = []
    for number in np.unique(group):
        ids = np.flatnonzero(group == number)
        found.append(Bucket(ids, _padding(data.train_counts[ids]), _padding(data.test_counts[ids])))
    return found


def _padding(counts: np.ndarray) -> Padding:
    return Padding(max(1, int(counts.max())), bool((counts == counts.max()).all() and counts.max() > 0))


class Simulation:
    """An algorithm over clients: its server state, its clients' states, and the round that it has reached.

    Args:
        algorithm: With its schedules planned (`algorithm.planned(rounds)`) where they decay.
        data: The clients' rows.
        cohort: How many clients take part in a round, or which share of them; all by default.
        seed: Of everything that is random: the start, the cohorts, and each client's draws.
        dropout: Share of a cohort that does not answer.
        clients: "vmap", or "loop" to run them one by one and see which step of which client fails.
        width: Clients in a vmapped group; by default as many as stay in a core's cache.
        memory: Bytes of rows and states that a compiled call may hold.
        folder: Where clients' states are kept; a temporary file by default.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits")
    >>> simulation = fb.Simulation(fb.FedAvg(fb.network("mlp", clients)), clients, cohort=5)
    >>> simulation.step().round
    1
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        data: Clients,
        *,
        cohort: int | float | None = None,
        seed: int = 0,
        dropout: float = 0.0,
        clients: Literal["vmap", "loop"] = "vmap",
        width: int | None = None,
        memory: int = MEMORY,
        folder: Path | None = None,
    ) -> None:
        self.algorithm, self.data, self.seed, self.mode = algorithm, data, seed, clients
        if not isinstance(seed, int | np.integer):
            raise UserError(f"seed is {seed!r}, but a seed is a whole number")
        if seed < 0:
            raise UserError(f"seed is {seed}, but a seed is not negative")
        if clients not in ("vmap", "loop"):
            raise UserError(f"clients is {clients!r}, but it is how they run: 'vmap' or 'loop'")
        self.cohort = cohort_size(cohort, len(data.participants))
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}, but it is the share of a cohort that does not answer: at least 0, below 1")
        self.dropout = dropout
        self.buckets = buckets(data, self.cohort)
        server_key, local_key = keys.of_start(seed)
        self.state = init_server(algorithm, server_key)
        rows = Data(jnp.zeros((1, *data.shape), data.x.dtype), jnp.zeros(1, data.y.dtype), jnp.ones(1, bool))
        self.fresh = jax.device_get(init_local(algorithm, local_key, rows))
        self.round = 0
        self.local: States[Any] = States(self.fresh, len(data), folder)
        self.width = width or group_width(self.state, self.fresh)
        self._memory = memory
        self._bucket_of = np.zeros(len(data), np.int8)
        for number, bucket in enumerate(self.buckets):
            self._bucket_of[bucket.ids] = number
        self._ahead: tuple[int, list[Call]] | None = None

    def down(self) -> Any:
        """What the clients of the next round receive, and what everyone predicts with now."""
        return broadcast(self.algorithm, keys.of_round(self.seed, self.round + 1), self.state)

    def chosen(self, round: int) -> np.ndarray:
        """The clients of a round: drawn without replacement from the participants, less those that drop out."""
        draw = np.random.default_rng([self.seed, round])
        participants = self.data.participants
        ids = drawn(draw, participants, self.cohort)
        if self.dropout:
            answered = draw.random(len(ids)) >= self.dropout
            answered[draw.integers(len(ids))] |= not answered.any()  # a round needs somebody
            ids = ids[answered]
        return ids

    def step(self) -> Round:
        """Run one round. If it diverges, raise `Diverged` and stay at the round before."""
        started = time.perf_counter()
        round = self.round + 1
        key = keys.of_round(self.seed, round)
        down = self.down()
        calls = self._calls(round)
        run = self._run_loop if self.mode == "loop" else self._run_vmap
        outcomes = [run(key, down, call, round) for call in calls]
        if self.mode == "vmap":
            self._ahead = (round + 1, list(self._gather(self.chosen(round + 1))))  # while the devices are busy
        self._check(outcomes, calls, round)
        partial = functools.reduce(reduce.combine, [outcome.partial for outcome in outcomes])
        stacks = _restack([outcome.stacks for outcome in outcomes], [call.ids for call in calls])
        state, metrics, fine = server_step(self.algorithm, key, self.state, down, partial, stacks)
        if not fine:
            raise Diverged(f"round {round}: the server's state is no longer finite although every upload was; {ADVICE}")
        for call, outcome in zip(calls, outcomes, strict=True):
            self.local.put(call.ids, outcome.local, round)
        self.state, self.round = state, round
        ids = np.concatenate([call.ids for call in calls])
        return Round(round, ids, {name: float(value) for name, value in metrics.items()}, time.perf_counter() - started)

    def _calls(self, round: int) -> list[Call]:
        ahead, self._ahead = self._ahead, None
        calls = ahead[1] if ahead is not None and ahead[0] == round else self._gather(self.chosen(round))
        return list(calls)

    def _gather(self, ids: np.ndarray) -> Iterator[Call]:
        """A cohort, bucket by bucket, in calls that fit the memory budget and always have the same shape."""
        for number, bucket in enumerate(self.buckets):
            members = ids[self._bucket_of[ids] == number]
            if not len(members):
                continue
            # Clients of like length share a group, so that a vmapped group wastes few steps on its shorter ones.
            members = members[np.argsort(self.data.train_counts[members], kind="stable")]
            slots = self.slots(len(bucket.ids), bucket.train.length)
            for start in range(0, len(members), slots):
                yield self.call(members[start : start + slots], slots, bucket.train, "train")

    def call(self, ids: np.ndarray, slots: int, padding: Padding, part: Literal["train", "test"]) -> Call:
        """The training or test rows of some clients, for a compiled call."""
        starts, counts = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        all_counts = self.data.train_counts if part == "train" else self.data.test_counts
        counts[: len(ids)] = all_counts[ids]
        if self._resident is not None:
            begin = self.data.offsets[ids] + (0 if part == "train" else self.data.train_counts[ids])
            starts[: len(ids)] = begin
            return Call(ids, slots, padding, Rows(*self._resident, starts, counts))
        gather = self.data.train if part == "train" else self.data.test
        x, y, _ = gather(ids, padding.length, slots)
        starts[:] = np.arange(slots) * padding.length
        return Call(ids, slots, padding, Rows(x.reshape(-1, *x.shape[2:]), y.reshape(-1), starts, counts))

    @functools.cached_property
    def _resident(self) -> tuple[Array, Array] | None:
        """All rows on the device, where they are few; with a tail, so that the last client can be cut to any length."""
        if isinstance(self.data.x, np.memmap) or self.data.x.nbytes > RESIDENT:
            return None
        tail = max(max(bucket.train.length, bucket.test.length) for bucket in self.buckets)
        x, y = (np.pad(rows, [(0, tail)] + [(0, 0)] * (rows.ndim - 1)) for rows in (self.data.x, self.data.y))
        return jax.device_put(x), jax.device_put(y)

    def slots(self, members: int, rows: int, cohort: int | None = None, state: int = 0) -> int:
        """How many clients a compiled call takes: the cohort where the memory budget allows, in whole groups."""
        row = int(np.prod(self.data.shape, dtype=int)) * self.data.x.dtype.itemsize + 8
        fit = max(1, self._memory // (rows * row + 2 * (trees.size(self.fresh) + state) + 1))
        wanted = min(self.cohort if cohort is None else cohort, members, fit)
        return -(-wanted // self.width) * self.width if self.mode == "vmap" else wanted

    def _run_vmap(self, key: PRNGKeyArray, down: Any, call: Call, round: int) -> Outcome:
        local = self.local.get(call.ids, call.slots)
        count = np.int32(len(call.ids))
        return run_cohort(self.algorithm, self.width, call.padding, key, down, call.padded_ids, count, local, call.rows)

    def _run_loop(self, key: PRNGKeyArray, down: Any, call: Call, round: int) -> Outcome:
        local = self.local.get(call.ids)
        partial, ups, locals_ = None, [], []
        for place, client in enumerate(call.ids):
            own = jax.tree.map(lambda leaf, place=place: leaf[place], local)
            client_key = keys.fold(key, np.uint32(client))
            name = str(self.data.names[client])
            try:
                error, (up, new) = run_client(self.algorithm, call.padding, client_key, down, own, call.rows, np.int32(place))
            except Exception as problem:
                problem.add_note(f"while running client {name!r} in round {round}")
                raise
            if message := error.get():
                raise Diverged(f"round {round}, client {name!r}: {message.split(' (`check`')[0]}; {ADVICE}")
            partial = reduce.empty(up) if partial is None else partial
            up = jax.tree.map(lambda leaf: leaf[None], up)
            partial = reduce.add(partial, up, jnp.ones(1))
            ups.append(reduce.stacked(up))
            locals_.append(new)
        stacks = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *ups)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *locals_)
        assert partial is not None
        return Outcome(partial, stacks, stacked, jnp.ones(len(call.ids), bool))

    def _check(self, outcomes: list[Outcome], calls: list[Call], round: int) -> None:
        bad = [call.ids[~np.asarray(outcome.fine)[: len(call.ids)]] for call, outcome in zip(calls, outcomes, strict=True)]
        ids = np.concatenate(bad)
        if len(ids):
            names = ", ".join(str(name) for name in self.data.names[ids[:5]]) + (" …" if len(ids) > 5 else "")
            raise Diverged(
                f"round {round} diverged on {len(ids)} of {sum(len(call.ids) for call in calls)} clients ({names}); {ADVICE}, "
                'or run with clients="loop" to see the step'
            )


ADVICE = "try a smaller step size, less momentum or standardised features"


class Call(NamedTuple):
    """The clients of one compiled call and their rows."""

    ids: np.ndarray
    slots: int
    padding: Padding
    rows: Rows

    @property
    def padded_ids(self) -> np.ndarray:
        """`slots` indices, the first of them those of the clients."""
        return np.concatenate([self.ids, np.zeros(self.slots - len(self.ids), self.ids.dtype)]).astype(np.uint32)


def drawn(draw: np.random.Generator, everyone: np.ndarray, cohort: int) -> np.ndarray:
    """So many of them, without replacement, in order.

    >>> drawn(np.random.default_rng([0, 1]), np.arange(3), 3)
    array([0, 1, 2])
    """
    return np.sort(draw.choice(everyone, cohort, replace=False)) if cohort < len(everyone) else everyone


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


def group_width(state: Any, local: Any) -> int:
    """How many clients to run at once: many small networks fill a vector unit, large ones only leave the cache."""
    return max(1, min(64, CACHE // max(1, trees.size(state) + trees.size(local))))


def _restack(stacks: list[dict[str, Any]], ids: list[np.ndarray]) -> dict[str, Any]:
    """The Stack fields of all calls in the order of the clients' indices, without the padding."""
    if not stacks[0]:
        return {}
    order = np.argsort(np.concatenate(ids), kind="stable")
    cut = [jax.tree.map(lambda leaf, n=len(part): leaf[:n], stack) for stack, part in zip(stacks, ids, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *cut)
