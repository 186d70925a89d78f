"""What SFVI, SFVI-Avg and PVI share: a silo's term of the bound over a structured model, and what is done with it.

    L̂_j = log p_θ(y_j, Z_Lj | Z_G) − log q(Z_Lj | Z_G),        Z_L = (Z_S, Z_1, …, Z_B): the silo's own latents, and blocks

With K > 1 draws the silo's term is the locally enhanced bound (Geffner and Domke 2022), nested: for each block b
log 1/K Σ_k w_bk with w_bk = p(y_b, Z_b^k | Z_S, Z_G) / q(Z_b^k | Z_S, Z_G); with K draws of Z_S, each has the weight
W = p(Z_S | Z_G) / q(Z_S | Z_G) Π_b 1/K Σ_k w_bk, and the term is log 1/K Σ W. It is still a sum over silos.

Gradients are "sticking the landing" (Roeder et al. 2017) where K = 1, and doubly reparametrised (Tucker et al. 2019) otherwise.
With W̃ and w̃ normalised, a draw of a block counts for α = W̃ w̃. The path from η_b through Z_b has weight α², that from η_S
through Z_S and all blocks below it α W̃, and the parameters inside log q are held fixed; what flows to Z_G has weight α. All are
zero for every draw where q is the posterior.
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

from fedbayes import trees
from fedbayes.models.linked import Linked
from fedbayes.models.sites import Values
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian
from fedbayes.primitives.family import Family as Family
from fedbayes.primitives.family import Indices
from fedbayes.primitives.family import Locals as Locals
from fedbayes.primitives.family import Noise as Noise
from fedbayes.primitives.family import Shared as Shared

Density = Callable[[Values, Float[Array, " n"]], Float[Array, ""]]


class Silo(NamedTuple):
    """A silo as the functions below see it: which posteriors are searched, the model, and the silo's data."""

    family: Family
    structured: Structured
    data: Any

    def locals_of(self, theta: Values, eta: Locals, indices: Indices, z_G: Float[Array, " n"]) -> Locals:
        """η_L of the plate elements in `indices`; an encoder may read Z_G."""
        return self.family.locals_of(self.structured, theta, eta, self.data, indices, z_G)


def silo_gradient(
    silo: Silo, shared: Shared, eta: Locals, noise_G: Float[Array, "s n"], noise_L: Noise, indices: Indices
) -> tuple[Float[Array, ""], Shared, Locals]:
    """The silo's term of the bound with its gradients for (η_G, θ) and η_L, averaged over the Monte Carlo samples."""
    scales = {name: plate.scale for name, plate in silo.structured.plates(silo.data).items()}

    def sample(noise_G: Float[Array, " n"], noise_L: dict[str, Float[Array, "_k _blocks _d"]]) -> Any:
        z_G, to_eta_G = jax.vjp(lambda q: gaussian.draw_global(q, noise_G), shared.eta)
        outer = noise_L[""].shape[0] if "" in noise_L else 1
        noise_B = {name: noise.reshape(outer, -1, *noise.shape[1:]) for name, noise in noise_L.items() if name}

        def draw_silo(theta: Values, eta: Locals, mean_G: Float[Array, " n"], z_G: Float[Array, " n"]) -> Any:
            if "" not in noise_L:
                return {}
            q = silo.locals_of(theta, eta, indices, z_G)[""]
            return {"": jax.vmap(lambda noise: gaussian.draw_local(q, noise, z_G - mean_G))(noise_L[""])}

        def draw_blocks(theta: Values, eta: Locals, mean_G: Float[Array, " n"], z_G: Float[Array, " n"], z_S: Any) -> Any:
            q = silo.locals_of(theta, eta, indices, z_G)

            def given(z_S: Any, noise: Any) -> Any:
                offset = parents(q, z_G - mean_G, z_S)
                each = lambda name: jax.vmap(lambda one: gaussian.draw_local(q[name], one, offset))(noise[name])  # noqa: E731
                return {name: each(name) for name in noise}

            return jax.vmap(given)(z_S, noise_B) if outer > 1 else _lifted(given)(z_S, noise_B)

        def log_weights(z_G: Float[Array, " n"], theta: Values, z_S: Any, z_B: Any) -> dict[str, Float[Array, "o k _b"]]:
            q = silo.locals_of(shared.theta, eta, indices, z_G)  # η held fixed, Z_G not: it is one of the latents

            def terms(z_S: Any, z_B: Any) -> dict[str, Float[Array, " _blocks"]]:
                return _weights(silo, theta, q, z_G, z_G - shared.eta.mean, {**z_S, **z_B}, indices)

            def given(z_S: Any, z_B: Any) -> Any:
                if not z_B:
                    return jax.tree.map(lambda leaf: leaf[None], terms(z_S, {}))
                return jax.vmap(lambda z_B: terms(z_S, z_B))(z_B)

            return jax.vmap(given)(z_S, z_B) if outer > 1 else _lifted(given)(z_S, z_B)

        parameters = (shared.theta, eta, shared.eta.mean, z_G)
        z_S, to_silo = jax.vjp(draw_silo, *parameters)
        z_B, to_blocks = jax.vjp(draw_blocks, *parameters, z_S)
        log_w, to_inputs = jax.vjp(log_weights, z_G, shared.theta, z_S, z_B)
        zero = jnp.zeros(outer)
        total = sum((scales[name] * jnp.sum(_log_mean(part, 1), axis=1) for name, part in log_w.items()), zero)
        W, w = _share(total, 0), {name: _share(part, 1) for name, part in log_w.items()}
        alpha = {name: W[:, None, None] * part for name, part in w.items()}
        at_z_G, at_theta, at_z_S, at_z_B = to_inputs({name: part * scales[name] for name, part in alpha.items()})
        *for_blocks, _, _ = to_blocks({name: value * alpha[name][..., None] for name, value in at_z_B.items()})
        *_, through, below = to_blocks(at_z_B)
        if outer > 1:
            lifted = W.reshape(-1, 1, 1)
            *_, below_twice = to_blocks({name: value * lifted[..., None] for name, value in at_z_B.items()})
            twice = jax.tree.map(lambda own, more: own * lifted + more, at_z_S, below_twice)
        else:
            twice = jax.tree.map(jnp.add, at_z_S, below)
        *for_silo, _ = to_silo(twice)
        through = through + to_silo(jax.tree.map(jnp.add, at_z_S, below))[3]
        (at_eta,) = to_eta_G(at_z_G + through)
        more_theta, for_eta, at_mean = jax.tree.map(jnp.add, tuple(for_blocks), tuple(for_silo))
        at_theta = jax.tree.map(jnp.add, at_theta, more_theta)
        return _log_mean(total, 0), Shared(at_eta._replace(mean=at_eta.mean + at_mean), at_theta), for_eta

    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), jax.vmap(sample)(noise_G, noise_L))


