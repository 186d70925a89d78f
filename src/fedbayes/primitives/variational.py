"""What SFVI, SFVI-Avg and PVI share: a variational family over a structured model, and a silo's term of the bound.

    q(Z) = q(Z_G) Π_j q(Z_Lj | Z_G),        L̂_j = log p_θ(y_j, Z_Lj | Z_G) − log q(Z_Lj | Z_G)

With K > 1 draws the silo's term is the locally enhanced bound (Geffner and Domke 2022): for each element of a plate
log 1/K Σ_k w_k with w_k = p(y, Z_L^k | Z_G) / q(Z_L^k | Z_G), which is still a sum over silos.

Gradients are "sticking the landing" (Roeder et al. 2017) where K = 1, and doubly reparametrised (Tucker et al. 2019) otherwise:
with w̃_k = w_k / Σ w, the path from η_L through Z_L^k has weight w̃_k² and the parameters inside log q are held fixed; what
flows to Z_G has weight w̃_k. Both are zero for every draw where q is the posterior.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes.algorithm import check_settings, setting
from fedbayes.errors import UserError
from fedbayes.models.linked import Linked
from fedbayes.models.sites import Values
from fedbayes.models.structured import Structured, encode
from fedbayes.primitives import gaussian
from fedbayes.primitives.dependence import inseparable
from fedbayes.primitives.optimisers import move

LARGEST = 2**27
"""Numbers in one array of variational parameters beyond which a family is refused."""

Locals = dict[str, gaussian.Local]
Noise = dict[str, Float[Array, "s k blocks d"]]
Indices = dict[str, Int[Array, " size"]]
Density = Callable[[Values, Float[Array, " n"]], Float[Array, ""]]


class Shared(NamedTuple):
    """What all silos share: η_G and θ."""

    eta: gaussian.Global
    theta: Values


@dataclasses.dataclass(frozen=True)
class Family:
    """Which Gaussians are searched, and with how many draws.

    >>> Family.mean_field(bound=5)
    Family(full=False, coupled=False, dense=False, moving_scale=False, bound=5, draws=1, start=0.1, jitter=0.0, encoder=None)
    """

    full: bool = True
    """Whether q(Z_G) has a full covariance; else it is mean-field."""
    coupled: bool = True
    """Whether the local mean depends on Z_G, by C."""
    dense: bool = True
    """Whether the latents of one plate element are correlated given Z_G, by L."""
    moving_scale: bool = False
    """Whether the local log-scale depends on Z_G too, by D."""
    bound: int = setting(1, least=1)
    """K, importance-weighted draws for each local latent."""
    draws: int = setting(1, least=1)
    """Monte Carlo samples in a step."""
    start: float = setting(0.1, above=0)
    """Standard deviations at the start."""
    jitter: float = setting(0.0, least=0)
    """Means at the start are drawn with this standard deviation, alike in all silos; hidden units of a network need it."""
    encoder: Callable[[Any], Any] | None = None
    """Amortised inference: a function of the silo's data that gives mean and log-scale for each plate; its params are θ."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    def mean_field(cls, **options: Any) -> Family:
        """No correlation at all, for models with many latents."""
        return cls(full=False, coupled=False, dense=False, **options)

    def init_shared(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Shared:
        """N(0, start² I), or around jittered means, and θ as the model has it."""
        n = structured.size()
        if self.full and n * n > LARGEST:
            raise UserError(f"a full covariance of {n} global latents is too large; use Family.mean_field() or full=False")
        theta = structured.theta(data)
        if self.encoder is not None and data is not None:
            theta = {**theta, **encode(self.encoder, {}, data)[1]}
        return Shared(self._jittered(key, gaussian.init_global(n, self.start, full=self.full)), theta)

    def init_local(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Locals:
        """η_L for the latents that this silo's data asks for; nothing where they are amortised."""
        n, blocks = structured.size(), structured.blocks(data)
        if self.encoder is not None:
            return {}
        found = {}
        for place, (name, (count, d)) in enumerate(blocks.items()):
            if (self.coupled or self.moving_scale) and count * d * n > LARGEST:
                raise UserError(f"{count} × {d} local latents cannot depend on {n} global ones; use coupled=False")
            if self.dense and count * d * d > LARGEST:
                raise UserError(f"{d} local latents in a block are too many for a covariance; use dense=False")
            options = {"dense": self.dense, "coupled": self.coupled, "moving_scale": self.moving_scale}
            key = jax.random.fold_in(key, place)
            found[name] = self._jittered(key, gaussian.init_local(count, d, n, self.start, **options))
        return found

    def _jittered(self, key: PRNGKeyArray, q: Any) -> Any:
        return q._replace(mean=self.jitter * jax.random.normal(key, q.mean.shape)) if self.jitter else q

    def check_draws(self, structured: Structured, data: Any) -> None:
        """Refuse K draws where the elements of a plate do not stand apart."""
        if self.bound > 1 and (why := inseparable(structured, data)):
            raise UserError(f"{why}, so draws cannot be weighed block by block; use bound=1 for this model")

    def noise(self, key: PRNGKeyArray, structured: Structured, data: Any) -> Noise:
        """ε_L for every Monte Carlo sample and importance draw; latents in no plate are drawn once a sample."""
        found, plates = {}, structured.plates(data)
        for place, (name, (_, d)) in enumerate(structured.blocks(data).items()):
            shape = (self.draws, self.bound if name else 1, plates[name].size, d)
            # Each derivation of a key takes as long as the rest of a small model's step: so none for the first plate.
            found[name] = jax.random.normal(jax.random.fold_in(key, 2 + place) if place else key, shape)
        return found

    def locals_of(self, structured: Structured, theta: Values, eta: Locals, data: Any, indices: Indices) -> Locals:
        """η_L of the plate elements in `indices`: kept, or given by the inference network."""
        if self.encoder is not None:
            given, _ = encode(self.encoder, theta, data, indices)
            eta = {name: gaussian.Local(mean, log_scale, None, None, None) for name, (mean, log_scale) in given.items()}
            expected = structured.blocks(data)
            if eta.keys() != expected.keys():
                raise UserError(
                    f"encoder gives {', '.join(eta) or 'nothing'}, but the silo has latents in "
                    f"{', '.join(expected) or 'no plate'}; it must return {{plate: (mean, log_scale)}} for each of them"
                )
            for name, (mean, log_scale) in given.items():
                if not mean.shape == log_scale.shape == (len(mean), expected[name][1]):
                    raise UserError(
                        f"encoder gives {name} a mean of shape {mean.shape} and a log-scale of shape {log_scale.shape}, but "
                        f"both must have {expected[name][1]} columns, one for each number of an element"
                    )
        sizes = {name: plate for name, plate in structured.plates(data).items() if name in eta}
        chosen = {}
        for name, q in eta.items():
            whole = q.mean.shape[0] == sizes[name].total and name in indices
            chosen[name] = jax.tree.map(lambda leaf, name=name: leaf[indices[name]], q) if whole else q
        return chosen


class Silo(NamedTuple):
    """A silo as the functions below see it: which posteriors are searched, the model, and the silo's data."""

    family: Family
    structured: Structured
    data: Any

    def locals_of(self, theta: Values, eta: Locals, indices: Indices) -> Locals:
        """η_L of the plate elements in `indices`."""
        return self.family.locals_of(self.structured, theta, eta, self.data, indices)


def silo_gradient(
    silo: Silo, shared: Shared, eta: Locals, noise_G: Float[Array, "s n"], noise_L: Noise, indices: Indices
) -> tuple[Float[Array, ""], Shared, Locals]:
    """The silo's term of the bound with its gradients for (η_G, θ) and η_L, averaged over the Monte Carlo samples."""
    used, to_kept = jax.vjp(lambda theta, eta: silo.locals_of(theta, eta, indices), shared.theta, eta)
    scales = {name: plate.scale for name, plate in silo.structured.plates(silo.data).items()}

    def sample(noise_G: Float[Array, " n"], noise_L: dict[str, Float[Array, "k blocks d"]]) -> Any:
        z_G, to_eta_G = jax.vjp(lambda q: gaussian.draw_global(q, noise_G), shared.eta)

        def draw(q: Locals, mean_G: Float[Array, " n"], z_G: Float[Array, " n"]) -> Any:
            each = lambda name, one: jax.vmap(lambda noise: gaussian.draw_local(one, noise, z_G - mean_G))(noise_L[name])  # noqa: E731
            return {name: each(name, one) for name, one in q.items()}

        z_L, to_locals = jax.vjp(draw, used, shared.eta.mean, z_G)

        def log_weights(z_G: Float[Array, " n"], theta: Values, z_L: Any) -> dict[str, Float[Array, "k blocks"]]:
            offset = z_G - shared.eta.mean  # η held fixed, Z_G not: it is one of the latents

            def terms(z_L: dict[str, Float[Array, "blocks d"]]) -> dict[str, Float[Array, " blocks"]]:
                found = silo.structured.log_silo(theta, z_G, z_L, silo.data, indices)
                for name, q in used.items():
                    found[name] = found[name] - gaussian.log_local(q, z_L[name], offset)
                return found

            alone = {name: value[0] for name, value in z_L.items() if not name}
            many = {name: value for name, value in z_L.items() if name}
            if not many:
                return jax.tree.map(lambda leaf: leaf[None], terms(alone))
            return jax.vmap(lambda z_L: terms({**alone, **z_L}))(many)

        log_w, to_inputs = jax.vjp(log_weights, z_G, shared.theta, z_L)
        value = sum((scales[name] * jnp.sum(_log_mean(part)) for name, part in log_w.items()), jnp.zeros(()))
        share = {name: jnp.ones_like(part) if len(part) == 1 else jax.nn.softmax(part, axis=0) for name, part in log_w.items()}
        at_z_G, at_theta, at_z_L = to_inputs({name: part * scales[name] for name, part in share.items()})
        twice = {name: value * share[name][..., None] if name else value for name, value in at_z_L.items()}
        at_locals, at_mean, _ = to_locals(twice)
        through = to_locals(at_z_L)[2]
        (at_eta,) = to_eta_G(at_z_G + through)
        return value, Shared(at_eta._replace(mean=at_eta.mean + at_mean), at_theta), at_locals

    value, for_shared, for_used = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), jax.vmap(sample)(noise_G, noise_L))
    more_theta, for_eta = to_kept(for_used)
    return value, for_shared._replace(theta=jax.tree.map(jnp.add, for_shared.theta, more_theta)), for_eta


