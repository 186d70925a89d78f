"""What the server and every site of a deployment agree on: the algorithm, the shapes of its messages, and how rounds go."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes import trees, wire
from fedbayes.algorithm import AnyAlgorithm, AnyNetwork, AnyStructured, Data, NetworkAlgorithm, StructuredAlgorithm, plan
from fedbayes.algorithms.evidence import Evidence
from fedbayes.data.clients import Clients
from fedbayes.engine import keys
from fedbayes.engine import round as steps
from fedbayes.engine.choose import MOST, QUERY, REPEATS, SIZES, Choosing, Plan
from fedbayes.engine.choose import Up as Scores
from fedbayes.engine.clients import fresh_state
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import modes_of
from fedbayes.results.folder import describe
from fedbayes.results.verdict import Correct
from fedbayes.wire import provenance


class SiteData(NamedTuple):
    """What a site has: rows to train on and rows to test on, or a silo's data; it never leaves the site."""

    train: Any
    test: Data | None = None


class Final(NamedTuple):
    """The last broadcast of a run, and the settings of `adapt` that were chosen, if any."""

    down: Any
    choice: Float[Array | np.ndarray, "sizes names"] | None


def example_rows(shape: tuple[int, ...], dtype: str = "float32", labels: str = "int32") -> Data:
    """Rows of that shape, for an experiment's `example`."""
    return Data(jnp.zeros((2, *shape), dtype), jnp.zeros(2, labels), jnp.ones(2, bool))


