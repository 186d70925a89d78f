"""Rounds in one process: a cohort is one compiled call for each bucket of equally padded clients.

Clients of a bucket run in groups of `width` under `vmap`, group after group in a compiled loop that adds their uploads to a
running sum, so memory is that of one group. `clients="loop"` runs them one by one from Python with the same numbers, slower,
and says which client failed at which step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import AnyAlgorithm, AnyNetwork, Data
from fedbayes.data.clients import Clients
from fedbayes.engine import keys, reduce
from fedbayes.engine import round as steps
from fedbayes.engine.choose import Choice, Choosing, Chosen, Plan, decided
from fedbayes.engine.cohort import CohortResult, FlatRows, Padding, group_width, run_client, run_cohort
from fedbayes.engine.local_state import States
from fedbayes.engine.round import ADVICE, Diverged, Round
from fedbayes.errors import UserError

MEMORY = 512 * 2**20  # bytes of rows and states that one compiled call may hold
RESIDENT = 256 * 2**20  # bytes of a data set up to which all its rows lie on the device for the whole run
ONE_LENGTH = 32 * 2**20  # bytes of a cohort's rows up to which all clients are padded to one length


class Bucket(NamedTuple):
    """Clients padded to the same lengths."""

    ids: np.ndarray
    train: Padding
    test: Padding


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
        plan: Participants that do not train until settings of `adapt` are chosen (`choose.py`).

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits")
    >>> simulation = fb.Simulation(fb.FedAvg(fb.network("mlp", clients)), clients, cohort=5)
    >>> simulation.step().round
    1
    """

    def __init__(
        self,
        algorithm: AnyNetwork,
        data: Clients,
        *,
        cohort: int | float | None = None,
        seed: int = 0,
        dropout: float = 0.0,
        clients: Literal["vmap", "loop"] = "vmap",
        width: int | None = None,
        memory: int = MEMORY,
        folder: Path | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.algorithm, self.data, self.seed, self.backend = algorithm, data, steps.checked_seed(seed), clients
        if clients not in ("vmap", "loop"):
            raise UserError(f"clients is {clients!r}, but it is how they run: 'vmap' or 'loop'")
        self.cohort = steps.cohort_size(cohort, len(data.participants))
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}, but it is the share of a cohort that does not answer: at least 0, below 1")
        self.dropout = dropout
        self.buckets = buckets(data, self.cohort)
        server_key, local_key = keys.of_start(seed)
        self.state = steps.init_server(algorithm, server_key)
        self.fresh = jax.device_get(fresh_state(algorithm, local_key, data.shape, data.x.dtype, data.y.dtype))
        self.round, self.plan = 0, plan
        self.choice: Choice | None = None
        self.local: States[Any] = States(self.fresh, len(data), folder)
        self.width = width or group_width(trees.size((self.state, self.fresh)))
        self._memory = memory
        self._bucket_of = np.zeros(len(data), np.int8)
        for number, bucket in enumerate(self.buckets):
            self._bucket_of[bucket.ids] = number
        self._participants = data.participants
        self._ahead: tuple[int, list[Call]] | None = None

    def down(self) -> Any:
        """What the clients of the next round receive, and what everyone predicts with now."""
        return steps.broadcast(self.algorithm, keys.of_round(self.seed, self.round + 1), self.state)

    def chosen(self, round: int) -> np.ndarray:
        """The clients of a round: drawn without replacement from the participants, less those that drop out."""
        everyone = self._participants if self.plan is None else self.plan.training(round, self._participants)
        return steps.take_part(self.seed, round, everyone, min(self.cohort, len(everyone)), dropout=self.dropout)

    def advance(self, rounds: int) -> Iterator[Round]:
        """Run some rounds, one after the other."""
        for _ in range(rounds):
            yield self.step()

    def step(self) -> Round:
        """Run one round. If it diverges, raise `Diverged` and stay at the round before."""
        started, round = time.perf_counter(), self.round + 1
        key = keys.of_round(self.seed, round)
        down = steps.broadcast(self.algorithm, key, self.state)
        ahead, self._ahead = self._ahead, None
        calls = ahead[1] if ahead is not None and ahead[0] == round else list(self._gather(self.chosen(round)))
        if self.backend == "loop":
            outcomes = [self._run_loop(key, down, call, round) for call in calls]
        else:
            outcomes = [self._run_vmap(self.algorithm, key, down, call) for call in calls]
        if self.backend == "vmap":
            self._ahead = (round + 1, list(self._gather(self.chosen(round + 1))))  # while the devices are busy
        state, metrics, fine = self._close(self.algorithm, key, down, outcomes, calls)
        self._check(outcomes, calls, round)  # waits for the devices, so it comes after all that they are given to do
        if not fine:
            raise Diverged(f"round {round}: the server's state is no longer finite although every upload was; {ADVICE}")
        for call, outcome in zip(calls, outcomes, strict=True):
            self.local.put(call.ids, outcome.local, round)
        self.state, self.round = state, round
        ids = np.concatenate([call.ids for call in calls])
        trace = {name: np.asarray(value)[None] for name, value in metrics.items()}
        return Round(round, ids, trace, time.perf_counter() - started)

    def choose(self) -> Chosen:
        """Let the plan's newcomers score candidates, and keep the choice."""
        assert self.plan is not None
        choosing, key, down = Choosing(self.algorithm, self.plan.repeats), keys.of_round(self.seed, self.round), self.down()
        calls = list(self._gather(self.plan.newcomers))
        # Newcomers one by one: the candidates of one fill a group, and loops then end with its own rows.
        outcomes = [self._run_vmap(choosing, key, down, call, width=1) for call in calls]
        told = self._close(choosing, key, down, outcomes, calls).state
        found = decided(self.algorithm, told, self.plan.repeats, len(self.plan.newcomers))
        self.choice = found.choice
        return found

    def _close(
        self, algorithm: AnyAlgorithm, key: PRNGKeyArray, down: Any, outcomes: list[CohortResult], calls: list[Call]
    ) -> steps.Closed:
        partial = functools.reduce(reduce.combine, [outcome.partial for outcome in outcomes])
        stacks = _restack([outcome.stacks for outcome in outcomes], [call.ids for call in calls])
        return steps.close(algorithm, key, self.state, down, partial, stacks)

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
        counts[: len(ids)] = (self.data.train_counts if part == "train" else self.data.test_counts)[ids]
        if self._resident is not None:
            starts[: len(ids)] = self.data.offsets[ids] + (0 if part == "train" else self.data.train_counts[ids])
            return Call(ids, slots, padding, FlatRows(*self._resident, starts, counts))
        gather = self.data.train if part == "train" else self.data.test
        x, y, _ = gather(ids, padding.length, slots)
        starts[:] = np.arange(slots) * padding.length
        return Call(ids, slots, padding, FlatRows(x.reshape(-1, *x.shape[2:]), y.reshape(-1), starts, counts))

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
        return -(-wanted // self.width) * self.width if self.backend == "vmap" else wanted

    def _run_vmap(
        self, algorithm: AnyAlgorithm, key: PRNGKeyArray, down: Any, call: Call, width: int | None = None
    ) -> CohortResult:
        local, width = self.local.get(call.ids, call.slots), width or self.width
        count = np.int32(len(call.ids))
        return run_cohort(algorithm, width, call.padding, key, down, call.padded_ids, count, local, call.rows)

    def _run_loop(self, key: PRNGKeyArray, down: Any, call: Call, round: int) -> CohortResult:
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
            partial = steps.accumulate(reduce.empty(up) if partial is None else partial, up)
            ups.append(reduce.stacked(up))
            locals_.append(new)
        assert partial is not None
        return CohortResult(partial, steps.stack(ups), steps.stack(locals_), jnp.ones(len(call.ids), bool))

    def _check(self, outcomes: list[CohortResult], calls: list[Call], round: int) -> None:
        bad = [call.ids[~np.asarray(outcome.fine)[: len(call.ids)]] for call, outcome in zip(calls, outcomes, strict=True)]
        ids = np.concatenate(bad)
        if len(ids):
            names = ", ".join(str(name) for name in self.data.names[ids[:5]]) + (" …" if len(ids) > 5 else "")
            where = f"{len(ids)} of {sum(len(call.ids) for call in calls)} clients ({names})"
            raise Diverged(f'round {round} diverged on {where}; {ADVICE}, or run with clients="loop" to see the step')


class Call(NamedTuple):
    """The clients of one compiled call and their rows."""

    ids: np.ndarray
    slots: int
    padding: Padding
    rows: FlatRows

    @property
    def padded_ids(self) -> np.ndarray:
        """`slots` indices, the first of them those of the clients."""
        return np.concatenate([self.ids, np.zeros(self.slots - len(self.ids), self.ids.dtype)]).astype(np.uint32)


def fresh_state(algorithm: AnyNetwork, key: PRNGKeyArray, shape: tuple[int, ...], x: Any, y: Any) -> Any:
    """What every client starts from: `init_local` of one row, whatever the number of the client's own."""
    form, arrays = trees.take_apart(Data(jnp.zeros((1, *shape), x), jnp.zeros(1, y), jnp.ones(1, bool)))
    return steps.init_local(algorithm, form, key, arrays)


def _restack(stacks: list[dict[str, Any]], ids: list[np.ndarray]) -> dict[str, Any]:
    """The Stack fields of all calls in the order of the clients' indices, without the padding."""
    if not stacks[0]:
        return {}
    order = np.argsort(np.concatenate(ids), kind="stable")
    cut = [jax.tree.map(lambda leaf, n=len(part): leaf[:n], stack) for stack, part in zip(stacks, ids, strict=True)]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *cut)
