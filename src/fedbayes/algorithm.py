"""The contract: what an algorithm is, what a client holds, and what may leave it.

An algorithm is one file under `algorithms/`: four NamedTuples (`Server`, `Local`, `Down`, `Up`) and a frozen dataclass of
hyper-parameters whose methods are pure functions of them. Everything else in fedbayes (the simulator, the wire, Flower,
evaluation) is written against this page alone.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import numbers
import warnings
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes.errors import UserError


class Data(NamedTuple):
    """One client's rows, padded to a length that several clients share.

    Rows whose mask is False do not exist: nothing that an algorithm computes may depend on them.
    """

    x: Shaped[Array, "n ..."]
    y: Shaped[Array, " n"]
    mask: Bool[Array, " n"]


class Reduce(enum.Enum):
    """What the server may learn of one field of `Up`."""

    MEAN = "mean"  # sum_i weight_i x_i / sum_i weight_i: a secure sum is enough
    SUM = "sum"  # sum_i x_i: a secure sum is enough
    STACK = "stack"  # every x_i apart: the server sees individuals


T = TypeVar("T")
Mean = Annotated[T, Reduce.MEAN]
Sum = Annotated[T, Reduce.SUM]
Stack = Annotated[T, Reduce.STACK]

Params = Any
"""A pytree of arrays, as a network's `init` returns it: nested dicts of named arrays."""

ServerT = TypeVar("ServerT")
LocalT = TypeVar("LocalT")
DownT = TypeVar("DownT")
UpT = TypeVar("UpT")
D = TypeVar("D")


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC, Generic[ServerT, LocalT, DownT, UpT]):
    """A frozen dataclass of hyper-parameters whose methods are pure functions of pytrees.

    The fields of `Up` declare how they are reduced: `Mean`, `Sum` or `Stack`. A field named `weight`, declared `Sum`, weighs
    the `Mean` fields; without one, every client counts the same. There is no side channel: what the server should see is a
    field of `Up`.
    """

    @abc.abstractmethod
    def init_server(self, key: PRNGKeyArray) -> ServerT:
        """The server's state before round 1."""

    @abc.abstractmethod
    def init_local(self, key: PRNGKeyArray, data: Any) -> LocalT:
        """What a client keeps; never sent. Only the data's shapes may matter: they may call for latents of the client's own."""

    @abc.abstractmethod
    def broadcast(self, key: PRNGKeyArray, server: ServerT) -> DownT:
        """What every client of the round receives."""

    @abc.abstractmethod
    def client(self, key: PRNGKeyArray, down: DownT, local: LocalT, data: Data) -> tuple[UpT, LocalT]:
        """One client's round."""

    @abc.abstractmethod
    def server(self, key: PRNGKeyArray, server: ServerT, down: DownT, up: UpT) -> ServerT:
        """The next server state, from `Up` with each field reduced as declared."""

    @abc.abstractmethod
    def adapt(self, key: PRNGKeyArray, down: DownT, local: LocalT, data: Data) -> LocalT:
        """Fit a client that may never have trained; nothing is sent."""

    @abc.abstractmethod
    def predict(self, key: PRNGKeyArray, down: DownT, local: LocalT, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """S posterior draws of the likelihood's parameters."""

    def planned(self: D, rounds: int, **facts: int) -> D:
        """This algorithm with every field `rounds` that is None, such as a schedule's length, set to the rounds of the run.

        So are other facts of a run that are known before it, such as how many silos there are.
        """
        return _planned(self, {"rounds": rounds, **facts})


WHOLE = (int, "int", "int | None")
"""How a field that counts something is annotated."""


def _planned(config: D, facts: dict[str, int]) -> D:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.type in WHOLE and value is not None and not isinstance(value, numbers.Integral):
            raise UserError(f"{field.name} is {value!r}, but it is a whole number")
        if isinstance(value, numbers.Real) and value != value:
            raise UserError(f"{field.name} is nan, but it is a number; look where it was computed")
        if field.name in facts and value is None:
            changes[field.name] = facts[field.name]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            planned = _planned(value, facts)
            if planned is not value:
                changes[field.name] = planned
    if not changes:
        return config
    with warnings.catch_warnings(action="ignore"):  # what they have to say was said when they were first made
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