def silo_bound(silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, draws: int) -> Float[Array, ""]:
    """The silo's term of the bound, averaged over so many draws."""
    noise_G, noise_L, indices = chance(silo._replace(family=dataclasses.replace(silo.family, draws=draws)), key)
    return silo_gradient(silo, shared, eta, noise_G, noise_L, indices)[0]


def parents(q: Locals, offset: Float[Array, " n"], z: dict[str, Float[Array, "_blocks _d"]]) -> Float[Array, " m"]:
    """What the mean of a block moves with: Z_G − μ_G, and Z_S − μ_S where the silo has latents of its own."""
    return jnp.concatenate([offset, (z[""] - q[""].mean)[0]]) if "" in q else offset


def _weights(
    silo: Silo, theta: Values, q: Locals, z_G: Float[Array, " n"], offset: Float[Array, " n"], z: Any, indices: Indices
) -> dict[str, Float[Array, " _blocks"]]:
    """log p(y, Z_L | Z_G) − log q(Z_L | Z_G) by block."""
    found = silo.structured.log_silo(theta, z_G, z, silo.data, indices)
    below = parents(q, offset, z)
    return {**found, **{name: found[name] - gaussian.log_local(q[name], z[name], below if name else offset) for name in q}}


def _lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` over a first axis of length 1, without the cost of a mapped one."""

    def lifted(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], arguments)))

    return lifted


def _share(log_w: Float[Array, "*n"], axis: int) -> Float[Array, "*n"]:
    return jnp.ones_like(log_w) if log_w.shape[axis] == 1 else jax.nn.softmax(log_w, axis=axis)


def _log_mean(log_w: Float[Array, "*n"], axis: int) -> Array:
    count = log_w.shape[axis]
    return jnp.squeeze(log_w, axis) if count == 1 else jax.nn.logsumexp(log_w, axis=axis) - math.log(count)


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
        units = (shared_units(silo.family, shared), local_units(silo, shared, eta))
        values, state = ascend(optimiser, (shared, eta), gradient, state, units)
        return (values, state), (own, value)

    (values, state), bounds = jax.lax.scan(step, (start, state), jnp.arange(steps))
    return values, state, jax.tree.map(lambda leaf: jnp.mean(leaf[-max(1, steps // 10) :]), bounds)


def moved(eta: Locals, shared: Shared, centre: Float[Array, " n"]) -> Locals:
    """q(Z_L | Z_G) as it was with μ_G at `centre`, written with the μ_G that has arrived."""
    shift = shared.eta.mean - centre
    silo = {"": gaussian.recentre(eta[""], shift)} if "" in eta else {}
    below = parents(eta, shift, {name: q.mean for name, q in silo.items()})  # the mean of Z_S has moved with μ_G
    return {name: silo[name] if name in silo else gaussian.recentre(q, below) for name, q in eta.items()}


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
        return ascend(optimiser, eta, gradient, state, local_units(silo, shared, eta)), None

    return jax.lax.scan(step, (eta, optimiser.init(eta)), jnp.arange(steps))[0][0]


def posterior_draws(
    silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, count: int
) -> tuple[Float[Array, "s n"], dict[str, Float[Array, "s blocks d"]]]:
    """Draws of (Z_G, Z_L) from q, on the real line; every element of a plate, also of one that is subsampled."""
    for_G, for_L = jax.random.split(key)
    everyone = silo.structured.everyone(silo.data)

    def draw(noise: Float[Array, " n"], key: PRNGKeyArray) -> Any:
        z_G = gaussian.draw_global(shared.eta, noise)
        q = silo.locals_of(shared.theta, eta, everyone, z_G)
        keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(q)}
        return z_G, _drawn(q, keys, z_G - shared.eta.mean)

    return jax.vmap(draw)(jax.random.normal(for_G, (count, silo.structured.size())), jax.random.split(for_L, count))


def _drawn(
    q: Locals, keys: dict[str, PRNGKeyArray], offset: Float[Array, " n"], z_S: dict[str, Any] | None = None
) -> dict[str, Float[Array, "_blocks _d"]]:
    """Draws of Z_L from q(Z_L | Z_G), or of the blocks alone where Z_S is given; in the order of q."""
    noise = {name: jax.random.normal(one, q[name].mean.shape) for name, one in keys.items()}
    if z_S is None:
        z_S = {"": gaussian.draw_local(q[""], noise[""], offset)} if "" in q else {}
    below = parents(q, offset, z_S)
    return {name: z_S[name] if name in z_S else gaussian.draw_local(q[name], noise[name], below) for name in q}


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

    def weigh(z_G: Float[Array, " n"]) -> Float[Array, ""]:
        offset, q = z_G - shared.eta.mean, silo.locals_of(shared.theta, eta, everyone, z_G)
        outer = inner if "" in q else 1

        def given(key: PRNGKeyArray) -> Float[Array, ""]:
            z_S = {"": _drawn({"": q[""]}, {"": key}, offset)[""]} if "" in q else {}

            def terms(key: PRNGKeyArray) -> dict[str, Float[Array, " _blocks"]]:
                keys = {name: jax.random.fold_in(key, place) for place, name in enumerate(q) if name}
                z = _drawn(q, keys, offset, z_S)
                return _weights(silo, shared.theta, q, z_G, offset, z, everyone)

            each = jax.vmap(terms)(jax.random.split(jax.random.fold_in(key, 1), inner))
            return sum((jnp.sum(_log_mean(part, 0)) for part in each.values()), jnp.zeros(()))

        return _log_mean(jax.vmap(given)(jax.random.split(key, outer)), 0)

    return jax.lax.map(weigh, z, batch_size=16)


def own_gradient(log_density: Density, shared: Shared, noise_G: Float[Array, "s n"]) -> tuple[Float[Array, ""], Shared]:
    """log p_θ(Z_G) − log q(Z_G), where p may be any density, with its gradient for (η_G, θ)."""
    fixed = jax.lax.stop_gradient(shared.eta)

    def term(shared: Shared, noise: Float[Array, " n"]) -> Float[Array, ""]:
        z = gaussian.draw_global(shared.eta, noise)
        return log_density(shared.theta, z) - gaussian.log_global(fixed, z)

    return jax.value_and_grad(lambda shared: jnp.mean(jax.vmap(lambda noise: term(shared, noise))(noise_G)))(shared)


def shared_units(family: Family, shared: Shared) -> Shared:
    """The unit that each parameter is stepped in, so that a model's own units do not matter.

    A mean has the standard deviation that q has now, in parts of `start`: at the start that is the prior's. θ has 1.
    """
    eta = gaussian.global_units(shared.eta)
    return Shared(eta._replace(mean=eta.mean / family.part), jax.tree.map(jnp.ones_like, shared.theta))


def local_units(silo: Silo, shared: Shared, eta: Locals) -> Locals:
    """The same for η_L.

    What moves with Z_G, by C and D, is counted in units between q's and the prior's: by q's alone the noise of a step would be
    the larger the narrower q is, which makes q narrower still.
    """
    above = jnp.sqrt(gaussian.global_units(shared.eta).mean * silo.structured.global_spread().scale)
    below = jnp.concatenate([above, jnp.exp(eta[""].log_scale[0])]) if "" in eta else above
    units = {name: gaussian.local_units(q, below if name else above) for name, q in eta.items()}
    return {name: one._replace(mean=one.mean / silo.family.part) for name, one in units.items()}


def ascend(optimiser: optax.GradientTransformation, values: Any, gradient: Any, state: Any, units: Any) -> tuple[Any, Any]:
    """One step up along a gradient, in coordinates of which each is counted in its unit."""
    down = jax.tree.map(lambda slope, unit: -slope * unit, gradient, units)
    with trees.other_peoples_code():
        updates, state = optimiser.update(down, state, values)
    return jax.tree.map(lambda value, update, unit: value + update * unit, values, updates, units), state


def adam(lr: float, decay: float, steps: int | None) -> optax.GradientTransformation:
    """Adam, whose step size falls geometrically to `decay` of itself over `steps`."""
    if decay == 1.0 or steps is None:
        return optax.adam(lr)
    return optax.adam(optax.exponential_decay(lr, steps, decay))
