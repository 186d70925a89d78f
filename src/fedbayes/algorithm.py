"""The contract: what an algorithm is, what a client holds, and what may leave it.

An algorithm is one file under `algorithms/`: four NamedTuples (`Server`, `Local`, `Down`, `Up`) and a frozen dataclass of
hyper-parameters whose methods are pure functions of them. It is of one of two kinds, which declare all that the rest of
fedbayes needs to know of it: a `NetworkAlgorithm` trains a network over clients' rows, a `StructuredAlgorithm` fits a NumPyro
model over silos. The simulator, the wire, Flower and the evaluation are written against this page alone.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
import functools
import numbers
import operator
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes.errors import UserError
from fedbayes.models.beliefs import Beliefs
from fedbayes.models.likelihoods import Likelihood
from fedbayes.models.model import Model
from fedbayes.models.structured import Structured
from fedbayes.trees import Form, put_together, zeros_of
from fedbayes.trees import Params as Params


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

ServerT = TypeVar("ServerT")
LocalT = TypeVar("LocalT")
DownT = TypeVar("DownT")
UpT = TypeVar("UpT")
D = TypeVar("D")

FACTS = ("rounds", "clients", "rows", "silos", "form")
"""Facts known before a run: its rounds, how many clients or silos may train, all their rows, and the form of a silo's
data."""


def fact(name: str, needed_by: str | None = None) -> Any:
    """A field that is None until the run that the algorithm is planned for says it (see `Algorithm.planned`).

    With `needed_by` it stays None where that other field is empty: a run without a schedule can be extended.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Schedule:
    ...     rounds: int | None = fact("rounds")
    >>> plan(Schedule(), {"rounds": 10}), plan(Schedule(5), {"rounds": 10})
    (Schedule(rounds=10), Schedule(rounds=5))
    """
    if name not in FACTS:
        raise TypeError(f"there is no fact {name!r} of a run; there are {', '.join(FACTS)}")
    return dataclasses.field(
        default=None, metadata={"fact": name, "needed_by": needed_by, "limits": {} if name == "form" else {"least": 1}}
    )


class Lengths(tuple[float, ...]):
    """Candidates for how many steps `adapt` takes. Those that take equally many are tried together, as they end together."""


class OfPopulation(tuple[float, ...]):
    """Candidates for a property of the population, such as a prior's width: one value for all numbers of rows, and one that may
    lie between two candidates. All but the first are positive."""


def setting(default: Any, *others: str, which: str = "", choose: Any = (), **limits: float) -> Any:
    """A field with other choices beside its default, or limits for a number; `which` says what the number does.

    A setting of `adapt` that a federation may choose has candidates in `choose`: numbers, the first of which does not adapt at
    all; or, for settings inside a dataclass, a dict of such. See engine/choose.py.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Pull:
    ...     lam: float = setting(1.0, least=0, which="weighs a squared distance")
    >>> check_settings(Pull(-1.0))
    Traceback (most recent call last):
    fedbayes.errors.UserError: lam is -1.0, but it weighs a squared distance and must be at least 0
    """
    metadata = {"choices": (default, *others), "limits": limits, "which": which, "choose": choose}
    return dataclasses.field(default=default, metadata=metadata)


LIMITS = {"least": ("at least", operator.ge), "above": ("above", operator.gt), "most": ("at most", operator.le)}
LIMITS |= {"below": ("below", operator.lt)}


def check_settings(config: Any) -> None:
    """Refuse a value that its `setting` does not allow; an optional setting may be None."""
    for field in dataclasses.fields(config):
        value, limits = getattr(config, field.name), field.metadata.get("limits", {})
        choices, which = field.metadata.get("choices", ()), field.metadata.get("which")
        if len(choices) > 1 and value not in choices:
            raise UserError(f"{field.name} is {value!r}, but it is {', '.join(choices[:-1])} or {choices[-1]}")
        if value is not None and not all(LIMITS[name][1](value, limit) for name, limit in limits.items()):
            allowed = " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in limits.items())
            raise UserError(f"{field.name} is {value}, but it {f'{which} and must be' if which else 'is'} {allowed}")


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC, Generic[ServerT, LocalT, DownT, UpT]):
    """A frozen dataclass of hyper-parameters whose methods are pure functions of pytrees.

    The fields of `Up` declare how they are reduced: `Mean`, `Sum` or `Stack`. A field named `weight`, declared `Sum`, weighs
    the `Mean` fields; without one, or where it is None, every client counts the same. There is no side channel: what the server
    should see is a field of `Up`.
    """

    default_rounds: ClassVar[int] = 100
    """Rounds of a run that names none."""
    stops: ClassVar[bool] = False
    """True where a run may end before its last round, by `stopped`."""

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
    def client(self, key: PRNGKeyArray, down: DownT, local: LocalT, data: Any) -> tuple[UpT, LocalT]:
        """One client's round."""

    @abc.abstractmethod
    def server(self, key: PRNGKeyArray, server: ServerT, down: DownT, up: UpT) -> ServerT:
        """The next server state, from `Up` with each field reduced as declared."""

    @abc.abstractmethod
    def adapt(self, key: PRNGKeyArray, down: DownT, local: LocalT, data: Any) -> LocalT:
        """Fit a client that may never have trained; nothing is sent."""

    @abc.abstractmethod
    def predict(self, key: PRNGKeyArray, down: DownT, local: LocalT, x: Any) -> Any:
        """Posterior draws for rows, or for a silo's data."""

    def metrics(self, server: ServerT) -> dict[str, Float[Array, ""]]:
        """Scalars of the server's state that are logged after each round, such as a bound."""
        return {}

    def stopped(self, server: ServerT) -> Bool[Array, ""] | bool:
        """Whether more rounds would change nothing that counts."""
        return False

    @property
    def title(self) -> str:
        """The algorithm's name in results."""
        return type(self).__name__

    @property
    def up_type(self) -> type[Any]:
        """The class `Up` that the algorithm, or the kind it derives from, gives as a type parameter."""
        bases = [base for cls in type(self).__mro__ for base in vars(cls).get("__orig_bases__", ())]
        pairs = (zip(getattr(typing.get_origin(base), "__parameters__", ()), typing.get_args(base)) for base in bases)  # noqa: B905
        return next(given for pair in pairs for name, given in pair if name is UpT and isinstance(given, type))  # type: ignore[misc]

    def planned(self: D, rounds: int, **facts: Any) -> D:
        """The algorithm with each `fact` field that is None set to what the run says: its rounds, clients, rows, silos."""
        return plan(self, {"rounds": rounds, **facts})


