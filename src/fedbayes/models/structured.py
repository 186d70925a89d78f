"""A NumPyro model in two functions: what `population()` samples is global, what `silo(population, data)` samples stays there.

Z_G ~ p_θ(Z_G),   Z_L | Z_G ~ p_θ(Z_L | Z_G),   y | Z_G, Z_L ~ p_θ(y | Z_L, Z_G)          (SFVI, equations 1–3)

Both are read with NumPyro's own handlers. Latents are vectors on the real line here: constrained ones go through NumPyro's
bijections, and each log density has the log-Jacobian of its own latents, once. `numpyro.param` gives θ. Sites in a plate
of a silo are independent between its elements given Z_G and the silo's other latents, so they form one block an element.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Container
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform

from fedbayes.errors import UserError
from fedbayes.trees import other_peoples_code

Values = dict[str, Any]
T = TypeVar("T")


class Plate(NamedTuple):
    """The outermost plate that a site lies in; its elements are the blocks."""

    name: str
    size: int
    """Elements in one evaluation; fewer than `total` where the plate is subsampled."""
    dim: int
    total: int

    @property
    def scale(self) -> float:
        """What one element that was drawn stands for."""
        return self.total / self.size


NO_PLATE = Plate("", 1, 0, 1)


class Latent(NamedTuple):
    """One latent site: how it is laid out on the real line."""

    name: str
    plate: Plate
    transform: Transform
    shape: tuple[int, ...]
    """Of the unconstrained value."""

    @property
    def width(self) -> int:
        """Numbers in one block."""
        return math.prod(self.shape) // self.plate.size


@dataclasses.dataclass(frozen=True)
class Structured:
    """A population and its silos.

    >>> import numpyro, numpyro.distributions as dist
    >>> def population():
    ...     return numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("spread", dist.HalfNormal(1))
    >>> def silo(population, data):
    ...     with numpyro.plate("rows", len(data["y"])):
    ...         effect = numpyro.sample("effect", dist.Normal(*population))
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=data["y"])
    >>> model = Structured(population, silo)
    >>> [latent.name for latent in model.global_latents()], model.size()
    (['mean', 'spread'], 2)
    >>> [(latent.name, latent.plate.size, latent.width) for latent in model.local_latents({"y": jnp.zeros(3)})]
    [('effect', 3, 1)]
    """

    population: Callable[[], Any]
    """Samples what all silos share and returns what `silo` needs of it."""
    silo: Callable[[Any, Any], None]
    """Given what `population` returned and a silo's data: samples its own latents and observes its data."""

    def __post_init__(self) -> None:
        if inspect.signature(self.population).parameters:
            raise UserError(
                f"population takes {', '.join(inspect.signature(self.population).parameters)}, but it must not read data: "
                "what depends on a silo's data belongs in silo(population, data)"
            )

    def global_latents(self) -> list[Latent]:
        """The latents of the population, in the order in which they are sampled; a plate has no meaning for them."""
        return [latent._replace(plate=NO_PLATE) for latent in _latents(_trace(self.population, {}, {}), "population")]

    def local_latents(self, data: Any, indices: Values | None = None) -> list[Latent]:
        """The latents of a silo, in the order in which they are sampled."""
        trace = self._silo_trace(indices or {}, self._population_value({}, {}), {}, data)
        found = _latents(trace, "silo")
        if both := {latent.name for latent in found} & {latent.name for latent in self.global_latents()}:
            raise UserError(f"{', '.join(sorted(both))} is sampled in population and in silo; give the silo's another name")
        if not any(_observed(site) for site in trace.values()):
            raise UserError("silo observes nothing: sample at least one site with obs=data[…]")
        return found

    def size(self) -> int:
        """n_G, the length of Z_G."""
        return _remember(self, "size", None, lambda: sum(latent.width for latent in self.global_latents()))

    def theta(self, data: Any = None) -> Values:
        """θ at its start, unconstrained: every `numpyro.param`; those of `silo` are found where a silo's data is given."""
        traces = [_trace(self.population, {}, {})]
        if data is not None:
            traces.append(self._silo_trace({}, self._population_value({}, {}), {}, data))
        return _theta_of(*traces)

    def plates(self, data: Any) -> dict[str, Plate]:
        """The outermost plates of a silo's sites; "" is no plate."""

        def find() -> dict[str, Plate]:
            trace = self._silo_trace({}, self._population_value({}, {}), {}, data)
            return {plate.name: plate for site in trace.values() if site["type"] == "sample" for plate in [_plate(trace, site)]}

        return _remember(self, "plates", data, find)

    def blocks(self, data: Any) -> dict[str, tuple[int, int]]:
        """For each plate of a silo that has latents: how many blocks, and how many numbers in one. "" is no plate."""

        def find() -> dict[str, tuple[int, int]]:
            found: dict[str, tuple[int, int]] = {}
            for latent in self.local_latents(data):
                width = found.get(latent.plate.name, (0, 0))[1]
                found[latent.plate.name] = (latent.plate.total, width + latent.width)
            return found

        return _remember(self, "blocks", data, find)

    def rows(self, data: Any) -> int:
        """N_j, the number of observations: elements of an observed site's outermost plate, or of its first axis."""

        def find() -> int:
            self.local_latents(data)  # which says what is wrong with the silo
            trace = self._silo_trace({}, self._population_value({}, {}), {}, data)
            sites = [(_plate(trace, site), jnp.shape(site["value"])) for site in trace.values() if _observed(site)]
            return max(1, *(plate.total if plate.name else (*shape, 1)[0] for plate, shape in sites))

        return _remember(self, "rows", data, find)

    def subsample(self, key: PRNGKeyArray, data: Any) -> dict[str, Int[Array, " size"]]:
        """Which elements a subsampled plate evaluates, by plate."""
        if not (sizes := self._subsampled(data)):
            return {}
        trace = self._silo_trace({}, self._population_value({}, {}), {}, data, key)
        return {name: trace[name]["value"] for name in sizes}

    def everyone(self, data: Any) -> dict[str, Int[Array, " total"]]:
        """All elements of the plates that are subsampled, for `indices`."""
        return {name: jnp.arange(total) for name, total in self._subsampled(data).items()}

    def _subsampled(self, data: Any) -> dict[str, int]:
        def find() -> dict[str, int]:
            trace = self._silo_trace({}, self._population_value({}, {}), {}, data)
            plates = (site for site in trace.values() if site["type"] == "plate")
            return {site["name"]: int(site["args"][0]) for site in plates if site["args"][1] not in (None, site["args"][0])}

        return _remember(self, "subsampled", data, find)

    def observed_values(self, data: Any) -> Values:
        """What a silo observes, by site."""
        trace = self._silo_trace(self.everyone(data), self._population_value({}, {}), {}, data)
        return {name: site["value"] for name, site in trace.items() if _observed(site) and jnp.size(site["value"])}

    def theta_values(self, theta: Values, data: Any) -> Values:
        """θ as the model has it; an encoder's parameters are on the real line already."""
        traces = (_trace(self.population, {}, {}), self._silo_trace({}, self._population_value({}, {}), {}, data))
        return {name: value for trace in traces for name, value in _constrained_theta(trace, theta).items()}

    def global_values(self, z: Float[Array, " n_G"]) -> Values:
        """Z_G as the population's sites have it."""
        with other_peoples_code():
            return {name: value for name, (value, _) in _unpack(self.global_latents(), {"": z[None]}).items()}

    def local_values(self, z: dict[str, Float[Array, "blocks width"]], data: Any) -> Values:
        """Z_L as the silo's sites have it, of the plates that are there."""
        with other_peoples_code():
            trace = self._silo_trace(self.everyone(data), self._population_value({}, {}), {}, data)
            return {name: value for name, (value, _) in _unpack(_latents(trace, "silo", z), z).items()}

    def prior_draw(self, key: PRNGKeyArray) -> Float[Array, " n_G"]:
        """Z_G drawn from p(Z_G)."""
        with other_peoples_code():
            trace = _trace(self.population, {}, {}, key=key)
            parts = [jnp.ravel(latent.transform.inv(trace[latent.name]["value"])) for latent in self.global_latents()]
            return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def log_population(self, theta: Values, z: Float[Array, " n_G"]) -> Float[Array, ""]:
        """log p_θ(Z_G), with the log-Jacobian of the global bijections: the server's own term."""
        with other_peoples_code():
            values = _unpack(self.global_latents(), {"": z[None]})
            trace = _trace(self.population, {name: value for name, (value, _) in values.items()}, theta)
            total = sum((_log_prob(site).sum() for site in trace.values() if site["type"] == "sample"), jnp.zeros(()))
            return total + sum((jacobian.sum() for _, jacobian in values.values()), jnp.zeros(()))

    def log_silo(
        self,
        theta: Values,
        z_global: Float[Array, " n_G"],
        z_local: dict[str, Float[Array, "blocks width"]],
        data: Any,
        indices: dict[str, Int[Array, " size"]] | None = None,
    ) -> dict[str, Float[Array, " blocks"]]:
        """log p_θ(y, Z_L | Z_G) by block, with the log-Jacobian of the local bijections; "" holds what lies in no plate.

        The sum over all entries, each plate's times its `scale`, is the silo's term. Elements of a plate are apart, so that a
        bound may treat each on its own. Of a subsampled plate, `indices` has the elements and `z_local` the latents of those.
        """
        with other_peoples_code():
            values = _unpack(self.local_latents(data, indices), z_local)
            known = {**{name: value for name, (value, _) in values.items()}, **(indices or {})}
            given = self._population_value(self.global_values(z_global), theta)
            trace = self._silo_trace(known, given, theta, data)
            found: dict[str, Float[Array, " blocks"]] = {}
            for site in trace.values():
                if site["type"] != "sample":
                    continue
                plate = _plate(trace, site)
                terms = [_log_prob(site) if plate.scale == 1 else _log_prob(site) / plate.scale]
                if site["name"] in values:
                    terms.append(values[site["name"]][1])
                for term in terms:
                    found[plate.name] = found.get(plate.name, jnp.zeros(plate.size)) + _by_block(term, plate)
            return found

    def predictive(self, key: PRNGKeyArray, theta: Values, z_global: Float[Array, " n_G"], known: Values, data: Any) -> Values:
        """All sites of a silo given Z_G and those of its latents that are known; the others come from their prior.

        What is observed is drawn anew, and `log <site>` has the log density of what was observed.
        """
        with other_peoples_code():
            given = self._population_value(self.global_values(z_global), theta)
            for_latents, key = jax.random.split(key)
            trace = self._silo_trace({**known, **self.everyone(data)}, given, theta, data, for_latents)
            found = {**self.global_values(z_global), **known}
            for place, (name, site) in enumerate(trace.items()):
                if _observed(site) and jnp.size(site["value"]):  # a numpyro.factor has no value, and draws nothing
                    found[name] = site["fn"].sample(jax.random.fold_in(key, place))
                    found[f"log {name}"] = site["fn"].log_prob(site["value"])
                elif site["type"] in ("deterministic", "sample") and name not in known and not _observed(site):
                    found[name] = site["value"]
            return found

    def _population_value(self, values: Values, theta: Values) -> Any:
        known = {**values, **(_constrained_theta(_trace(self.population, {}, {}), theta) if theta else {})}
        # block is outermost: a trace around this must not see the population's sites.
        with other_peoples_code(), handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=known):
            return self.population()

    def _silo_trace(self, values: Values, population: Any, theta: Values, data: Any, key: Any = 0) -> Any:
        try:
            return _trace(self.silo, values, theta, population, data, key=key)
        except (TypeError, ValueError, IndexError) as problem:
            raise UserError(f"the silo's data does not fit the model: {str(problem).splitlines()[0]}") from problem
        except KeyError as problem:
            raise UserError(f"the silo's data lacks {problem}, which the model reads") from problem


