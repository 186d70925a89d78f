"""The evidence of a silo, log p(y_j | Z_G), at given points: what a verdict on q(Z_G) and its correction need of the silos.

Given Z_G, a silo finds the mode and the curvature of log p(y_j, Z_L | Z_G) by Newton steps from its q(Z_L | Z_G), and weighs
draws around the mode from a density with heavier tails than a normal one,

    log L̂ = log 1/K Σ_k p(y_j, Z_L^k | Z_G) / proposal(Z_L^k | Z_G),

element by element of a plate. So it does not matter how good q(Z_L | Z_G) is, and weights are bounded. Latents in no plate are
drawn first, and the elements of plates given each of them, around a mode that moves with them. The noise is the same for all
Z_G, so that most of its error is too, and cancels where only differences matter. Draws come in two independent halves: by both
and each of them the O(1/K) bias of a logarithm is removed, and their difference tells the Monte Carlo error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.primitives import gaussian, noises, small
from fedbayes.primitives.variational import Locals, Shared, Silo, parents

NEWTON = 4
WIDEST = 24
"""Latents of a block and of the silo together up to which their curvature is found."""
BATCH = 16
"""Points that are evaluated side by side."""
CHECKED = 256
"""Points at which the moments of Z_L are compared."""
FLOOR = -1e30
"""Stands for the logarithm of 0, which must not cross the wire as it is."""

Blocks = dict[str, Float[Array, "blocks d"]]


class Told(NamedTuple):
    """log p(y_j | Z_G) at each point, the difference between two halves of the draws, and how q(Z_L | Z_G) compares."""

    evidence: Float[Array, " s"]
    difference: Float[Array, " s"]
    shift: Float[Array, " latents"]
    """|mean under q − mean under p(Z_L | y_j, Z_G)| in standard deviations of the latter, for each latent of the silo."""
    ratio: Float[Array, " latents"]
    """The standard deviation of q over the right one."""


class _Proposal(NamedTuple):
    """A block's mode, the Cholesky factor of its precision, and how the mode moves with the silo's own latents."""

    mode: Float[Array, "blocks d"]
    root: Float[Array, "blocks d d"]
    follow: Float[Array, "blocks d d0"] | None


class _Weighed(NamedTuple):
    """log L̂, the difference between its halves, and the first two moments of Z_L about q's centre."""

    evidence: Float[Array, ""]
    difference: Float[Array, ""]
    mean: Blocks
    square: Blocks