@dataclasses.dataclass(frozen=True)
class NetworkAlgorithm(Algorithm[ServerT, LocalT, DownT, UpT]):
    """An algorithm that trains a network over clients. A client's data are rows, `Data`."""

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    published: ClassVar[Mapping[str, Any]] = {}
    """Settings of the paper's protocol that differ from the defaults."""

    @classmethod
    def paper(cls, model: Model, **settings: Any) -> Self:
        """The algorithm with the settings of its paper, where these are not given.

        >>> import fedbayes as fb
        >>> fb.FedPop.paper(fb.models.linear((2,), fb.models.Categorical(2)), personal=("head/bias",)).form
        'langevin'
        """
        return cls(model, **{**cls.published, **settings})

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            given = repr(self.model) if isinstance(self.model, str) else type(self.model).__name__
            name = self.model if isinstance(self.model, str) else "mlp"
            expected = f'fb.network("{name}", clients), or a module of your own through fb.models.from_flax or from_equinox'
            raise UserError(f"the model is {given}, but it is a network for the data: {expected}")
        check_settings(self)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood whose parameters `predict` draws."""
        return self.model.likelihood

    @property
    def has_global(self) -> bool:
        """True where `predict` with a fresh local state is a trained model: the global evaluation mode."""
        return True

    @abc.abstractmethod
    def predict(self, key: PRNGKeyArray, down: DownT, local: LocalT, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """S posterior draws of the likelihood's parameters."""

    @property
    def choices(self) -> dict[str, tuple[float, ...]]:
        """Settings of `adapt` that a federation may choose, by dotted name, with their candidates (`setting`)."""
        found: dict[str, tuple[float, ...]] = {}
        for field in dataclasses.fields(self):
            choose = field.metadata.get("choose", ())
            if isinstance(choose, Mapping):
                found |= {f"{field.name}.{name}": grid for name, grid in choose.items()}
            elif choose:
                found[field.name] = choose
        return found

    @property
    def deterministic(self) -> Self | None:
        """The same method without noise in its steps; None where they have none, or where it is not the same without."""
        return None

    def beliefs(self, down: DownT, local: LocalT) -> Beliefs:
        """The distributions over parameters that a client predicts and adapts with; by default there are none."""
        return Beliefs()

    def with_beliefs(self, down: DownT, local: LocalT, beliefs: Beliefs) -> tuple[DownT, LocalT]:
        """The states that hold these instead, where they are not None and not fixed."""
        return down, local

    def check_gibbs(self, down: DownT) -> None:
        """Refuse a run of which no PAC-Bayes bound holds; by default every run."""
        raise UserError(f"the run is {self.title}, but a certificate is for FedVI with bias=False and gamma=0; train one")

    def gibbs(self, key: PRNGKeyArray, down: DownT, rows: Data, draws: int) -> tuple[Float[Array, "m n k"], Float[Array, ""]]:
        """For a PAC-Bayes bound: outputs with a fresh draw of a newcomer's own parameters for each row, and KL(q ‖ prior)."""
        raise NotImplementedError


