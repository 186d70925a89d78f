"""NUTS in a silo: several chains side by side that keep their place, step size and scales from round to round.

NumPyro's kernel is compiled once for a form of data. Chains share one step size (dual averaging) and one mass matrix, both
from all chains together: dense for Z_G, diagonal for Z_L. The first call warms up in windows as Stan does, later ones only
settle the step size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from numpyro.infer.hmc import hmc
from numpyro.infer.hmc_util import dual_averaging

from fedbayes.primitives import small
from fedbayes.trees import other_peoples_code

WINDOWS = ((75, 25, 50, 75, 50), (20, 0, 0, 40, 30), (20, 0, 0, 40, 30), (30, 0, 0, 0, 0))
"""Steps of the windows of a warm-up: the first, the second, the third, and all later ones."""
LEARNS_MASS = (False, True, True, True, False)
"""Whether the mass matrix is computed anew after a window."""
DEPTH = (6, 10)
"""Doublings of a trajectory, at most: while warming up, and of a draw."""
EARLY = 2
"""Visits up to which draws too have the trajectories of a warm-up: scales are not known yet, and long ones would be in vain."""
ACCEPT = 0.85
LARGEST = 99.0
"""The r-hat of chains that do not move."""
BATCHES = 5
"""Parts of a chain, for the jackknife and for effective sizes."""

Locals = dict[str, Any]
Log = Callable[[Float[Array, " n"], Locals], Float[Array, ""]]


class Chains(NamedTuple):
    """What a silo keeps of its chains: places, step size, and the variance of each local latent."""

    u: Float[Array, "c n"]
    z: dict[str, Float[Array, "c blocks d"]]
    step_size: Float[Array, ""]
    variance: dict[str, Float[Array, "blocks d"]]


class Draws(NamedTuple):
    """Draws of Z_G and Z_L, the gradient of the log density with respect to Z_G, and which transitions diverged.

    The first `taken` of each chain are draws; the rest is empty.
    """

    u: Float[Array, "c s n"]
    z: dict[str, Float[Array, "c s blocks d"]]
    gradient: Float[Array, "c s n"]
    diverging: Bool[Array, "c s"]
    moving: Float[Array, ""]
    """The share of transitions that moved."""
    taken: Int[Array, ""]


class _Mass(NamedTuple):
    inverse: dict[tuple[str, ...], Array]
    root: dict[tuple[str, ...], Array]


def nuts(
    log_density: Log,
    key: PRNGKeyArray,
    start: Chains,
    visits: Int[Array, ""],
    count: Int[Array, ""],
    most: int,
    *,
    accept: float = ACCEPT,
    patient: bool = False,
) -> tuple[Draws, Chains]:
    """`count` draws a chain, `most` at most, of a density over Z_G (standardised, so that its covariance is near I) and Z_L.

    Args:
        log_density: Of (Z_G, Z_L), up to a constant.
        key: Of all that is random.
        start: The chains as they are.
        visits: How often they have run before: at first they warm up in full.
        count: Draws to take.
        most: The room that is made for them.
        accept: The mean acceptance that the step size is chosen for.
        patient: Whether draws may have long trajectories at the first visits too.
    """
    chains, n = start.u.shape
    names = tuple(sorted(start.z))
    z = {"G": start.u, **{f"L{name}": start.z[name] for name in names}}
    blocks = [("G",)] + ([tuple(f"L{name}" for name in names)] if names else [])

    def potential(z: dict[str, Array]) -> Float[Array, ""]:
        value = -log_density(z["G"], {name: z[f"L{name}"] for name in names})
        # Far out, a momentum's square is beyond single precision, and its sign is chance: nothing there may be accepted.
        return jnp.where(value < 1e15, value, jnp.inf)

    init, step = hmc(potential)
    variance = jnp.concatenate([jnp.ravel(start.variance[name]) for name in names]) if names else jnp.zeros(0)
    scales = (jnp.eye(n), variance)
    one = lambda z, key: init(  # noqa: E731
        z, 1, adapt_step_size=False, adapt_mass_matrix=False, dense_mass=[("G",)], max_tree_depth=DEPTH, rng_key=key
    )
    with other_peoples_code():
        state = jax.vmap(one)(z, jax.random.split(key, chains))
    adapt = jax.tree.map(lambda leaf: leaf[0], state.adapt_state)
    ss_init, ss_update = dual_averaging()

    def move(state: Any, step_size: Any, mass: _Mass, drawing: Any) -> Any:
        def each(one: Any) -> Any:
            used = adapt._replace(step_size=step_size, inverse_mass_matrix=mass.inverse, mass_matrix_sqrt=mass.root)
            after = step(one._replace(adapt_state=used, i=drawing.astype(jnp.int32)))  # NumPyro's counter chooses the depth
            return after._replace(adapt_state=None, i=None)

        with other_peoples_code():
            return jax.vmap(each)(state)

    def flat(z: dict[str, Array]) -> Float[Array, "c d"]:
        return (
            jnp.concatenate([z[f"L{name}"].reshape(chains, -1) for name in names], axis=1) if names else jnp.zeros((chains, 0))
        )

    # One loop over windows around one loop over steps, so that the kernel is compiled once. The last window draws.
    last, far = len(LEARNS_MASS), (visits >= EARLY) | jnp.asarray(patient)
    lengths = jnp.append(jnp.array(WINDOWS)[jnp.minimum(visits, len(WINDOWS) - 1)], count)
    learns = jnp.append(jnp.array(LEARNS_MASS), False) & (lengths > 0)
    room = {name: jnp.zeros((chains, most, *leaf.shape[1:])) for name, leaf in z.items()}
    store = (room, jnp.zeros((chains, most, n)), jnp.zeros((chains, most), bool), jnp.zeros(()))

    def window(number: Any, carry: Any) -> Any:
        state, (scales, step_size), store = carry
        mass = _mass(blocks, *scales)
        sums = (jnp.zeros(n), jnp.zeros((n, n)), jnp.zeros(variance.size), jnp.zeros(variance.size))
        origin = (jnp.mean(state.z["G"], axis=0), jnp.mean(flat(state.z), axis=0))

        def one_step(i: Any, carry: Any) -> Any:
            state, average, sums, store = carry
            used = jnp.where(number == last, step_size, jnp.exp(average[0]))
            before = state.potential_energy
            state = move(state, used, mass, (number == last) & far)
            with other_peoples_code():
                average = ss_update(accept - jnp.mean(state.accept_prob), average)
            g, l = state.z["G"] - origin[0][None], flat(state.z) - origin[1][None]  # noqa: E741
            more = (jnp.sum(g, axis=0), g.T @ g, jnp.sum(l, axis=0), jnp.sum(l**2, axis=0))
            room, gradients, diverging, moved = store
            place = jnp.where(number == last, i, most)  # beyond the room, where nothing is written
            room = {name: leaf.at[:, place].set(state.z[name], mode="drop") for name, leaf in room.items()}
            gradients = gradients.at[:, place].set(-state.z_grad["G"], mode="drop")
            diverging = diverging.at[:, place].set(state.diverging, mode="drop")
            moved = moved + jnp.where(number == last, jnp.mean(state.potential_energy != before, dtype=moved.dtype), 0.0)
            return state, average, jax.tree.map(jnp.add, sums, more), (room, gradients, diverging, moved)

        begin = (state, ss_init(jnp.log(3 * step_size)), sums, store)
        # Dual averaging starts above the step size at hand; at the first step it is the step size itself.
        begin = (begin[0], (jnp.log(step_size), *begin[1][1:]), *begin[2:])
        state, average, sums, store = jax.lax.fori_loop(0, lengths[number], one_step, begin)
        learnt = learns[number]
        total = jnp.maximum(lengths[number] * chains, 2).astype(variance.dtype)
        mean_G, mean_L = sums[0] / total, sums[2] / total
        covariance = sums[1] / total - jnp.outer(mean_G, mean_G)
        found = (covariance, jnp.maximum(sums[3] / total - mean_L**2, 0.0))
        share = total / (total + 5.0 + n)  # of few draws some of the old scale is kept
        scales = jax.tree.map(lambda new, old: jnp.where(learnt, share * new + (1 - share) * old, old), found, scales)
        adapted = (lengths[number] > 0) & (number < last)
        settled = jnp.where(learnt, jnp.exp(average[0]), jnp.exp(average[1]))
        step_size = jnp.where(adapted, jnp.clip(settled, 1e-6, 10.0), step_size)
        return state, (scales, step_size), store

    begin = (state._replace(adapt_state=None, i=None), (scales, start.step_size), store)
    state, (_, step_size), store = jax.lax.fori_loop(0, last + 1, window, begin)
    room, gradients, diverging, moved = store
    draws = Draws(
        room["G"],
        {name: room[f"L{name}"] for name in names},
        gradients,
        diverging,
        moved / jnp.maximum(count, 1).astype(moved.dtype),
        count,
    )
    kept = draw_mask(draws)
    variance_L = {name: variance_of(value, kept) for name, value in draws.z.items()}
    return draws, Chains(state.z["G"], {name: state.z[f"L{name}"] for name in names}, step_size, variance_L)


def _mass(blocks: list[tuple[str, ...]], covariance: Float[Array, "n n"], variance: Float[Array, " d"]) -> _Mass:
    root = small.inverse_root(small.cholesky(covariance)).T
    inverse, roots = {blocks[0]: covariance}, {blocks[0]: root}
    if len(blocks) > 1:
        inverse[blocks[1]], roots[blocks[1]] = variance, 1 / jnp.sqrt(variance)
    return _Mass(inverse, roots)


def draw_mask(draws: Draws) -> Bool[Array, " s"]:
    """Which of the places hold draws."""
    return jnp.arange(draws.u.shape[1]) < draws.taken


def mean_of(value: Float[Array, "c s *d"], kept: Bool[Array, " s"]) -> Float[Array, " *d"]:
    """The mean over chains and the draws that are kept."""
    weight = kept.reshape((1, -1) + (1,) * (value.ndim - 2))
    total = jnp.maximum(jnp.sum(kept) * value.shape[0], 2).astype(value.dtype)
    return jnp.sum(jnp.where(weight, value, 0.0), axis=(0, 1)) / total


def variance_of(value: Float[Array, "c s *d"], kept: Bool[Array, " s"]) -> Float[Array, " *d"]:
    """The variance over chains and the draws that are kept."""
    weight = kept.reshape((1, -1) + (1,) * (value.ndim - 2))
    total = jnp.maximum(jnp.sum(kept) * value.shape[0], 2).astype(value.dtype)
    mean = mean_of(value, kept)[None, None]
    return jnp.maximum(jnp.sum(jnp.where(weight, (value - mean) ** 2, 0.0), axis=(0, 1)) / total, 1e-10)


STUCK = 0.05
"""A share of transitions that moved below which draws say nothing."""


class Health(NamedTuple):
    """How well a silo's chains mixed, and how far its tilted Z_G is from a Gaussian."""

    rhat: Float[Array, ""]
    """The largest split r-hat of a latent, global or local."""
    ess: Float[Array, ""]
    """The least effective number of draws of a global latent."""
    divergences: Float[Array, ""]
    draws: Float[Array, ""]
    moving: Float[Array, ""]
    """The share of transitions that moved."""
    skew: Float[Array, ""]
    """The largest skewness of a global latent, in absolute value."""
    kurtosis: Float[Array, ""]
    """The largest excess kurtosis of a global latent, in absolute value."""