def told(silo: Silo, key: PRNGKeyArray, shared: Shared, eta: Locals, z: Float[Array, "s n"], inner: int) -> Told:
    """What a silo tells of its evidence at `z`, by `inner` draws, a multiple of 16. Moments are over the first points."""
    everyone = silo.structured.everyone(silo.data)
    used = {name: q for name, q in silo.locals_of(shared.theta, eta, everyone, shared.eta.mean).items() if q.mean.size}

    def terms(z_G: Float[Array, " n"], z_L: Blocks) -> dict[str, Float[Array, " blocks"]]:
        return silo.structured.log_silo(shared.theta, z_G, z_L, silo.data, everyone)

    if not used:
        exact = jax.lax.map(lambda one: _total(terms(one, {})), z, batch_size=BATCH)
        return Told(_finite(exact, FLOOR), jnp.zeros(len(z)), jnp.zeros(0), jnp.zeros(0))
    sizes = {name: q.mean.shape for name, q in used.items()}
    centre, noise = {name: q.mean for name, q in used.items()}, noises.draw(key, sizes, inner)

    def at(z_G: Float[Array, " n"]) -> tuple[Array, Array, Any]:
        here = silo.locals_of(shared.theta, eta, everyone, z_G)  # an encoder may read Z_G
        q, log_p = _Family({name: here[name] for name in used}, z_G - shared.eta.mean), functools.partial(terms, z_G)
        proposals = _laplace(log_p, q) if _narrow(sizes) else q.proposals()
        found = _weighed(log_p, proposals, noise, centre)
        of_q = {name: q.mean[name] - centre[name] for name in used}
        squares = {name: of_q[name] ** 2 + q.variance(name) for name in used}
        return found.evidence, found.difference, _finite((found.mean, found.square, of_q, squares), 0.0)

    def batch(sums: Any, given: tuple[Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        points, counts = given
        evidence, difference, moments = jax.vmap(at)(points)
        return jax.tree.map(lambda total, one: total + jnp.tensordot(counts, one, 1), sums, moments), (evidence, difference)

    count = -(-len(z) // BATCH) * BATCH
    padded = jnp.concatenate([z, jnp.broadcast_to(z[-1], (count - len(z), z.shape[1]))])
    checked = min(CHECKED, len(z))
    shares = (jnp.arange(count) < checked).astype(z.dtype) / checked
    zeros = (jax.tree.map(jnp.zeros_like, centre),) * 4
    given = (padded.reshape(-1, BATCH, z.shape[1]), shares.reshape(-1, BATCH))
    (mean, square, mean_q, square_q), (evidence, difference) = jax.lax.scan(batch, zeros, given)
    shift, ratio = [], []
    for name in used:
        right, own = (
            jnp.sqrt(jnp.maximum(b - a**2, 1e-30)) for a, b in ((mean[name], square[name]), (mean_q[name], square_q[name]))
        )
        shift.append(jnp.ravel(jnp.abs(mean_q[name] - mean[name]) / right))
        ratio.append(jnp.ravel(own / right))
    values = (_finite(evidence.ravel()[: len(z)], FLOOR), _finite(difference.ravel()[: len(z)], 0.0))
    return Told(*values, jnp.concatenate(shift), jnp.concatenate(ratio))


class _Family:
    """q(Z_L | Z_G) at one Z_G: its conditional mean and covariance, block by block."""

    def __init__(self, q: Locals, offset: Float[Array, " n"]) -> None:
        self.q, self.mean = q, Blocks()
        below = offset
        for name in sorted(q):  # the silo's own latents come first
            self.mean[name] = gaussian.draw_local(q[name], jnp.zeros_like(q[name].mean), below if name else offset)
            if not name:
                below = parents(q, offset, self.mean)
        self.offset = {name: below if name else offset for name in q}

    def root(self, name: str) -> Float[Array, "d blocks d"]:
        """The columns of a root of the covariance given Z_G and, in plates, the silo's own latents."""
        blocks, d = self.mean[name].shape
        units = jnp.broadcast_to(jnp.eye(d)[:, None, :], (d, blocks, d))
        return jax.vmap(lambda one: gaussian.draw_local(self.q[name], one, self.offset[name]) - self.mean[name])(units)

    def variance(self, name: str) -> Float[Array, "blocks d"]:
        """The variance of each latent given Z_G."""
        found, C = jnp.sum(self.root(name) ** 2, axis=0), self.q[name].C
        if not name or "" not in self.q or C is None:
            return found
        n = self.offset[""].size
        return found + jnp.sum(jnp.einsum("bdk,ck->cbd", C[..., n:], self.root("")[:, 0]) ** 2, axis=0)

    def proposals(self) -> dict[str, _Proposal]:
        """q itself in place of a Laplace approximation, for blocks that are too wide for one."""
        found = {}
        for name, mean in self.mean.items():
            inverse = jax.vmap(small.inverse_root)(jnp.moveaxis(self.root(name), 0, -1))
            found[name] = _Proposal(mean, jax.vmap(small.cholesky)(inverse.mT @ inverse), None)
        return found


def _narrow(sizes: dict[str, Any]) -> bool:
    alone = math.prod(sizes.get("", (0, 0)))
    return alone + max((d for name, (_, d) in sizes.items() if name), default=0) <= WIDEST


def _laplace(terms: Callable[[Blocks], Any], q: _Family) -> dict[str, _Proposal]:
    """The mode of log p(y, Z_L | Z_G) and its curvature; with latents outside plates, the curvature that is left for them."""
    names = [name for name in q.mean if name]
    alone = "" in q.mean
    fallback = {name: 1 / q.variance(name) for name in q.mean}

    def curvature(z: Blocks) -> tuple[Blocks, dict[str, Any], dict[str, Any]]:
        """The gradient, the negative Hessian of each block, and of each block with the silo's own latents."""
        gradient, push = jax.linearize(jax.grad(lambda z: _total(terms(z))), z)
        width = {name: leaf.shape[1] for name, leaf in z.items()}
        widest = max((width[name] for name in names), default=0)
        # Elements are apart, so that one direction serves all of them; the silo's own latents have directions of their own.
        tangents = {name: jnp.zeros((widest + width.get("", 0), *leaf.shape)) for name, leaf in z.items()}
        for name in z:
            first, which = 0 if name else widest, jnp.arange(width[name])
            tangents[name] = tangents[name].at[first + which, :, which].set(1.0)
        columns = {name: -jnp.moveaxis(leaf, 0, -1) for name, leaf in jax.vmap(push)(tangents).items()}
        within = {name: columns[name][..., : width[name]] for name in names}
        if not alone:
            return gradient, within, {}
        return gradient, {**within, "": columns[""][..., widest:]}, {name: columns[name][..., widest:] for name in names}

    def factored(name: str, matrix: Array) -> Array:
        """The Cholesky factor of a precision; where there is none, that of q, without correlations."""
        root = jnp.sqrt(matrix) if matrix.shape[-1] == 1 else jax.vmap(small.cholesky)((matrix + matrix.mT) / 2)
        fine = (
            jnp.isfinite(root).all(axis=(1, 2), keepdims=True)
            & (jnp.diagonal(root, axis1=1, axis2=2) > 0).all(axis=1)[:, None, None]
        )
        return jnp.where(fine, root, jax.vmap(jnp.diag)(jnp.sqrt(fallback[name])))

    def step(_: Any, carry: tuple[Blocks, Any]) -> tuple[Blocks, Any]:
        """The proposals at a point, and the next point."""
        z, _ = carry
        gradient, within, cross = curvature(z)
        roots = {name: factored(name, within[name]) for name in names}
        if alone:
            root, follow = _reduced(factored, within, cross, roots)
            slope = gradient[""] + sum(
                (jnp.einsum("bdk,bd->k", follow[name], gradient[name])[None] for name in names), jnp.zeros(())
            )
            own = _solve(root, slope)
            move = {name: _solve(roots[name], gradient[name]) + jnp.einsum("bdk,k->bd", follow[name], own[0]) for name in names}
            move[""] = own
            found = {"": _Proposal(z[""], root, None)} | {name: _Proposal(z[name], roots[name], follow[name]) for name in names}
        else:
            move = {name: _solve(roots[name], gradient[name]) for name in names}
            found = {name: _Proposal(z[name], roots[name], None) for name in names}
        move = _finite(move, 0.0)
        tries = jax.vmap(lambda part: jax.tree.map(lambda a, b: a + part * b, z, move))(jnp.asarray([0.0, 0.2, 1.0]))
        values = _finite(jax.vmap(terms)(tries), -jnp.inf)
        if alone:
            best = jnp.argmax(jax.vmap(_total)(values))
            return jax.tree.map(lambda leaf: leaf[best], tries), found
        at = {name: jnp.argmax(values[name], axis=0)[None, :, None] for name in names}
        return {name: jnp.take_along_axis(tries[name], at[name], axis=0)[0] for name in names}, found

    shapes = jax.eval_shape(lambda z: step(0, (z, None))[1], q.mean)
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    # Not from 0 itself, where q may start and some log densities have a kink.
    start = {name: mean + 0.01 / jnp.sqrt(fallback[name]) for name, mean in q.mean.items()}
    return jax.lax.fori_loop(0, NEWTON + 1, step, (start, empty))[1]


def _reduced(factored: Any, within: Any, cross: Any, roots: Any) -> tuple[Any, dict[str, Any]]:
    """The precision of the silo's own latents with those of plates integrated out, and how these follow them."""
    follow = {name: -jax.vmap(_cho_solve)(roots[name], cross[name]) for name in roots}
    left = within[""] + sum((jnp.einsum("bdk,bdl->kl", cross[name], follow[name])[None] for name in roots), jnp.zeros(()))
    return factored("", left), follow


def _cho_solve(root: Array, right: Array) -> Array:
    return right / root**2 if root.shape[-1] == 1 else small.solve_upper(root.T, small.solve_lower(root, right))


def _solve(root: Array, right: Array) -> Array:
    return jax.vmap(_cho_solve)(root, right[..., None])[..., 0]


def _weighed(
    log_p: Callable[[Blocks], Any], proposals: dict[str, _Proposal], noise: dict[str, Any], centre: Blocks
) -> _Weighed:
    """The silo's evidence at one Z_G."""
    names = [name for name in noise if name]

    def moved(name: str, near: Array | None) -> Array:
        mode, _, follow = proposals[name]
        return mode if near is None or follow is None else mode + jnp.einsum("bdk,k->bd", follow, near)

    def normal(name: str, near: Array | None) -> tuple[Array, Array]:
        """The moments of N(mode, −curvature⁻¹)."""
        mean, root = moved(name, near) - centre[name], proposals[name].root
        columns = jax.vmap(functools.partial(_back, root), in_axes=-1)(jnp.broadcast_to(jnp.eye(root.shape[-1]), root.shape))
        return mean, mean**2 + jnp.sum(columns**2, axis=0)

    def drawn(name: str, noise: Float[Array, "2 k blocks d"], near: Array | None) -> tuple[Array, Array, Array]:
        """Draws, of each half the near before the far; their log density, and log N(mode, −curvature⁻¹) less it."""
        mode, root, (_, k, _, d) = moved(name, near)[None, None], proposals[name].root, noise.shape
        wider = 1 + 1.5 / math.sqrt(d)
        scale = jnp.where(jnp.arange(k) < noises.near(k), 1.0, wider)[None, :, None, None]
        z = mode + jax.vmap(jax.vmap(functools.partial(_back, root)))(scale * noise)
        square = jnp.sum(jnp.einsum("bij,hkbi->hkbj", root, z - mode) ** 2, axis=-1)
        volume = jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), axis=1)[None, None]
        parts = noises.log_density(square, d), noises.log_density(square / wider**2, d) - d * math.log(wider)
        share = noises.near(k) / k
        log_density = volume + jnp.logaddexp(math.log(share) + parts[0], math.log(1 - share) + parts[1])
        return z, log_density, volume - square / 2 - d * math.log(2 * math.pi) / 2 - log_density

    def plates(own: Blocks, noise: dict[str, Array]) -> _Weighed:
        """Given the silo's own latents, which are not weighed here."""
        near = (own[""] - proposals[""].mode)[0] if own else None
        found = {name: drawn(name, noise[name], near) for name in names}
        if not found:
            return _Weighed(_total(log_p(own)), jnp.zeros(()), {}, {})
        given = {name: z for name, (z, _, _) in found.items()}
        each = jax.vmap(jax.vmap(lambda z_L: log_p({**own, **z_L})))(given)
        value, difference, mean, square = jnp.zeros(()), jnp.zeros(()), {}, {}
        for name, part in each.items():
            if name not in found:  # the same for all draws
                value = value + jnp.sum(part[0, 0])
                continue
            log_w = _finite(part - found[name][1], FLOOR)
            better, apart, slope = _log_mean(log_w, found[name][2])
            value, difference = value + jnp.sum(better), difference + jnp.sum(apart)
            mean[name], square[name] = _moments(
                log_w, found[name][2], slope, given[name] - centre[name][None, None], normal(name, near)
            )
        return _Weighed(value, difference, mean, square)

    if "" not in noise:
        return plates({}, noise)
    z, log_density, control = drawn("", noise[""], None)
    given = jax.vmap(jax.vmap(lambda own, noise: plates({"": own}, noise)))(z, {name: noise[name] for name in names})
    log_w = _finite(given.evidence - log_density[..., 0], FLOOR)
    value, difference, slope = _log_mean(log_w, control[..., 0])
    share = jnp.exp(log_w - jax.nn.logsumexp(log_w))
    mean, square = _moments(log_w[..., None], control, slope[None], z - centre[""][None, None], normal("", None))
    means, squares = (
        {name: jnp.tensordot(share, leaf, 2) for name, leaf in moments.items()} for moments in (given.mean, given.square)
    )
    return _Weighed(value, difference, {**means, "": mean}, {**squares, "": square})


def _log_mean(
    log_w: Float[Array, "2 k *blocks"], log_control: Float[Array, "2 k *blocks"]
) -> tuple[Float[Array, " *blocks"], Float[Array, " *blocks"], Float[Array, " *blocks"]]:
    """log of the mean weight, its bias of order 1/K removed by what its halves say; how far these are apart; and the slope of
    weights, as parts of the largest, on the control.

    The weights of the normal density at the mode have mean 1, which makes them a control variate: where p(Z_L | y, Z_G) is
    normal no error is left.
    """
    most = jnp.max(log_w, axis=(0, 1))
    weight, control = jnp.exp(log_w - most[None, None]), jnp.exp(log_control)
    away = control - jnp.mean(control, axis=1, keepdims=True)
    slopes = jnp.sum(away * weight, axis=1) / jnp.maximum(jnp.sum(away**2, axis=1), 1e-12)
    plain = jnp.mean(weight, axis=1)
    # The slope of a half comes from the other one: from its own draws it would have a bias, alike for all elements.
    one, other = jnp.log(jnp.maximum(plain - slopes[::-1] * (jnp.mean(control, axis=1) - 1), 0.2 * plain))
    apart = one - other
    # The mean of both halves is log cosh(apart / 2) above theirs, and their bias is twice its own. Where a few draws have all
    # of the weight this says little.
    more = jnp.minimum(jnp.logaddexp(apart / 2, -apart / 2) - math.log(2), 0.5)
    return most + jnp.logaddexp(one, other) - math.log(2) + more, apart, jnp.mean(slopes, axis=0)


def _moments(log_w: Array, log_control: Array, slope: Array, z: Array, normal: tuple[Array, Array]) -> tuple[Array, Array]:
    """Mean and mean square of weighted draws (2, k, blocks, d), by the same control variate as their evidence."""
    weight, control = jnp.exp(log_w - jnp.max(log_w, axis=(0, 1), keepdims=True)), jnp.exp(log_control)
    plain = jnp.mean(weight, axis=(0, 1))
    left = plain - slope * (jnp.mean(control, axis=(0, 1)) - 1)
    helps = left > 0.2 * plain  # where the control takes away most of the weight it is no help
    total, slope = jnp.where(helps, left, plain)[:, None], jnp.where(helps, slope, 0.0)

    def moment(power: int) -> Array:
        share = (weight - slope[None, None] * control)[..., None]
        return (jnp.mean(share * z**power, axis=(0, 1)) + slope[:, None] * normal[power - 1]) / total

    mean = moment(1)
    return mean, jnp.maximum(moment(2), mean**2)


def _back(root: Float[Array, "blocks d d"], noise: Float[Array, "blocks d"]) -> Float[Array, "blocks d"]:
    """Noise with the covariance whose inverse has this Cholesky factor."""
    if root.shape[-1] == 1:
        return noise / root[..., 0]
    return jax.vmap(lambda root, noise: small.solve_upper(root.T, noise))(root, noise)


def _total(terms: dict[str, Array]) -> Float[Array, ""]:
    return sum((jnp.sum(part) for part in terms.values()), jnp.zeros(()))


def _finite(tree: Any, otherwise: float) -> Any:
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, otherwise), tree)