class LocalDraws(NamedTuple):
    """Draws from a silo's posterior on the real line, by chain; and which of them ended a trajectory that diverged."""

    z_G: Float[Array, "c s n"]  # noqa: N815
    z_L: dict[str, Float[Array, "c s blocks d"]]  # noqa: N815
    diverging: Bool[Array, "c s"]


@dataclasses.dataclass(frozen=True)
class StructuredAlgorithm(Algorithm[ServerT, LocalT, DownT, UpT]):
    """An algorithm that fits a NumPyro model over silos. A silo's data is what the model reads; draws come by site."""

    population: Callable[[], Any]
    """Samples what all silos share."""
    silo: Callable[[Any, Any], None]
    """Samples a silo's own latents and observes its data."""
    family: Any = None
    """Which posteriors are searched."""
    _: dataclasses.KW_ONLY
    rounds: int | None = fact("rounds")
    """Rounds of the run, over which schedules fall."""
    form: Form | None = fact("form")
    """The form of a silo's data, for θ that only `silo` names; by default that of the run's first silo."""
    samples: ClassVar[bool] = False
    """True where silos keep draws of their own latents, and `eta` is a summary of them."""
    starts_anywhere: ClassVar[bool] = False
    """True where a run may start from the fit of another method."""

    @property
    def structured(self) -> Structured:
        """The two functions as densities."""
        return Structured(self.population, self.silo)

    @property
    def example(self) -> Any:
        """Zeros in the form of a silo's data, for the shapes of θ; None where no run has said the form."""
        return None if self.form is None else zeros_of(self.form)

    def prepared(self, data: Any) -> Any:
        """A silo's data as the other methods take it, from the numbers in it and once: it stays where the data is."""
        return data

    def shared(self, server: ServerT) -> Any:
        """η_G and θ: the field `shared` of the server's state."""
        return server.shared  # type: ignore[attr-defined]

    def eta(self, local: LocalT, shared: Any) -> Any:
        """η_L, written with the μ_G of `shared`."""
        return local.eta  # type: ignore[attr-defined]

    def local_from(self, local: LocalT, eta: Any, shared: Any) -> LocalT:
        """A first local state at the η_L of another fit, written with the μ_G of `shared`."""
        return local._replace(eta=eta)  # type: ignore[attr-defined]

    def local_draws(self, key: PRNGKeyArray, down: DownT, local: LocalT, data: Any, count: int) -> LocalDraws:
        """Draws of (Z_G, Z_L) from a silo's own posterior."""
        raise NotImplementedError

    def factors(self, server: ServerT) -> Any:
        """Π_j t_j in q's coordinates, where q(Z_G) is a product of a factor for the prior and one for each silo; else None."""
        return None

    def health(self, server: ServerT, locals: dict[str, LocalT]) -> dict[str, Any]:
        """What the method says of its own state, for the verdict; nothing by default.

        `rhat` (the worst), `ess` (the least), `divergences` and `draws` of chains, `skew` and `kurtosis` (the largest absolute
        ones) of a silo's marginals of Z_G, `moved` and `noise` of q in standard deviations, `converged`, and `silos`, which has
        the same for each silo.
        """
        return {}


