"""Rounds in one process: a cohort is one compiled call for each bucket of equally padded clients.

Clients of a bucket run in groups of `width` under `vmap`, group after group in a compiled loop that adds their uploads to a
running sum, so memory is that of one group. `clients="loop"` runs them one by one from Python with the same numbers, slower,
and says which client failed at which step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes import keys, reduce, trees
from fedbayes.algorithm import Algorithm, Data
from fedbayes.data.clients import Clients
from fedbayes.errors import UserError
from fedbayes.states import States

AnyAlgorithm = Algorithm[Any, Any, Any, Any]

MEMORY = 512 * 2**20
"""Bytes of rows and states that one compiled call may hold."""
ONE_LENGTH = 32 * 2**20
"""Bytes of a cohort's rows up to which all clients are padded to one length."""
CACHE = 2**18
"""Bytes of parameters that the clients of a vmapped group may hold together: what stays in a core's cache. See benchmarks/."""


class Bucket(NamedTuple):
    """Clients padded to the same lengths."""

    ids: np.ndarray
    train_length: int
    test_length: int


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
        found.append(Bucket(ids, max(1, int(data.train_counts[ids].max())), max(1, int(data.test_counts[ids].max()))))
    return found


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
        self.cohort = cohort_size(cohort, len(data.participants))
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}, but it is the share of a cohort that does not answer: at least 0, below 1")
        self.dropout = dropout
        self.buckets = buckets(data, self.cohort)
        server_key, local_key = keys.of_start(seed)
        self.state = _init_server(algorithm, server_key)
        self.fresh = jax.device_get(_init_local(algorithm, local_key))
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
        return _broadcast(self.algorithm, keys.of_round(self.seed, self.round + 1), self.state)

    def chosen(self, round: int) -> np.ndarray:
        """The clients of a round: drawn without replacement from the participants, less those that drop out."""
        draw = np.random.default_rng([self.seed, round])
        participants = self.data.participants
        ids = (
            np.sort(draw.choice(participants, self.cohort, replace=False)) if self.cohort < len(participants) else participants
        )
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
        state, metrics, fine = _server_step(self.algorithm, key, self.state, down, partial, stacks)
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
        """The rows of a cohort, bucket by bucket, in calls that fit the memory budget and always have the same shape."""
        for number, bucket in enumerate(self.buckets):
            members = ids[self._bucket_of[ids] == number]
            if not len(members):
                continue
            # Clients of like length share a group, so that a vmapped group wastes few steps on its shorter ones.
            members = members[np.argsort(self.data.train_counts[members], kind="stable")]
            slots = self.slots(len(bucket.ids), bucket.train_length)
            for start in range(0, len(members), slots):
                part = members[start : start + slots]
                yield Call(part, slots, self.data.train(part, bucket.train_length, slots))

    def slots(self, members: int, rows: int, cohort: int | None = None, state: int = 0) -> int:
        """How many clients a compiled call takes: the cohort where the memory budget allows, in whole groups."""
        row = int(np.prod(self.data.shape, dtype=int)) * self.data.x.dtype.itemsize + 8
        fit = max(1, self._memory // (rows * row + 2 * (trees.size(self.fresh) + state) + 1))
        wanted = min(self.cohort if cohort is None else cohort, members, fit)
        return -(-wanted // self.width) * self.width if self.mode == "vmap" else wanted

    def _run_vmap(self, key: PRNGKeyArray, down: Any, call: Call, round: int) -> Outcome:
        ids = np.zeros(call.slots, np.uint32)
        ids[: len(call.ids)] = call.ids
        local = self.local.get(call.ids, call.slots)
        return _cohort(self.algorithm, self.width, key, down, ids, np.int32(len(call.ids)), local, call.data)

    def _run_loop(self, key: PRNGKeyArray, down: Any, call: Call, round: int) -> Outcome:
        local = self.local.get(call.ids)
        partial, ups, locals_ = None, [], []
        for place, client in enumerate(call.ids):
            one = jax.tree.map(lambda leaf, place=place: leaf[place], (local, call.data))
            name = str(self.data.names[client])
            try:
                error, (up, new) = _one_client(self.algorithm, keys.fold(key, np.uint32(client)), down, *one)
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
    """The input of one compiled call."""

    ids: np.ndarray
    slots: int
    data: Data


class Outcome(NamedTuple):
    """The output of one: the running sum, the stacked fields, the new states, and whose numbers are finite."""

    partial: reduce.Partial
    stacks: dict[str, Any]
    local: Any
    fine: Array


def cohort_size(cohort: int | float | None, population: int) -> int:
    """A number of clients, or a share of them, checked against how many there are.

    >>> cohort_size(0.1, 100), cohort_size(None, 7)
    (10, 7)
    """
    if population == 0:
        raise UserError("no client is left to train: all are held out; hold out fewer")
    if cohort is None:
        return population
    size = round(cohort * population) if isinstance(cohort, float) and cohort <= 1 else int(cohort)
    if size > population:
        raise UserError(f"the cohort is {size} clients a round, but only {population} take part; choose at most that many")
    if size < 1:
        raise UserError(f"the cohort is {cohort}, but a round needs at least one client")
    return size


def group_width(state: Any, local: Any) -> int:
    """How many clients to run at once: many small networks fill a vector unit, large ones only leave the cache."""
    return max(1, min(64, CACHE // max(1, trees.size(state) + trees.size(local))))


@functools.partial(jax.jit, static_argnums=0)
def _init_server(algorithm: AnyAlgorithm, key: PRNGKeyArray) -> Any:
    return algorithm.init_server(key)


@functools.partial(jax.jit, static_argnums=0)
def _init_local(algorithm: AnyAlgorithm, key: PRNGKeyArray) -> Any:
    return algorithm.init_local(key)


@functools.partial(jax.jit, static_argnums=0)
def _broadcast(algorithm: AnyAlgorithm, key: PRNGKeyArray, server: Any) -> Any:
    return algorithm.broadcast(keys.fold(key, np.uint32(keys.BROADCAST)), server)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cohort(
    algorithm: AnyAlgorithm,
    width: int,
    key: PRNGKeyArray,
    down: Any,
    ids: Int[Array, " slots"],
    count: Int[Array, ""],
    local: Any,
    data: Data,
) -> Outcome:
    def one(id: Any, local: Any, data: Data) -> tuple[Any, Any, Any]:
        up, new = algorithm.client(keys.fold(key, id), down, local, data)
        return up, new, trees.finite((up, new))

    up_shape, _, _ = jax.eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], (ids, local, data)))
    slots = ids.shape[0]
    stacks = {
        name: jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), value)
        for name, value in reduce.stacked(up_shape).items()
    }
    start = Outcome(reduce.empty(up_shape), stacks, local, jnp.ones(slots, bool))

    def group(number: Any, done: Outcome) -> Outcome:
        place = number * width
        chosen = slice_of((ids, done.local, data), place, width)
        ups, new, fine = each(one, width)(*chosen)
        present = (place + jnp.arange(width) < count).astype(jnp.float32)
        return Outcome(
            reduce.add(done.partial, ups, present),
            put_back(done.stacks, reduce.stacked(ups), place),
            put_back(done.local, new, place),
            put_back(done.fine, fine, place),
        )

    return jax.lax.fori_loop(0, (count + width - 1) // width, group, start)


def each(function: Callable[..., Any], width: int) -> Callable[..., Any]:
    """`vmap` over a group; a group of one is not mapped, so that its loops end when the client does."""
    if width > 1:
        return jax.vmap(function)

    def alone(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], arguments)))

    return alone


