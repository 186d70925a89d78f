"""The sites of a NumPyro function: run it with latents from the real line, and read what it sampled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import ExpandedDistribution, Independent, MixtureGeneral, MixtureSameFamily, biject_to, constraints
from numpyro.distributions.transforms import IndependentTransform, Transform

from fedbayes.errors import UserError
from fedbayes.models.linked import Place
from fedbayes.trees import other_peoples_code

Values = dict[str, Any]


class Plate(NamedTuple):
    """The outermost plate that a site lies in, or a group of latents that stands for one; its elements are the blocks."""

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


def run(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    real: Values | None = None,
    known: Values | None = None,
    theta: Values | None = None,
    key: Any = 0,
) -> tuple[Any, Any]:
    """What `function` returns, and its sites: latents from the real line, sites that are known, θ, and others from the prior.

    A latent's bijection is made where the latent is sampled, as its support may depend on latents before it.
    """

    last: list[Any] = []

    def value(site: Any) -> Any:
        name = site["name"]
        last[:] = [site]
        if site["type"] == "param" and theta and name in theta:
            return jax.tree.map(_constraint(site), theta[name])
        if real and name in real:
            return biject_to(site["fn"].support)(real[name])
        return known.get(name) if known else None

    # block is outermost: a trace around this must not see these sites.
    with other_peoples_code(), handlers.block(), handlers.seed(rng_seed=key), warnings.catch_warnings():
        # A subsampled plate may be given all its elements, about which NumPyro warns.
        warnings.filterwarnings("ignore", "subsample_size does not match")
        with handlers.trace() as sites, handlers.substitute(substitute_fn=value):
            try:
                return function(*arguments), sites
            except NotImplementedError as problem:
                kind = type(last[0]["fn"]).__name__ if last and last[0]["type"] == "sample" else ""
                if not kind:
                    raise
                advice = "give it a proper prior, such as Normal(0, 100)"
                raise UserError(f"{last[0]['name']} is {kind}, of which nothing can be drawn; {advice}") from problem


QUANTILES = (0.5, 0.1587, 0.8413)
"""The median, and a standard deviation of a Gaussian below and above it."""
DRAWS = 255
"""Draws for the quantiles of a distribution that has no inverse of its distribution function."""


class Spread(NamedTuple):
    """Where a latent's prior lies on the real line, given the latents before it, and how wide it is."""

    location: Array
    scale: Array


def spreads(
    function: Callable[..., Any], arguments: tuple[Any, ...], known: Values | None = None
) -> tuple[Any, dict[str, Spread]]:
    """What `function` returns with every latent at the median of its prior, and each latent's spread there.

    What is not finite is taken to be a standard normal.
    """
    found: dict[str, Spread] = {}

    def value(site: Any) -> Any:
        name = site["name"]
        if known and name in known:
            return known[name]
        if site["type"] != "sample" or observed(site):
            return None
        found[name] = _spread(site)
        return biject_to(site["fn"].support)(found[name].location)

    with other_peoples_code(), handlers.block(), handlers.seed(rng_seed=0), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "subsample_size does not match")
        with handlers.substitute(substitute_fn=value):
            return function(*arguments), found


def _spread(site: Any) -> Spread:
    fn, base = site["fn"], site["fn"]
    transform = biject_to(fn.support)
    while isinstance(base, Independent | ExpandedDistribution):
        base = base.base_dist
    try:
        if base.event_dim:
            raise NotImplementedError
        values = [jnp.broadcast_to(base.icdf(jnp.asarray(part)), fn.shape()) for part in QUANTILES]
        middle, low, high = (transform.inv(value) for value in values)
    except (NotImplementedError, ImportError):  # NumPyro asks for another package where JAX has no such inverse
        draws = jax.vmap(transform.inv)(fn.sample(jax.random.key(0), (DRAWS,)))
        middle, low, high = jnp.quantile(draws, jnp.asarray(QUANTILES), axis=0)
    fine = jnp.isfinite(middle) & jnp.isfinite(high - low) & (high > low)
    return Spread(jnp.where(fine, middle, 0.0), jnp.where(fine, (high - low) / 2, 1.0))


def unknown(sites: Any) -> Values:
    """The values of latents and of what is deterministic."""
    kinds = ("sample", "deterministic")
    return {name: site["value"] for name, site in sites.items() if site["type"] in kinds and not observed(site)}


def theta_of(*traces: Any) -> Values:
    """Every parameter at its start, unconstrained; one may be a tree, as a network's are."""
    params = [site for sites in traces for site in sites.values() if site["type"] == "param"]
    return {
        site["name"]: jax.tree.map(lambda leaf, site=site: _constraint(site).inv(jnp.asarray(leaf)), site["value"])
        for site in params
    }


def _constraint(site: Any) -> Transform:
    return biject_to(site["kwargs"].get("constraint", constraints.real))


def observed(site: Any) -> bool:
    """Whether a site has data."""
    return site["type"] == "sample" and site["is_observed"]


