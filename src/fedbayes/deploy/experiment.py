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

from fedbayes import keys, provenance, trees
from fedbayes.algorithm import Data
from fedbayes.cohort import AnyAlgorithm
from fedbayes.data.clients import Clients
from fedbayes.errors import UserError
from fedbayes.runs import describe, title


class SiteData(NamedTuple):
    """What a site has: rows to train on and rows to test on, or a silo's data; it never leaves the site."""

    train: Any
    test: Data | None = None


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
        stances: In which stances sites are scored at the end; none for structured models.
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
    stances: tuple[str, ...] = ("global", "personal", "adapted")

    def __post_init__(self) -> None:
        for name in ("rounds", "sites"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but it is at least 1")
        for name in ("cohort", "minimum"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= self.sites:
                raise UserError(f"{name} is {value}, but there are {self.sites} sites; give a number from 1 to that")
        if not self.patience > 0:
            raise UserError(f"patience is {self.patience}, but it is a number of seconds above 0")

    def __getstate__(self) -> dict[str, Any]:
        """For Flower's simulation, which copies a site's app to Ray's processes: all but the program, which cannot go there."""
        return {name: value for name, value in self.__dict__.items() if name != "_program"}

    @property
    def networked(self) -> bool:
        """Whether sites hold rows for a network, and not a silo's data for a structured model."""
        return isinstance(self.example, Data)

    def server(self) -> Any:
        """The server's state before round 1; it is not kept, as it may be large."""
        server_key, _ = keys.of_start(self.seed)
        given = () if self.networked else (self.example,)
        return trees.strong(self.algorithm.init_server(server_key, *given))

    def local(self, data: Any) -> Any:
        """What a site keeps before its first round."""
        rows = data
        if self.networked:  # as in the simulator, whatever the number of a client's rows
            rows = Data(jnp.zeros((1, *data.x.shape[1:]), data.x.dtype), jnp.zeros(1, data.y.dtype), jnp.ones(1, bool))
        return trees.strong(self.algorithm.init_local(keys.of_start(self.seed)[1], rows))

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
        told = [title(self.algorithm), describe(self.algorithm), self.seed, self.rounds, self.sites]
        settings = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return settings + provenance.digest(self._program[0])