def site_rows(clients: Clients, name: str | None = None) -> SiteData:
    """The training and test rows of one client, by default of the only one.

    >>> import fedbayes as fb
    >>> site_rows(fb.data.load("digits", partition="iid", clients=3), "1").train.x.shape[1:]
    (64,)
    """
    if name is None and len(clients) != 1:
        raise UserError(f"{clients} has {len(clients)} clients; say which one this site is")
    place = 0 if name is None else clients.index(name)
    counts = ((clients.train, clients.train_counts), (clients.test, clients.test_counts))
    parts = [jax.tree.map(lambda leaf: np.asarray(leaf[0]), part([place], int(count[place]))) for part, count in counts]
    return SiteData(parts[0], parts[1] if len(parts[1].y) else None)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A federated run: the same object at the server and at every site.

    Args:
        algorithm: Any registered algorithm, with its facts planned (`algorithm.planned(rounds, …)`).
        example: One site's training data as far as shapes go: `Data`, or a silo's data; numbers in it do not matter.
        load: At a site, from its own settings to its data. It is not called at the server.
        rounds: How many rounds.
        sites: How many sites there are; each has a number from 0 on.
        seed: Of everything that is random.
        cohort: Sites in a round; all by default.
        minimum: Fewest sites whose answers make a round; by default all of its cohort.
        patience: Seconds that a round waits for its sites.
        norm: Largest Euclidean norm of an upload; without one, any finite upload is taken.
        weight: Largest weight of an upload, such as the most rows that a site may have.
        modes: In which modes sites are scored at the end; by default all that the algorithm has, none for structured models.
        choose: Let the sites choose settings of `adapt`, as in `fedbayes.simulate`; for networks.
        correct: Of a structured model, whether evidence rounds may correct what silos share, as in `fedbayes.simulate`.
    """

    algorithm: AnyAlgorithm
    example: Any
    load: Callable[[Mapping[str, Any]], SiteData]
    rounds: int
    sites: int
    seed: int = 0
    cohort: int | None = None
    minimum: int | None = None
    patience: float = 600.0
    norm: float | None = None
    weight: float | None = None
    modes: tuple[str, ...] | None = None
    choose: bool = True
    correct: Correct = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", plan(self.algorithm, {"form": trees.take_apart(self.example)[0]}))
        for name in ("rounds", "sites"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but it is at least 1")
        for name in ("cohort", "minimum"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= self.sites:
                raise UserError(f"{name} is {value}, but there are {self.sites} sites; give a number from 1 to that")
        if self.networked:
            object.__setattr__(self, "modes", modes_of(self.network, self.modes))
        if not self.patience > 0:
            raise UserError(f"patience is {self.patience}, but it is a number of seconds above 0")

    def __getstate__(self) -> dict[str, Any]:
        """For Flower's simulation, which copies a site's app to Ray's processes: all but the program, which cannot go there."""
        return {name: value for name, value in self.__dict__.items() if name != "_program"}

    @property
    def networked(self) -> bool:
        """Whether sites hold rows for a network, and not a silo's data for a structured model."""
        return isinstance(self.algorithm, NetworkAlgorithm)

    @property
    def scored(self) -> tuple[str, ...]:
        """The modes in which sites are scored."""
        return (self.modes or ()) if self.networked else ()

    @property
    def network(self) -> AnyNetwork:
        """The algorithm, where it trains a network."""
        if not isinstance(self.algorithm, NetworkAlgorithm):
            raise UserError(f"{self.algorithm.title} fits a structured model; this is for networks")
        return self.algorithm

    def prepared(self, data: SiteData) -> SiteData:
        """A site's data as its algorithm takes it."""
        return (
            data._replace(train=self.algorithm.prepared(data.train))
            if isinstance(self.algorithm, StructuredAlgorithm)
            else data
        )

    @property
    def structured(self) -> AnyStructured:
        """The algorithm, where it fits a structured model."""
        if not isinstance(self.algorithm, StructuredAlgorithm):
            raise UserError(f"{self.algorithm.title} trains a network; this is for structured models")
        return self.algorithm

    @property
    def evidence(self) -> Evidence:
        """What sites are asked after the last round of a structured model."""
        return Evidence(self.structured)

    @functools.cached_property
    def evidence_down(self) -> Any:
        """The shapes of what an evidence round sends to sites."""
        return jax.eval_shape(lambda: self.evidence.broadcast(jax.random.key(0), self.evidence.init_server(jax.random.key(0))))

    @property
    def evidence_up(self) -> Any:
        """The shapes of what sites answer in one."""
        return self.evidence.up_shapes(self.evidence_down.shared.eta.mean.dtype)

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The sites that join the training late, after they have scored candidates for settings of `adapt`."""
        if not self.choose or not self.networked:
            return None
        return Plan.of(self.network, self.seed, np.arange(self.sites), self.rounds)

    @property
    def choosing(self) -> Choosing:
        """What these sites are asked."""
        return Choosing(self.network, REPEATS if self.plan is None else self.plan.repeats)

    @functools.cached_property
    def choosing_up(self) -> Any:
        """The shapes of what they answer."""
        count = len(self.choosing.settings.values)
        each, rows = jax.ShapeDtypeStruct((len(SIZES), count), jnp.float32), jax.ShapeDtypeStruct((len(SIZES),), jnp.float32)
        return Scores(each, each, rows)  # type: ignore[arg-type]

    def received(self, kind: str) -> Any:
        """The shapes of what a site is sent with a request."""
        if kind == "evidence":
            return self.evidence_down
        if kind == "score" and self.plan is not None:
            shape = (len(SIZES), len(self.choosing.settings.names))
            return Final(self.down, jax.ShapeDtypeStruct(shape, jnp.float32))  # type: ignore[arg-type]
        return Final(self.down, None) if kind == "score" else self.down

    def manifests(self) -> list[list[wire.Leaf]]:
        """What crosses in a round, for networks in a choosing round, and for structured models in an evidence round."""
        rounds: list[AnyAlgorithm] = [self.algorithm]
        rounds += [self.choosing] if self.plan is not None else [] if self.networked else [self.evidence]
        return [wire.manifest(one, self.example) for one in rounds]

    def server(self) -> Any:
        """The server's state before round 1; it is not kept, as it may be large."""
        server_key, _ = keys.of_start(self.seed)
        return steps.init_server(self.algorithm, server_key)

    def local(self, data: Any) -> Any:
        """What a site keeps before its first round."""
        _, key = keys.of_start(self.seed)
        if self.networked:  # as in the simulator, whatever the number of a client's rows
            return fresh_state(self.network, key, data.x.shape[1:], data.x.dtype, data.y.dtype)
        form, arrays = trees.take_apart(data)
        return steps.init_local(self.algorithm, form, key, arrays)

    @functools.cached_property
    def down(self) -> Any:
        """The shapes of `Down`."""
        return jax.eval_shape(lambda: self.algorithm.broadcast(keys.of_round(self.seed, 1), self.server()))

    @functools.cached_property
    def _program(self) -> tuple[Any, Any]:
        """A client's round on the example as a program, and the shapes of what it sends."""
        arrays, whole = trees.arrays_of(self.example)
        local = jax.eval_shape(lambda: self.local(self.example))
        key = jax.eval_shape(lambda: jax.random.key(0))

        def client(key: Any, down: Any, local: Any, given: Any) -> Any:
            return self.algorithm.client(key, down, local, whole(given))[0]

        given = (key, self.down, local, arrays)
        if not self.networked:
            # What a structured model finds out about itself is a part of its first trace; another function, as JAX keeps
            # traces.
            jax.eval_shape(lambda *given: client(*given), *given)
        return jax.make_jaxpr(client, return_shape=True)(*given)

    @property
    def up(self) -> Any:
        """The shapes of `Up`."""
        return self._program[1]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of what both sides have to agree on: the algorithm's settings, and a client's round as a program."""
        told = [self.algorithm.title, describe(self.algorithm), self.seed, self.rounds, self.sites]
        told += [False] if self.networked and not self.choose else []
        told += [] if self.plan is None else [self.choosing.settings, SIZES, self.choosing.repeats, MOST, QUERY]
        told += [] if self.networked else [self.evidence.points, self.evidence.inner]
        settings = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return settings + provenance.digest(self._program[0])
