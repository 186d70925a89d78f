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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import Transform

from fedbayes.errors import UserError
from fedbayes.trees import other_peoples_code

Values = dict[str, Any]


class Plate(NamedTuple):
    """The outermost plate that a site lies in; its elements are the blocks."""

    name: str
    size: int
    dim: int


NO_PLATE = Plate("", 1, 0)


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
        return [latent._replace(plate=NO_PLATE) for latent in _latents(self._population_trace({}, {}), "population")]

    def local_latents(self, data: Any) -> list[Latent]:
        """The latents of a silo, in the order in which they are sampled."""
        trace = self._silo_trace({}, self._population_value({}, {}), {}, data)
        found = _latents(trace, "silo")
        if both := {latent.name for latent in found} & {latent.name for latent in self.global_latents()}:
            raise UserError(f"{', '.join(sorted(both))} is sampled in population and in silo; give the silo's another name")
        if not any(site["type"] == "sample" and site["is_observed"] for site in trace.values()):
            raise UserError("silo observes nothing: sample at least one site with obs=data[…]")
        return found

    def size(self) -> int:
        """n_G, the length of Z_G."""
        return sum(latent.width for latent in self.global_latents())

    def theta(self, data: Any) -> Values:
        """θ at its start, unconstrained: every `numpyro.param` of both functions."""
        traces = (self._population_trace({}, {}), self._silo_trace({}, self._population_value({}, {}), {}, data))
        sites = [site for trace in traces for site in trace.values() if site["type"] == "param"]
        return {site["name"]: _constraint(site).inv(site["value"]) for site in sites}

    def blocks(self, data: Any) -> dict[str, tuple[int, int]]:
        """For each plate of a silo that has latents: how many blocks, and how many numbers in one. "" is no plate."""
        found: dict[str, tuple[int, int]] = {}
        for latent in self.local_latents(data):
            width = found.get(latent.plate.name, (0, 0))[1]
            found[latent.plate.name] = (latent.plate.size, width + latent.width)
        return found

    def global_values(self, z: Float[Array, " n_G"]) -> Values:
        """Z_G as the population's sites have it."""
        with other_peoples_code():
            return {name: value for name, (value, _) in _unpack(self.global_latents(), {"": z[None]}).items()}

    def local_values(self, z: dict[str, Float[Array, "blocks width"]], data: Any) -> Values:
        """Z_L as the silo's sites have it."""
        with other_peoples_code():
            return {name: value for name, (value, _) in _unpack(self.local_latents(data), z).items()}

    def log_population(self, theta: Values, z: Float[Array, " n_G"]) -> Float[Array, ""]:
        """log p_θ(Z_G), with the log-Jacobian of the global bijections: the server's own term."""
        with other_peoples_code():
            values = _unpack(self.global_latents(), {"": z[None]})
            trace = self._population_trace({name: value for name, (value, _) in values.items()}, theta)
            total = sum((_log_prob(site).sum() for site in trace.values() if site["type"] == "sample"), jnp.zeros(()))
            return total + sum((jacobian.sum() for _, jacobian in values.values()), jnp.zeros(()))

    def log_silo(
        self, theta: Values, z_global: Float[Array, " n_G"], z_local: dict[str, Float[Array, "blocks width"]], data: Any
    ) -> dict[str, Float[Array, " blocks"]]:
        """log p_θ(y, Z_L | Z_G) by block, with the log-Jacobian of the local bijections; "" holds what lies in no plate.

        The sum over all entries is the silo's term. Elements of a plate are apart, so that a bound may treat each on its own.
        """
        with other_peoples_code():
            values = _unpack(self.local_latents(data), z_local)
            globals_ = {name: value for name, (value, _) in _unpack(self.global_latents(), {"": z_global[None]}).items()}
            given = self._population_value(globals_, theta)
            trace = self._silo_trace({name: value for name, (value, _) in values.items()}, given, theta, data)
            found: dict[str, Float[Array, " blocks"]] = {}
            for site in trace.values():
                if site["type"] != "sample":
                    continue
                plate, terms = _plate(site), [_log_prob(site)]
                if site["name"] in values:
                    terms.append(values[site["name"]][1])
                for term in terms:
                    found[plate.name] = found.get(plate.name, jnp.zeros(plate.size)) + _by_block(term, plate)
            return found

    def _population_trace(self, values: Values, theta: Values) -> Any:
        return _trace(self.population, values, theta)

    def _population_value(self, values: Values, theta: Values) -> Any:
        known = {**values, **self._theta_values(theta)}
        # block is outermost: a trace around this must not see the population's sites.
        with other_peoples_code(), handlers.block(), handlers.seed(rng_seed=0), handlers.substitute(data=known):
            return self.population()

    def _silo_trace(self, values: Values, population: Any, theta: Values, data: Any) -> Any:
        try:
            return _trace(self.silo, values, theta, population, data)
        except (TypeError, ValueError) as problem:
            raise UserError(f"the silo's data does not fit the model: {str(problem).splitlines()[0]}") from problem

    def _theta_values(self, theta: Values) -> Values:
        return _constrained_theta(_trace(self.population, {}, {}), theta)


def _trace(function: Callable[..., Any], values: Values, theta: Values, *arguments: Any) -> Any:
    with other_peoples_code(), handlers.seed(rng_seed=0):
        plain = handlers.trace(handlers.substitute(function, data=values)).get_trace(*arguments)
    if not theta:
        return plain
    known = {**values, **_constrained_theta(plain, theta)}
    with other_peoples_code(), handlers.seed(rng_seed=0):
        return handlers.trace(handlers.substitute(function, data=known)).get_trace(*arguments)


def _constrained_theta(trace: Any, theta: Values) -> Values:
    sites = {name: site for name, site in trace.items() if site["type"] == "param" and name in theta}
    return {name: _constraint(site)(theta[name]) for name, site in sites.items()}


def _constraint(site: Any) -> Transform:
    from numpyro.distributions import constraints

    return biject_to(site["kwargs"].get("constraint", constraints.real))


def _latents(trace: Any, where: str) -> list[Latent]:
    found = []
    for site in trace.values():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        name = site["name"]
        if site["fn"].support.is_discrete:
            raise UserError(f"{name} in {where} is discrete, but a latent must be continuous; sum it out of the model")
        if not site["fn"].has_rsample and not getattr(site["fn"], "reparametrized_params", ()):
            raise UserError(f"{name} in {where} has a distribution that cannot be reparametrised; choose another for it")
        if any(frame.size != frame_size(trace, frame) for frame in site["cond_indep_stack"]):
            raise UserError(f"{name} in {where} is a latent in a plate that is subsampled; give the plate its full size")
        transform = biject_to(site["fn"].support)
        shape = tuple(transform.inverse_shape(jnp.shape(site["value"])))
        found.append(Latent(name, _plate(site), transform, shape))
    return found


def frame_size(trace: Any, frame: Any) -> int:
    """How many elements a plate stands for, of which `frame.size` are sampled."""
    return int(trace[frame.name]["args"][0]) if frame.name in trace else int(frame.size)


def _plate(site: Any) -> Plate:
    frames = site["cond_indep_stack"]
    if not frames:
        return NO_PLATE
    outermost = frames[-1]
    return Plate(outermost.name, int(outermost.size), int(outermost.dim))


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