_known: dict[Any, Any] = {}


def _remember(model: Structured, what: str, data: Any, find: Callable[[], T]) -> T:
    """What follows from shapes alone is found once: a model is traced many times while a program is made."""
    leaves, treedef = jax.tree.flatten(data)
    signature = tuple((leaf.shape, str(leaf.dtype)) if hasattr(leaf, "shape") else leaf for leaf in leaves)
    key = (model, what, treedef, signature)
    if key not in _known:
        if len(_known) >= 2000:
            _known.clear()
        _known[key] = find()
    return _known[key]


def encode(encoder: Callable[[Any], Any], theta: Values, data: Any, indices: Values | None = None) -> tuple[Any, Values]:
    """What an inference network gives for a silo's data, and the parameters that it has at the start."""
    with other_peoples_code(), handlers.seed(rng_seed=0):
        start = handlers.trace(handlers.substitute(encoder, data=indices or {})).get_trace(data)
    known = {**_constrained_theta(start, theta), **(indices or {})}
    with other_peoples_code(), handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=known):
        return encoder(data), _theta_of(start)


def numbers(draws: dict[str, Any], most: int = 200) -> list[tuple[str, np.ndarray]]:
    """Each number of each site under its name, as beta[2]; sites of more than `most` numbers are left out."""
    found = []
    for site, value in draws.items():
        value = np.asarray(value)
        if value[0].size > most:
            continue
        for place in np.ndindex(value.shape[1:]):
            label = f"{site}[{', '.join(map(str, place))}]" if place else site
            found.append((label, value[(slice(None), *place)]))
    return found