def latents_of(
    trace: Any, where: str, plates: Container[str] | None = None, layout: Mapping[str, Place] | None = None
) -> list[Latent]:
    """The latents of a trace, or those in some plates only; `layout` says which have blocks other than their plate's."""
    found, layout = [], layout or {}
    for site in trace.values():
        if site["type"] != "sample" or observed(site):
            continue
        name = site["name"]
        group = layout[name].group if name in layout else plate_of(trace, site).name
        if plates is not None and group not in plates:
            continue
        if site["fn"].support.is_discrete:
            raise UserError(f"{name} in {where} is discrete, but a latent must be continuous; sum it out of the model")
        base = site["fn"]
        while hasattr(base, "base_dist"):
            base = base.base_dist
        mixture = isinstance(base, MixtureSameFamily | MixtureGeneral)  # of which only the density is needed
        if not (mixture or base.has_rsample or getattr(base, "reparametrized_params", ())):
            raise UserError(f"{name} in {where} has a distribution that cannot be reparametrised; choose another for it")
        if where == "population" and any(frame.size != _total(trace, frame) for frame in site["cond_indep_stack"]):
            raise UserError(f"{name} in population is a latent in a plate that is subsampled; give it its full size")
        if any(frame.size != _total(trace, frame) for frame in site["cond_indep_stack"][:-1]):
            raise UserError(f"{name} in {where} is a latent in an inner plate that is subsampled; give it its full size")
        transform = biject_to(site["fn"].support)
        shape = tuple(transform.inverse_shape(jnp.shape(site["value"])))
        found.append(Latent(name, placed(site, layout[name]) if name in layout else plate_of(trace, site), transform, shape))
    return found


def placed(site: Any, place: Place) -> Plate:
    """The group of a latent that has a place of its own, as a plate."""
    if not place.group:
        return NO_PLATE
    transform = biject_to(site["fn"].support)
    shape = transform.inverse_shape(jnp.shape(site["value"]))
    count = int(shape[place.axis])
    return Plate(place.group, count, place.axis - len(shape) + transform.domain.event_dim, count)


def _total(trace: Any, frame: Any) -> int:
    """How many elements a plate stands for, of which `frame.size` are sampled."""
    return int(trace[frame.name]["args"][0]) if frame.name in trace else int(frame.size)


def plate_of(trace: Any, site: Any) -> Plate:
    """The outermost plate of a site."""
    frames = site["cond_indep_stack"]
    if not frames:
        return NO_PLATE
    outermost = frames[-1]
    return Plate(outermost.name, int(outermost.size), int(outermost.dim), _total(trace, outermost))


def log_prob(site: Any) -> Array:
    """A site's log density as the model counts it."""
    value = site["fn"].log_prob(site["value"])
    return value if site["scale"] is None else value * site["scale"]


def elements(site: Any, real: Array | None = None) -> Array:
    """A site's log density element by element, also where `to_event` made one event of them; of a latent, with its Jacobian."""
    value = independent(site["fn"]).log_prob(site["value"])
    if site["scale"] is not None:
        scale = jnp.asarray(site["scale"])
        value = value * scale.reshape(scale.shape + (1,) * (value.ndim - len(site["fn"].batch_shape) if scale.ndim else 0))
    if real is None:
        return value
    transform = biject_to(site["fn"].support)
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    volume = transform.log_abs_det_jacobian(real, site["value"])
    rank = min(value.ndim, volume.ndim)
    return _summed(value, rank) + _summed(volume, rank)


def independent(fn: Any) -> Any:
    """A distribution without `to_event`."""
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return fn


def _summed(term: Array, rank: int) -> Array:
    return jnp.sum(term, axis=tuple(range(rank, term.ndim)))


def by_block(term: Array, plate: Plate) -> Float[Array, " blocks"]:
    """Sum a log density of any batch shape over everything but its plate's dimension."""
    if plate == NO_PLATE:
        return jnp.sum(term)[None]
    whole = jnp.broadcast_to(term, (1,) * max(0, -plate.dim - term.ndim) + term.shape)
    return jnp.sum(jnp.moveaxis(whole, plate.dim, 0).reshape(whole.shape[plate.dim], -1), axis=1)


def on_real_line(latents: list[Latent], z: dict[str, Float[Array, "blocks width"]]) -> Values:
    """Each latent on the real line, in the shape of its site."""
    used: dict[str, int] = {}
    found = {}
    for latent in latents:
        start = used.get(latent.plate.name, 0)
        used[latent.plate.name] = start + latent.width
        flat = z[latent.plate.name][:, start : start + latent.width]
        if latent.plate == NO_PLATE:
            found[latent.name] = flat.reshape(latent.shape)
        else:
            axis = len(latent.shape) - latent.transform.domain.event_dim + latent.plate.dim
            others = latent.shape[:axis] + latent.shape[axis + 1 :]
            found[latent.name] = jnp.moveaxis(flat.reshape(latent.plate.size, *others), 0, axis)
    return found


def in_blocks(latents: list[Latent], real: Values) -> dict[str, Float[Array, "_blocks _width"]]:
    """The inverse of `on_real_line`."""
    parts: dict[str, list[Array]] = {}
    for latent in latents:
        value = jnp.broadcast_to(real[latent.name], latent.shape)
        if latent.plate != NO_PLATE:
            axis = len(latent.shape) - latent.transform.domain.event_dim + latent.plate.dim
            value = jnp.moveaxis(value, axis, 0)
        parts.setdefault(latent.plate.name, []).append(value.reshape(latent.plate.size, -1))
    return {name: jnp.concatenate(some, axis=1) for name, some in parts.items()}


def jacobian(site: Any, real: Array) -> Array:
    """The log-Jacobian of a latent's bijection, with the site's batch shape."""
    return biject_to(site["fn"].support).log_abs_det_jacobian(real, site["value"])