AnyAlgorithm = Algorithm[Any, Any, Any, Any]
AnyNetwork = NetworkAlgorithm[Any, Any, Any, Any]
AnyStructured = StructuredAlgorithm[Any, Any, Any, Any]


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def client_of(algorithm: AnyAlgorithm, form: Form, key: PRNGKeyArray, down: Any, local: Any, arrays: tuple[Array, ...]) -> Any:
    """`algorithm.client` on data that was taken apart: traced once for a form, whoever asks for its shapes or its program."""
    return algorithm.client(key, down, local, put_together(form, arrays))


def declared(up_type: type) -> dict[str, Reduce]:
    """The reduction of each field of `Up`, in the order of its fields.

    >>> from fedbayes.algorithms.fedbabu import Up
    >>> declared(Up)
    {'body': <Reduce.MEAN: 'mean'>, 'loss': <Reduce.MEAN: 'mean'>}
    """
    hints = typing.get_type_hints(up_type, include_extras=True)
    reductions = {}
    for field in up_type._fields:  # type: ignore[attr-defined]
        found = [note for note in getattr(hints[field], "__metadata__", ()) if isinstance(note, Reduce)]
        if len(found) != 1:
            raise TypeError(f"{up_type.__qualname__}.{field} must be declared Mean[…], Sum[…] or Stack[…]")
        reductions[field] = found[0]
    if reductions.get("weight", Reduce.SUM) is not Reduce.SUM:
        raise TypeError(f"{up_type.__qualname__}.weight weighs the Mean fields and must be declared Sum[…]")
    return reductions


WHOLE = (int, "int", "int | None")  # how a field that counts something is annotated


def plan(config: D, facts: dict[str, Any]) -> D:
    """A dataclass of settings with its `fact` fields set, those of the settings inside it too; what cannot be is refused."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if field.type in WHOLE and value is not None and not isinstance(value, numbers.Integral):
            raise UserError(f"{field.name} is {value!r}, but it is a whole number")
        if isinstance(value, numbers.Real) and value != value:
            raise UserError(f"{field.name} is nan, but it is a number; look where it was computed")
        needed_by = field.metadata.get("needed_by")
        if value is None and field.metadata.get("fact") in facts and (needed_by is None or getattr(config, needed_by)):
            changes[field.name] = facts[field.metadata["fact"]]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and (planned := plan(value, facts)) is not value:
            changes[field.name] = planned
    if not changes:
        return config
    with warnings.catch_warnings(action="ignore"):  # what they have to say was said when they were first made
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def settled(config: D, settings: Mapping[str, Any]) -> D:
    """A copy with other values of some settings, by dotted name; values may be traced, so none is checked.

    >>> from fedbayes.primitives.training import Training
    >>> settled(Training(), {"lr": 0.5}).lr
    0.5
    """
    changed = copy.copy(config)
    for name, value in settings.items():
        first, _, rest = name.partition(".")
        object.__setattr__(changed, first, settled(getattr(changed, first), {rest: value}) if rest else value)
    return changed