def for_each(function: Callable[..., Any], width: int, count: Int[Array, ""], *arguments: Any) -> Any:
    """`function` of the first `count` entries of the arguments, stacked, group after group; what lies beyond is zeros."""
    slots = jax.tree.leaves(arguments)[0].shape[0]
    shapes = jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], arguments))
    start = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), shapes)

    def group(number: Any, done: Any) -> Any:
        place = number * width
        return put_back(done, each(function, width)(*slice_of(arguments, place, width)), place)

    return jax.lax.fori_loop(0, (count + width - 1) // width, group, start)


def slice_of(tree: Any, place: Any, width: int) -> Any:
    """`width` entries of each leaf's first axis, from a place that may be traced."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, place, width), tree)


def put_back(tree: Any, part: Any, place: Any) -> Any:
    """The inverse of `slice_of`."""
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, place, 0), tree, part)


@functools.partial(jax.jit, static_argnums=0)
def _one_client(algorithm: AnyAlgorithm, key: PRNGKeyArray, down: Any, local: Any, data: Data) -> Any:
    def run() -> Any:
        up, new = algorithm.client(key, down, local, data)
        checkify.debug_check(trees.finite((up, new)), "the upload or the client's state is not finite")
        return up, new

    return checkify.checkify(run)()


@functools.partial(jax.jit, static_argnums=0)
def _server_step(
    algorithm: AnyAlgorithm, key: PRNGKeyArray, server: Any, down: Any, partial: reduce.Partial, stacks: dict[str, Any]
) -> tuple[Any, dict[str, Float[Array, ""]], Any]:
    up_type = up_of(algorithm)
    up = reduce.finish(up_type, partial, stacks)
    state = algorithm.server(keys.fold(key, np.uint32(keys.SERVER)), server, down, up)
    scalars = {name: value for name, value in trees.named(up).items() if value.ndim == 0 and name in up_type._fields}
    return state, scalars, trees.finite(state)


def up_of(algorithm: AnyAlgorithm) -> Any:
    """The class `Up` that the algorithm names as the last of its type parameters."""
    for base in type(algorithm).__orig_bases__:  # type: ignore[attr-defined]
        if getattr(base, "__origin__", None) is Algorithm:
            return base.__args__[3]
    raise TypeError(f"{type(algorithm).__name__} must derive from Algorithm[Server, Local, Down, Up]")


def _restack(stacks: list[dict[str, Any]], ids: list[np.ndarray]) -> dict[str, Any]:
    """The Stack fields of all calls in the order of the clients' indices, without the padding."""
    if not stacks[0]:
        return {}
    order = np.argsort(np.concatenate(ids), kind="stable")
    cut = [jax.tree.map(lambda leaf, n=len(part): leaf[:n], stack) for stack, part in zip(stacks, ids, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *cut)