def _trace(function: Callable[..., Any], values: Values, theta: Values, *arguments: Any, key: Any = 0) -> Any:
    # A subsampled plate may be given all its elements, about which NumPyro warns.
    with other_peoples_code(), handlers.seed(rng_seed=key), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        plain = handlers.trace(handlers.substitute(function, data=values)).get_trace(*arguments)
    known = _constrained_theta(plain, theta)
    return _trace(function, {**values, **known}, {}, *arguments, key=key) if known else plain


def _theta_of(*traces: Any) -> Values:
    sites = [site for trace in traces for site in trace.values() if site["type"] == "param"]
    return {site["name"]: jnp.asarray(_constraint(site).inv(site["value"])) for site in sites}


def _constrained_theta(trace: Any, theta: Values) -> Values:
    sites = {name: site for name, site in trace.items() if site["type"] == "param" and name in theta}
    return {name: _constraint(site)(theta[name]) for name, site in sites.items()}


def _constraint(site: Any) -> Transform:
    return biject_to(site["kwargs"].get("constraint", constraints.real))


def _observed(site: Any) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def _latents(trace: Any, where: str, plates: Container[str] | None = None) -> list[Latent]:
    """The latents of a trace, or those in some plates only."""
    found = []
    for site in trace.values():
        if site["type"] != "sample" or _observed(site) or (plates is not None and _plate(trace, site).name not in plates):
            continue
        name = site["name"]
        if site["fn"].support.is_discrete:
            raise UserError(f"{name} in {where} is discrete, but a latent must be continuous; sum it out of the model")
        if not site["fn"].has_rsample and not getattr(site["fn"], "reparametrized_params", ()):
            raise UserError(f"{name} in {where} has a distribution that cannot be reparametrised; choose another for it")
        if where == "population" and any(frame.size != _total(trace, frame) for frame in site["cond_indep_stack"]):
            raise UserError(f"{name} in population is a latent in a plate that is subsampled; give it its full size")
        if any(frame.size != _total(trace, frame) for frame in site["cond_indep_stack"][:-1]):
            raise UserError(f"{name} in {where} is a latent in an inner plate that is subsampled; give it its full size")
        transform = biject_to(site["fn"].support)
        shape = tuple(transform.inverse_shape(jnp.shape(site["value"])))
        found.append(Latent(name, _plate(trace, site), transform, shape))
    return found


