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
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpyro.distributions import biject_to

from fedbayes.errors import UserError
from fedbayes.models.linked import Linked, layout_of, plain
from fedbayes.models.sites import (
    NO_PLATE,
    Latent,
    Plate,
    Spread,
    Values,
    by_block,
    elements,
    in_blocks,
    independent,
    jacobian,
    latents_of,
    log_prob,
    observed,
    on_real_line,
    placed,
    plate_of,
    run,
    spreads,
    theta_of,
    unknown,
)
from fedbayes.trees import arrays_of, other_peoples_code

T = TypeVar("T")
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
        if not callable(self.population) or not callable(self.silo):
            raise UserError("population and silo are functions: population() and silo(population, data)")
        parameters = inspect.signature(self.population).parameters.values()
        if needed := [one.name for one in parameters if one.default is one.empty and one.kind not in _ANY_NUMBER]:
            advice = "what depends on a silo's data belongs in silo(population, data)"
            raise UserError(f"population takes {', '.join(needed)}, but it must not read data: {advice}")

    def global_latents(self) -> list[Latent]:
        """The latents of the population, in the order in which they are sampled; a plate has no meaning for them."""
        return [latent._replace(plate=NO_PLATE) for latent in latents_of(self._of_population()[1], "population")]

    def local_latents(self, data: Any, indices: Values | None = None) -> list[Latent]:
        """The latents of a silo, in the order in which they are sampled."""
        sites = self._of_silo(data, known=indices)
        found = latents_of(sites, "silo", layout=layout_of(data))
        if both := {latent.name for latent in found} & {latent.name for latent in self.global_latents()}:
            raise UserError(f"{', '.join(sorted(both))} is sampled in population and in silo; give the silo's another name")
        if not any(observed(site) for site in sites.values()):
            raise UserError("silo observes nothing: sample at least one site with obs=data[…]")
        return found

    def size(self) -> int:
        """n_G, the length of Z_G."""
        return remember(self, "size", None, lambda: sum(latent.width for latent in self.global_latents()))

    def theta(self, data: Any = None) -> Values:
        """θ at its start, unconstrained: every `numpyro.param`; those of `silo` are found where a silo's data is given."""
        return theta_of(self._of_population()[1], {} if data is None else self._of_silo(data))

    def plates(self, data: Any) -> dict[str, Plate]:
        """The outermost plates of a silo's sites, and groups of latents that stand for one; "" is no plate."""

        def find() -> dict[str, Plate]:
            sites = self._of_silo(data)
            found = [plate_of(sites, site) for site in sites.values() if site["type"] == "sample"]
            # A group's latents may lie along another axis than its plate's: the plate itself comes last.
            groups = [placed(sites[name], place) for name, place in layout_of(data).items() if name in sites]
            whole = [NO_PLATE] if isinstance(data, Linked) else []
            return {plate.name: plate for plate in [*whole, *groups, *found]}

        return remember(self, "plates", data, find)

    def blocks(self, data: Any) -> dict[str, tuple[int, int]]:
        """For each plate of a silo that has latents: how many blocks, and how many numbers in one. "" is no plate."""

        def find() -> dict[str, tuple[int, int]]:
            found: dict[str, tuple[int, int]] = {}
            for latent in self.local_latents(data):
                width = found.get(latent.plate.name, (0, 0))[1]
                found[latent.plate.name] = (latent.plate.total, width + latent.width)
            return found

        return remember(self, "blocks", data, find)

    def rows(self, data: Any) -> int:
        """N_j, the number of observations: elements of an observed site's outermost plate, or of its first axis."""

        def find() -> int:
            self.local_latents(data)  # which says what is wrong with the silo
            sites = self._of_silo(data)
            seen = [(plate_of(sites, site), jnp.shape(site["value"])) for site in sites.values() if observed(site)]
            return max(1, *(plate.total if plate.name else (*shape, 1)[0] for plate, shape in seen))

        return remember(self, "rows", data, find)

    def subsample(self, key: PRNGKeyArray, data: Any) -> dict[str, Int[Array, " size"]]:
        """Which elements a subsampled plate evaluates, by plate."""
        if not (sizes := self._subsampled(data)):
            return {}
        sites = self._of_silo(data, key=key)
        return {name: sites[name]["value"] for name in sizes}

    def everyone(self, data: Any) -> dict[str, Int[Array, " total"]]:
        """All elements of the plates that are subsampled, for `indices`."""
        return {name: jnp.arange(total) for name, total in self._subsampled(data).items()}

    def _subsampled(self, data: Any) -> dict[str, int]:
        def find() -> dict[str, int]:
            plates = (site for site in self._of_silo(data).values() if site["type"] == "plate")
            return {site["name"]: int(site["args"][0]) for site in plates if site["args"][1] not in (None, site["args"][0])}

        return remember(self, "subsampled", data, find)

    def observed_values(self, data: Any) -> Values:
        """What a silo observes, by site."""
        sites = self._of_silo(data, known=self.everyone(data))
        return {name: site["value"] for name, site in sites.items() if observed(site) and jnp.size(site["value"])}

    def theta_values(self, theta: Values, data: Any) -> Values:
        """θ as the model has it; an encoder's parameters are on the real line already."""
        both = (self._of_population(theta)[1], self._of_silo(data, theta))
        return {name: site["value"] for sites in both for name, site in sites.items() if site["type"] == "param"}

    def global_names(self) -> list[str]:
        """The names of `global_values`, in the model's order."""
        return list(unknown(self._of_population()[1]))

    def global_values(self, theta: Values, z: Float[Array, " n_G"]) -> Values:
        """Z_G as the population's sites have it, and what the population calls deterministic."""
        return unknown(self._of_population(theta, z)[1])

    def global_spread(self) -> Spread:
        """Where the prior of Z_G lies on the real line, and its scale: by medians and quantiles, each given those before it."""
        _, found = spreads(self.population, ())
        flat = [[jnp.ravel(getattr(found[one.name], part)) for one in self.global_latents()] for part in Spread._fields]
        return Spread(*(jnp.concatenate(parts) if parts else jnp.zeros(0) for parts in flat))

    def local_spread(self, data: Any) -> dict[str, Spread]:
        """The same of Z_L, by block, with Z_G at its median. Only the shapes of the data matter: its numbers are set to 0."""
        shapes, whole = arrays_of(data)
        blank = whole(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
        everyone = self.everyone(data)
        latents = self.local_latents(blank, everyone)
        _, found = spreads(self.silo, (spreads(self.population, ())[0], plain(blank)), everyone)
        location, scale = ({one.name: getattr(found[one.name], part) for one in latents} for part in Spread._fields)
        scales = in_blocks(latents, scale)
        return {name: Spread(value, scales[name]) for name, value in in_blocks(latents, location).items()}

    def check_start(self, data: Any, tries: int = 5) -> None:
        """Refuse a model whose log density is not finite at any of some draws from its prior, by the site's name."""
        for number in range(tries):
            key = jax.random.key(number)
            population, above = run(self.population, (), key=key)
            sites = {**above, **run(self.silo, (population, plain(data)), known=self.everyone(data), key=key)[1]}
            with other_peoples_code(), warnings.catch_warnings(action="ignore"):  # values out of support are what is looked for
                tried = [name for name, site in sites.items() if site["type"] == "sample"]
                bad = [name for name in tried if not bool(jnp.isfinite(jnp.sum(log_prob(sites[name]))))]
            if not bad:
                return
        advice = "check its data, its support and its scale"
        raise UserError(f"the log density of {bad[0]} is not finite at {tries} draws from the prior; {advice}")

    def prior_draw(self, key: PRNGKeyArray) -> Float[Array, " n_G"]:
        """Z_G drawn from p(Z_G)."""
        sites = run(self.population, (), key=key)[1]
        with other_peoples_code():
            real = [biject_to(sites[name]["fn"].support).inv(sites[name]["value"]) for name, *_ in self.global_latents()]
            return jnp.concatenate([jnp.ravel(part) for part in real]) if real else jnp.zeros(0)

    def prior_local(
        self, key: PRNGKeyArray, theta: Values, z_global: Float[Array, " n_G"], data: Any
    ) -> dict[str, Float[Array, "blocks width"]]:
        """Z_L drawn from p_θ(Z_L | Z_G), every element of each plate."""
        everyone = self.everyone(data)
        latents = self.local_latents(data, everyone)
        sites = self._of_silo(data, theta, z_global, known=everyone, key=key)
        with other_peoples_code():
            real = {name: biject_to(sites[name]["fn"].support).inv(sites[name]["value"]) for name, *_ in latents}
        return in_blocks(latents, real)

    def log_population(self, theta: Values, z: Float[Array, " n_G"]) -> Float[Array, ""]:
        """log p_θ(Z_G), with the log-Jacobian of the global bijections: the server's own term."""
        real = on_real_line(self.global_latents(), {"": z[None]})
        sites = run(self.population, (), real=real, theta=theta)[1]
        with other_peoples_code():
            terms = [log_prob(site).sum() for site in sites.values() if site["type"] == "sample"]
            return sum([*terms, *(jacobian(sites[name], value).sum() for name, value in real.items())], jnp.zeros(()))

    def log_silo(
        self,
        theta: Values,
        z_global: Float[Array, " n_G"],
        z_local: dict[str, Float[Array, "_blocks _width"]],
        data: Any,
        indices: dict[str, Int[Array, " size"]] | None = None,
    ) -> dict[str, Float[Array, " _blocks"]]:
        """log p_θ(y, Z_L | Z_G) by block, with the log-Jacobian of the local bijections; "" holds what lies in no plate.

        The sum over all entries, each plate's times its `scale`, is the silo's term. Elements of a plate are apart, so that a
        bound may treat each on its own; where the data is `Linked`, that also holds for rows that read latents by index. Of a
        subsampled plate, `indices` has the elements and `z_local` the latents of those.
        """
        latents = self.local_latents(data, indices)
        real = on_real_line(latents, z_local)
        sites = self._of_silo(data, theta, z_global, real=real, known=indices)
        links = data.links if isinstance(data, Linked) else {}
        found: dict[str, Float[Array, " _blocks"]] = {}
        with other_peoples_code():
            if isinstance(data, Linked):
                found = _by_link({name: elements(sites[name], real.get(name)) for name in links}, links, latents, real)
            for name, site in sites.items():
                if site["type"] != "sample" or name in links:
                    continue
                plate = plate_of(sites, site)
                terms = [log_prob(site) if plate.scale == 1 else log_prob(site) / plate.scale]
                if name in real:
                    terms.append(jacobian(site, real[name]))
                for term in terms:
                    found[plate.name] = found.get(plate.name, jnp.zeros(plate.size)) + by_block(term, plate)
        return found

    def elements(self, theta: Values, z_global: Float[Array, " n_G"], real: Values, data: Any, indices: Any = None) -> Values:
        """log p_θ(y, Z_L | Z_G) of each site, element by element; latents on the real line in the shape of their site."""
        sites = self._of_silo(data, theta, z_global, real=real, known=indices)
        with other_peoples_code():
            return {
                name: elements(site, real.get(name))
                for name, site in sites.items()
                if site["type"] == "sample" and (observed(site) or name in real)
            }

    def declared(self, data: Any) -> dict[str, tuple[Plate, int]]:
        """The outermost plate of each site as the model has it, and how many axes `to_event` made one event of."""
        sites, found = self._of_silo(data), {}
        for name, site in sites.items():
            if site["type"] == "sample":
                base = independent(site["fn"])
                found[name] = plate_of(sites, site), site["fn"].event_dim - base.event_dim
        return found

    def predictive(
        self,
        key: PRNGKeyArray,
        theta: Values,
        z_global: Float[Array, " n_G"],
        z_local: dict[str, Float[Array, "_blocks _width"]],
        data: Any,
    ) -> Values:
        """All sites given Z_G and the silo's latents in the plates of `z_local`; the others come from their prior.

        What is observed is drawn anew, and `log <site>` has the log density of what was observed.
        """
        everyone = self.everyone(data)
        latents = latents_of(self._of_silo(data, known=everyone), "silo", z_local, layout_of(data))
        real = on_real_line(latents, z_local)
        for_latents, key = jax.random.split(key)
        sites = self._of_silo(data, theta, z_global, real=real, known=everyone, key=for_latents)
        found = {**self.global_values(theta, z_global), **unknown(sites)}
        for place, (name, site) in enumerate(sites.items()):
            if observed(site) and jnp.size(site["value"]):  # a numpyro.factor has no value, and draws nothing
                with other_peoples_code():
                    found[name] = site["fn"].sample(jax.random.fold_in(key, place))
                    found[f"log {name}"] = site["fn"].log_prob(site["value"])
        return found

    def _of_population(self, theta: Values | None = None, z: Float[Array, " n_G"] | None = None) -> tuple[Any, Any]:
        """What the population returns, and its sites."""
        real = {} if z is None else on_real_line(self.global_latents(), {"": z[None]})
        return run(self.population, (), real=real, theta=theta)

    def _of_silo(self, data: Any, theta: Values | None = None, z: Float[Array, " n_G"] | None = None, **known: Any) -> Any:
        """The sites of a silo."""
        population = self._of_population(theta, z)[0]
        try:
            return run(self.silo, (population, plain(data)), theta=theta, **known)[1]
        except (TypeError, ValueError, IndexError, AttributeError, AssertionError) as problem:
            what = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            raise UserError(f"silo(population, data) does not fit this data: {what}") from problem
        except KeyError as problem:
            raise UserError(f"silo reads {problem}, which its data and what population returns do not have") from problem


def _by_link(
    terms: dict[str, Array], links: dict[str, Int[Array, ...]], latents: list[Latent], real: Values
) -> dict[str, Float[Array, " _blocks"]]:
    """Terms added up in the blocks that they are linked to, groups in the order of their names; what has none is in ""."""
    starts, total = block_starts(latents)
    sums = jnp.zeros(total + 1)
    for name, blocks in links.items():
        term = terms[name]
        if name in real:  # a latent that was added (`primitives/padding.py`) is standard normal
            normal = -0.5 * (real[name] ** 2 + math.log(2 * math.pi))
            normal = jnp.sum(normal, axis=tuple(range(term.ndim, normal.ndim)))
            term, blocks = jnp.where(blocks < 0, normal, term), jnp.where(blocks < 0, -1 - blocks, blocks)
        sums = sums + jax.ops.segment_sum(jnp.ravel(term), jnp.ravel(blocks), total + 1)
    return dict(zip([*starts, ""], jnp.split(sums, [*starts.values(), total][1:]), strict=True))


def block_starts(latents: list[Latent]) -> tuple[dict[str, int], int]:
    """Where each group's blocks begin, counted over all groups in the order of their names; and how many blocks there are."""
    sizes = {latent.plate.name: latent.plate.size for latent in latents if latent.plate.name}
    edges = np.cumsum([0, *(sizes[name] for name in sorted(sizes))], dtype=int).tolist()
    return dict(zip(sorted(sizes), edges, strict=False)), edges[-1]


_known: dict[Any, Any] = {}


def remember(model: Structured, what: str, data: Any, find: Callable[[], T]) -> T:
    """What follows from shapes alone is found once: a model is traced many times while a program is made."""
    leaves, treedef = jax.tree.flatten(data)
    signature = tuple((leaf.shape, str(leaf.dtype)) if hasattr(leaf, "shape") else leaf for leaf in leaves)
    key = (model, what, treedef, signature)
    if key not in _known:
        if len(_known) >= 2000:
            _known.clear()
        _known[key] = find()
    return _known[key]


def encode(
    encoder: Callable[..., Any], theta: Values, data: Any, z: Float[Array, " n_G"], indices: Values | None = None
) -> tuple[Any, Values]:
    """What an inference network gives for a silo's data, and Z_G if it takes it; and its parameters at the start."""
    takes = [one for one in inspect.signature(encoder).parameters.values() if one.default is one.empty]
    arguments = (plain(data), z) if len(takes) > 1 else (plain(data),)
    return run(encoder, arguments, known=indices, theta=theta)[0], theta_of(run(encoder, arguments, known=indices)[1])


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
