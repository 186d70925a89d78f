"""The contract: what an algorithm is, what a client holds, and what may leave it.

An algorithm is one file under `algorithms/`: four NamedTuples (`Server`, `Local`, `Down`, `Up`) and a frozen dataclass of
hyper-parameters whose methods are pure functions of them. It is of one of two kinds, which declare all that the rest of
fedbayes needs to know of it: a `NetworkAlgorithm` trains a network over clients' rows, a `StructuredAlgorithm` fits a NumPyro
model over silos. The simulator, the wire, Flower and the evaluation are written against this page alone.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes.errors import UserError
from fedbayes.models.beliefs import Beliefs
from fedbayes.models.likelihoods import Likelihood
from fedbayes.models.model import Model
from fedbayes.models.structured import Structured
from fedbayes.settings import Lengths as Lengths
from fedbayes.settings import OfPopulation as OfPopulation
from fedbayes.settings import check_settings as check_settings
from fedbayes.settings import fact as fact
from fedbayes.settings import plan as plan
from fedbayes.settings import setting as setting
from fedbayes.settings import settled as settled
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


STILL = "not adapting"


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

    @property
    def labels_optional(self) -> bool:
        """True where `adapt` also takes rows whose labels are `unlabelled`."""
        return False

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

    @property
    def first_candidate(self) -> str:
        """The first candidate of `choices` in words; it is kept where none is ahead of it."""
        lr, steps = (next((grid[0] for at, grid in self.choices.items() if at.endswith(name)), 0) for name in (".lr", ".steps"))
        return f"{steps:g} steps of {lr:g}" if lr else STILL

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