def unknown_health() -> Health:
    """Before the first draw."""
    return Health(*(jnp.zeros(()) for _ in Health._fields))


def health(draws: Draws) -> Health:
    """Diagnostics of a silo's chains."""
    kept, chains = draw_mask(draws), draws.u.shape[0]
    total = jnp.maximum(draws.taken * chains, 2).astype(draws.u.dtype)
    everything = [draws.u, *(value.reshape(*value.shape[:2], -1) for value in draws.z.values())]
    rhat = jnp.max(jnp.stack([jnp.max(_split_rhat(value, draws.taken), initial=1.0) for value in everything]))
    centred = jnp.where(kept[None, :, None], draws.u - (jnp.sum(draws.u, axis=(0, 1)) / total)[None, None], 0.0)
    second, third, fourth = (jnp.sum(centred**power, axis=(0, 1)) / total for power in (2, 3, 4))
    second = jnp.maximum(second, 1e-12)
    means, size = part_means(draws.u, draws.taken, BATCHES)
    between = jnp.var(means.reshape(-1, means.shape[-1]), axis=0, ddof=1)
    ess = jnp.minimum(second / jnp.maximum(size * between, 1e-12), 1.0) * total
    return Health(
        rhat,
        jnp.min(ess, initial=jnp.inf),
        jnp.sum(draws.diverging & kept[None]).astype(draws.u.dtype),
        total,
        draws.moving,
        jnp.max(jnp.abs(third) / second**1.5, initial=0.0),
        jnp.max(jnp.abs(fourth / second**2 - 3.0), initial=0.0),
    )