def _log_mean(log_w: Float[Array, "k blocks"]) -> Float[Array, " blocks"]:
    return log_w[0] if len(log_w) == 1 else jax.nn.logsumexp(log_w, axis=0) - math.log(len(log_w))


def local_search(
    silo: Silo,
    log_density: Density,
    scale: float,
    optimiser: optax.GradientTransformation,
    steps: int,
    key: PRNGKeyArray,
    start: tuple[Shared, Locals],
    state: Any = None,
) -> tuple[tuple[Shared, Locals], Any, tuple[Float[Array, ""], Float[Array, ""]]]:
    """Steps of a silo on its own: up the bound of `log_density` and `scale` times the silo's term, in η_G, θ and η_L.

    Also gives both terms, averaged over the last tenth of the steps.
    """
    state = optimiser.init(start) if state is None else state

    def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, tuple[Float[Array, ""], Float[Array, ""]]]:
        (shared, eta), state = carry
        noise_G, noise_L, indices = chance(silo, jax.random.fold_in(key, number))
        own, for_shared = own_gradient(log_density, shared, noise_G)
        value, more, for_eta = silo_gradient(silo, shared, eta, noise_G, noise_L, indices)
        gradient = (jax.tree.map(lambda a, b: a + scale * b, for_shared, more), jax.tree.map(lambda a: scale * a, for_eta))
        values, state = ascend(optimiser, (shared, eta), gradient, state)
        return (values, state), (own, value)

    (values, state), bounds = jax.lax.scan(step, (start, state), jnp.arange(steps))
    return values, state, jax.tree.map(lambda leaf: jnp.mean(leaf[-max(1, steps // 10) :]), bounds)


def moved(eta: Locals, shared: Shared, centre: Float[Array, " n"]) -> Locals:
    """q(Z_L | Z_G) as it was with μ_G at `centre`, written with the μ_G that has arrived."""
    return {name: gaussian.recentre(q, shared.eta.mean - centre) for name, q in eta.items()}


def chance(silo: Silo, key: PRNGKeyArray) -> tuple[Float[Array, "s n"], Noise, Indices]:
    """ε_G, ε_L and the elements of subsampled plates for one step."""
    family, structured, data = silo
    noise_G = jax.random.normal(jax.random.fold_in(key, 1), (family.draws, structured.size()))
    return noise_G, family.noise(key, structured, data), structured.subsample(jax.random.fold_in(key, 2), data)


def adapt(
    silo: Silo, optimiser: optax.GradientTransformation, steps: int, key: PRNGKeyArray, shared: Shared, eta: Locals
) -> Locals:
    """η_L of a silo, also of one that never trained, given what all silos share."""

    def step(carry: Any, number: Int[Array, ""]) -> tuple[Any, None]:
        eta, state = carry
        noise_G, noise_L, indices = chance(silo, jax.random.fold_in(key, number))
        _, _, gradient = silo_gradient(silo, shared, eta, noise_G, noise_L, indices)
        return ascend(optimiser, eta, gradient, state), None

    return jax.lax.scan(step, (eta, optimiser.init(eta)), jnp.arange(steps))[0][0]


def posterior_draws(
    silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, count: int
) -> tuple[Float[Array, "s n"], dict[str, Float[Array, "s blocks d"]]]:
    """Draws of (Z_G, Z_L) from q, on the real line; every element of a plate, also of one that is subsampled."""
    for_G, for_L = jax.random.split(key)
    used = silo.locals_of(shared.theta, eta, silo.structured.everyone(silo.data))

    def draw(noise: Float[Array, " n"], key: PRNGKeyArray) -> Any:
        z_G = gaussian.draw_global(shared.eta, noise)
        z_L = {}
        for place, (name, q) in enumerate(used.items()):
            noise_L = jax.random.normal(jax.random.fold_in(key, place), q.mean.shape)
            z_L[name] = gaussian.draw_local(q, noise_L, z_G - shared.eta.mean)
        return z_G, z_L

    return jax.vmap(draw)(jax.random.normal(for_G, (count, silo.structured.size())), jax.random.split(for_L, count))


def predict(silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, *, count: int = 200, own: bool = False) -> Values:
    """Posterior predictive draws for a silo's `own` data, or for new rows, whose plate elements come from the prior.

    Elements that rows refer to by index are those that the silo knows, and keep their posterior.
    """
    if not own:
        sizes = {name: plate.total for name, plate in silo.structured.plates(silo.data).items()}
        known = ("", *(silo.data.indexed if isinstance(silo.data, Linked) else ()))
        eta = {name: q for name, q in eta.items() if name in known and sizes.get(name, 1) == q.mean.shape[0]}
    for_draws, for_sites = jax.random.split(key)
    z_G, z_L = posterior_draws(silo, for_draws, shared, eta, count)

    def draw(arguments: Any) -> Values:
        key, z_G, z_L = arguments
        return silo.structured.predictive(key, shared.theta, z_G, z_L, silo.data)

    return jax.lax.map(draw, (jax.random.split(for_sites, count), z_G, z_L), batch_size=16)


def log_evidence(
    silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, z: Float[Array, "s n"], inner: int
) -> Float[Array, " s"]:
    """log p(y_j | Z_G) at draws of Z_G, by importance sampling from q(Z_L | Z_G).

    Plate elements are weighed one by one; latents in no plate are weighed with all of the silo. The noise is the same for all
    Z_G, so that most of its error is too, and cancels where only differences matter.
    """
    everyone = silo.structured.everyone(silo.data)
    used = silo.locals_of(shared.theta, eta, everyone)
    outer = inner if "" in used else 1

    def weigh(z_G: Float[Array, " n"]) -> Float[Array, ""]:
        offset = z_G - shared.eta.mean

        def draw(name: str, key: PRNGKeyArray) -> Float[Array, "blocks d"]:
            noise = jax.random.normal(key, used[name].mean.shape)
            return gaussian.draw_local(used[name], noise, offset)

        def given(key: PRNGKeyArray) -> Float[Array, ""]:
            alone = {"": draw("", key)} if "" in used else {}

            def terms(key: PRNGKeyArray) -> dict[str, Float[Array, " blocks"]]:
                many = {name: draw(name, jax.random.fold_in(key, i)) for i, name in enumerate(used) if name}
                found = silo.structured.log_silo(shared.theta, z_G, {**alone, **many}, silo.data, everyone)
                for name, value in {**alone, **many}.items():
                    found[name] = found[name] - gaussian.log_local(used[name], value, offset)
                return found

            each = jax.vmap(terms)(jax.random.split(jax.random.fold_in(key, 1), inner))
            return sum((jnp.sum(_log_mean(part)) for part in each.values()), jnp.zeros(()))

        return jax.nn.logsumexp(jax.vmap(given)(jax.random.split(key, outer))) - math.log(outer)

    return jax.lax.map(weigh, z, batch_size=16)


def own_gradient(log_density: Density, shared: Shared, noise_G: Float[Array, "s n"]) -> tuple[Float[Array, ""], Shared]:
    """log p_θ(Z_G) − log q(Z_G), where p may be any density, with its gradient for (η_G, θ)."""
    fixed = jax.lax.stop_gradient(shared.eta)

    def term(shared: Shared, noise: Float[Array, " n"]) -> Float[Array, ""]:
        z = gaussian.draw_global(shared.eta, noise)
        return log_density(shared.theta, z) - gaussian.log_global(fixed, z)

    return jax.value_and_grad(lambda shared: jnp.mean(jax.vmap(lambda noise: term(shared, noise))(noise_G)))(shared)


def ascend(optimiser: optax.GradientTransformation, values: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
    """One step up along a gradient."""
    return move(optimiser, values, jax.tree.map(jnp.negative, gradient), state)


def adam(lr: float, decay: float, steps: int | None) -> optax.GradientTransformation:
    """Adam, whose step size falls geometrically to `decay` of itself over `steps`."""
    if decay == 1.0 or steps is None:
        return optax.adam(lr)
    return optax.adam(optax.exponential_decay(lr, steps, decay))