def _total(trace: Any, frame: Any) -> int:
    """How many elements a plate stands for, of which `frame.size` are sampled."""
    return int(trace[frame.name]["args"][0]) if frame.name in trace else int(frame.size)


def _plate(trace: Any, site: Any) -> Plate:
    frames = site["cond_indep_stack"]
    if not frames:
        return NO_PLATE
    outermost = frames[-1]
    return Plate(outermost.name, int(outermost.size), int(outermost.dim), _total(trace, outermost))


def _log_prob(site: Any) -> Array:
    value = site["fn"].log_prob(site["value"])
    return value if site["scale"] is None else value * site["scale"]


def _by_block(term: Array, plate: Plate) -> Float[Array, " blocks"]:
    """Sum a log density of any batch shape over everything but its plate's dimension."""
    if plate == NO_PLATE:
        return jnp.sum(term)[None]
    whole = jnp.broadcast_to(term, (1,) * max(0, -plate.dim - term.ndim) + term.shape)
    return jnp.sum(jnp.moveaxis(whole, plate.dim, 0).reshape(whole.shape[plate.dim], -1), axis=1)


def _unpack(latents: list[Latent], z: dict[str, Float[Array, "blocks width"]]) -> dict[str, tuple[Any, Array]]:
    """For each site: its constrained value, and the log-Jacobian with the site's batch shape."""
    used: dict[str, int] = {}
    found = {}
    for latent in latents:
        start = used.get(latent.plate.name, 0)
        used[latent.plate.name] = start + latent.width
        flat = z[latent.plate.name][:, start : start + latent.width]
        event = latent.transform.domain.event_dim
        if latent.plate == NO_PLATE:
            real = flat.reshape(latent.shape)
        else:
            axis = len(latent.shape) - event + latent.plate.dim
            others = latent.shape[:axis] + latent.shape[axis + 1 :]
            real = jnp.moveaxis(flat.reshape(latent.plate.size, *others), 0, axis)
        value = latent.transform(real)
        found[latent.name] = (value, latent.transform.log_abs_det_jacobian(real, value))
    return found