def part_means(
    value: Float[Array, "c s d"], count: Int[Array, ""], parts: int
) -> tuple[Float[Array, "c p d"], Float[Array, ""]]:
    """The mean of each of some equal parts of each chain, and how many draws a part has."""
    size = jnp.maximum(count // parts, 1)
    part = jnp.arange(value.shape[1]) // size
    size = size.astype(value.dtype)
    return jnp.einsum("ps,csd->cpd", (part[None, :] == jnp.arange(parts)[:, None]).astype(value.dtype) / size, value), size


def _split_rhat(value: Float[Array, "c s d"], count: Int[Array, ""]) -> Float[Array, " d"]:
    """R-hat of the halves of all chains."""
    origin = jnp.mean(value[:, 0], axis=0)
    means, size = part_means(value - origin[None, None], count, 2)
    squares, _ = part_means((value - origin[None, None]) ** 2, count, 2)
    within = jnp.mean(jnp.maximum(squares - means**2, 0.0), axis=(0, 1))
    between = jnp.var(means.reshape(-1, means.shape[-1]), axis=0, ddof=1)
    ratio = jnp.sqrt((size - 1) / size + between / jnp.where(within > 0, within, 1.0))
    return jnp.where(within > 0, jnp.minimum(ratio, LARGEST), LARGEST)
