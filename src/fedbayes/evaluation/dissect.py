"""Take a fit apart: the same predictions without one part of it, client by client. See `life` for what each part is.

Clients are adapted and predicted with the keys of an evaluation, so that the log score as it is equals the evaluation's. The
variants of a posterior go through one compiled program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import AnyNetwork, Data, Params
from fedbayes.data.clients import Clients
from fedbayes.engine import keys
from fedbayes.engine.choose import FLOOR, Choice, chosen
from fedbayes.evaluation.assess import MANY
from fedbayes.evaluation.life import POSTERIOR, PRIOR, Contraction, Life, Worth
from fedbayes.models.beliefs import Beliefs, Marginals
from fedbayes.models.predictive import is_numeric, moments, uncertainty
from fedbayes.primitives.training import rows, shuffle

OTHERS = 3
"""Clients whose state is tried in the place of one's own; the worth of the person is over their mean."""
ROWS = 500
"""Test rows of a client that are predicted, at most."""
SIZES = (10, 100, 1000)
"""Rows after which the posterior's variance is looked at."""
GROUP = 16
"""Clients in one compiled call."""


class Given(NamedTuple):
    """A fit: the algorithm, what every client receives, the key of the round, and the settings that were chosen."""

    algorithm: AnyNetwork
    down: Any
    key: PRNGKeyArray
    choice: Choice | None


class Seen(NamedTuple):
    """Sums over one client's test rows: log score, the mean over draws of the log score of one, mutual information."""

    log_score: Array
    one_draw: Array
    information: Array


def dissect(
    given: Given, data: Clients, ids: np.ndarray, mode: str, states: Callable[[np.ndarray], Any], elsewhere: np.ndarray | None
) -> tuple[Life, np.ndarray]:
    """The parts in one mode over some clients, and each one's log score with the posterior's mean alone.

    `states` gives local states by the clients' places. Where no rows from elsewhere are given, they are the clients' own with
    each feature permuted over rows.
    """
    adapts = mode == "adapted"
    train = max(1, int(data.train_counts[ids].max()))
    sizes = [*(size for size in SIZES if size < train), MANY]
    groups = [ids[start : start + GROUP] for start in range(0, len(ids), GROUP)]
    kept: list[tuple[Any, Any, Data]] = []
    changed: list[Any] = []
    for group in groups:
        each = jax.vmap(functools.partial(keys.fold, given.key))(jnp.asarray(group, jnp.uint32))
        test = data.test(group, max(1, int(data.test_counts[group].max())))
        length = min(ROWS, int(data.test_counts[ids].max()))
        test = jax.tree.map(lambda leaf, n=length: jnp.asarray(_to_length(leaf, n)), test)
        local = jax.tree.map(jnp.asarray, states(group))
        if adapts:
            own = jax.tree.map(jnp.asarray, data.train(group, train))
            local, other = _adapted(given.algorithm, each, given.down, given.choice, np.array(sizes), local, own, test)
            changed.append(other)
        kept.append((each, local, test))
    whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(local for _, local, _ in kept))
    order, looked, place = np.random.default_rng(0).permutation(len(ids)), [], 0
    for group, (each, local, test) in zip(groups, kept, strict=True):
        others = _others(order, np.arange(place, place + len(group)))
        theirs = jax.tree.map(lambda leaf, others=others: leaf[others], whole)
        far = jnp.asarray(_elsewhere(test, elsewhere, place))
        counts = jnp.asarray(data.train_counts[group], jnp.float32)
        looked.append(_looked(given.algorithm, each, given.down, given.choice, local, theirs, test, far, counts))
        place += len(group)
    one = jax.tree.map(lambda leaf: leaf[0], kept[0])
    draws = jax.eval_shape(given.algorithm.predict, one[0], given.down, one[1], one[2].x).shape[0]
    found = _joined(looked)
    life, alone = _summed(mode, draws, found)
    return (_with_adaptation(life, found, _joined(changed), sizes, data.train_counts[ids]) if adapts else life), alone


def _joined(parts: list[Any]) -> dict[str, Any]:
    """What compiled calls gave, one after the other."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *jax.device_get(parts))


def _to_length(leaf: np.ndarray, length: int) -> np.ndarray:
    pad = max(0, length - leaf.shape[1])
    return np.pad(leaf[:, :length], [(0, 0), (0, pad)] + [(0, 0)] * (leaf.ndim - 2))


def _others(order: np.ndarray, places: np.ndarray) -> np.ndarray:
    """For each place those of other clients, which follow it in a random order."""
    at, count = np.argsort(order)[places], len(order)
    return np.stack([order[(at + shift) % count] for shift in range(1, 1 + min(OTHERS, count - 1))], axis=1)


def _elsewhere(test: Data, given: np.ndarray | None, seed: int) -> np.ndarray:
    """Rows in the form of the test rows: drawn from those given, or with features permuted over a client's rows."""
    random, x = np.random.default_rng([1, seed]), np.array(test.x)
    if given is not None:
        return given[random.integers(0, len(given), x.shape[:2])].astype(x.dtype)
    for client, count in enumerate(np.asarray(test.mask).sum(axis=1)):
        part = x[client, :count]
        part[:] = random.permuted(part.reshape(count, -1), axis=0).reshape(part.shape)
    return x


def variants(key: PRNGKeyArray, deviation: Params) -> Params:
    """The scales as they are, 0, one number for each array, one for all, and shuffled over weights; stacked.

    >>> found = variants(jax.random.key(0), {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0])})
    >>> [round(float(one), 3) for one in found["a"][:4, 0]], float(sum(jnp.sum(leaf[4]) for leaf in found.values()))
    ([3.0, 0.0, 3.536, 2.887], 7.0)
    """
    leaves, structure = jax.tree.flatten(deviation)
    flat = jnp.concatenate([leaf.ravel() for leaf in leaves])
    mixed = jnp.split(jax.random.permutation(key, flat), np.cumsum([leaf.size for leaf in leaves])[:-1].tolist())
    overall = jnp.sqrt(jnp.mean(flat**2))

    def one(leaf: Array, mixed: Array) -> Array:
        layer = jnp.full_like(leaf, jnp.sqrt(jnp.mean(leaf**2)))
        return jnp.stack([leaf, jnp.zeros_like(leaf), layer, jnp.full_like(leaf, overall), mixed.reshape(leaf.shape)])

    return jax.tree.unflatten(structure, [one(leaf, part) for leaf, part in zip(leaves, mixed, strict=True)])


def _seen(algorithm: AnyNetwork, key: PRNGKeyArray, down: Any, local: Any, test: Data) -> Seen:
    likelihood = algorithm.likelihood
    draws = algorithm.predict(keys.fold(key, np.uint32(keys.PREDICT)), down, local, test.x)
    each = jnp.clip(likelihood.log_prob(draws, test.y), FLOOR, -FLOOR)
    mixture = jax.nn.logsumexp(each, axis=0) - np.float32(math.log(draws.shape[0]))
    information = moments(likelihood, draws)[2] if is_numeric(likelihood) else uncertainty(likelihood, draws).epistemic
    return Seen(*(jnp.sum(jnp.where(test.mask, part, 0.0)) for part in (mixture, jnp.mean(each, axis=0), information)))


def _variance(found: Marginals | None) -> Float[Array, ""]:
    """The mean over weights; 0 where there is no such distribution."""
    leaves = [] if found is None else jax.tree.leaves(found.deviation)
    return sum((jnp.sum(leaf**2) for leaf in leaves), jnp.float32(0)) / max(1, sum(leaf.size for leaf in leaves))


def _divergence(q: Marginals | None, p: Marginals | None) -> dict[str, Array]:
    """KL(q ‖ p) of each array, as if weights were independent; infinite where q is a point."""
    if q is None or p is None:
        return {}
    parts = [trees.named(part) for part in (*q, *p)]

    def one(name: str) -> Array:
        mean, scale, mean_p, scale_p = (part[name] for part in parts)
        ratio = scale / scale_p
        return jnp.sum((ratio**2 + ((mean - mean_p) / scale_p) ** 2 - 1) / 2 - jnp.log(ratio))

    return {name: one(name) for name in parts[0]}


@functools.partial(jax.jit, static_argnums=0)
def _adapted(
    algorithm: AnyNetwork, key: Any, down: Any, choice: Any, sizes: Any, local: Any, train: Data, test: Data
) -> tuple[Any, dict[str, Any]]:
    """Each client's state after `adapt`, and what comes of other scales of the prior and of other numbers of rows."""

    def client(given: Any) -> Any:
        key, local, train, test = given
        place = jnp.argsort(shuffle(keys.fold(key, np.uint32(keys.CHOOSE)), train))
        whole = chosen(algorithm, choice, rows(train))
        prior = whole.beliefs(down, local).prior

        def fitted(count: Any, scales: Params | None = None) -> Any:
            """The state, its log score, the variances of posterior and prior, and the divergence."""
            some = train._replace(mask=train.mask & (place < count))
            method, under = chosen(algorithm, choice, rows(some)), (down, local)
            if prior is not None and scales is not None:
                under = whole.with_beliefs(down, local, Beliefs(None, Marginals(prior.mean, scales)))
            state = method.adapt(keys.fold(key, np.uint32(keys.ADAPT)), *under, some)
            q, p = method.beliefs(down, state)
            before = method.beliefs(*under).prior  # a prior may be the posterior of before, or be known only afterwards
            p = p if before is None else before
            score = _seen(algorithm, key, down, state, test).log_score
            return state, {"log_score": score, "variance": _variance(q), "prior": _variance(p), "kl": _divergence(q, p)}

        found = {}
        if prior is not None:
            scales = jax.tree.map(lambda leaf: leaf[2:], variants(key, prior.deviation))
            found["prior"] = jax.lax.map(lambda one: fitted(MANY, one)[1]["log_score"], scales)
        states, found["sizes"] = jax.lax.map(fitted, sizes)
        return jax.tree.map(lambda leaf: leaf[-1], states), found

    return jax.lax.map(client, (key, local, train, test))


@functools.partial(jax.jit, static_argnums=0)
def _looked(
    algorithm: AnyNetwork, key: Any, down: Any, choice: Any, local: Any, theirs: Any, test: Data, far: Any, counts: Any
) -> dict[str, Any]:
    """Each client's sums over test rows: as it is, with other scales, with others' states, on rows from elsewhere."""

    def client(given: Any) -> Any:
        key, local, theirs, test, far, count = given
        q, p = chosen(algorithm, choice, count).beliefs(down, local)

        def with_scales(deviation: Params) -> Array:
            assert q is not None
            states = algorithm.with_beliefs(down, local, Beliefs(Marginals(q.mean, deviation)))
            return _seen(algorithm, key, *states, test).log_score

        found = {"own": _seen(algorithm, key, down, local, test), "rows": jnp.sum(test.mask).astype(jnp.float32)}
        if jax.tree.leaves(theirs):  # a method without states of clients has nobody's to exchange
            found["theirs"] = jax.lax.map(lambda one: _seen(algorithm, key, down, one, test).log_score, theirs)
        found["far"] = _seen(algorithm, key, down, local, test._replace(x=far)).information
        if q is not None:
            found["variants"] = jax.lax.map(with_scales, variants(key, q.deviation))
            found["variance"], found["kl"] = _variance(q), _divergence(q, p)
        return found

    return jax.lax.map(client, (key, local, theirs, test, far, counts))


def _summed(mode: str, draws: int, found: dict[str, Any]) -> tuple[Life, np.ndarray]:
    """The means over clients; and the log score of each with the mean alone."""
    count, (own, one_draw, information) = found["rows"], (part / found["rows"] for part in found["own"])
    parts: dict[str, Worth] = {}
    scale, alone = None, own
    if "variants" in found:
        each = found["variants"] / count[:, None]
        scale, alone = float(np.sqrt(found["variance"].mean())), each[:, 1]
        parts |= {name: Worth.of(each[:, 0] - each[:, place]) for place, name in enumerate(POSTERIOR, 1)}
    if mode != "global" and "theirs" in found:
        parts["person"] = Worth.of(own - found["theirs"].mean(axis=1) / count)
    parts |= {"one draw": Worth.of(own - one_draw)} if draws > 1 else {}
    far = float((found["far"] / count).mean())
    divergence = _finite(found.get("kl", {}))
    return Life(mode, len(own), draws, float(own.mean()), parts, scale, float(information.mean()), far, divergence, []), alone


def _finite(divergence: dict[str, np.ndarray]) -> dict[str, float]:
    means = {name: float(value.mean()) for name, value in divergence.items()}
    return means if all(map(math.isfinite, means.values())) else {}


def _with_adaptation(
    life: Life, found: dict[str, Any], after: dict[str, Any], sizes: Sequence[int], counts: np.ndarray
) -> Life:
    """With the worth of the prior's scales, contraction, and the divergence from the prior that `adapt` began with."""
    count, parts, contraction = found["rows"], dict(life.parts), []
    if "prior" in after:
        away = [(found["own"].log_score - after["prior"][:, place]) / count for place in range(len(PRIOR))]
        parts |= {name: Worth.of(one) for name, one in zip(PRIOR, away, strict=True)} if np.any(away) else {}
    for place, size in enumerate(sizes):
        has = counts >= (size if size < MANY else 0)
        variance, prior = (float(after["sizes"][name][has, place].mean()) for name in ("variance", "prior"))
        score = float((after["sizes"]["log_score"][:, place] / count)[has].mean())
        said = int(counts.mean()) if size == MANY else size
        contraction.append(Contraction(said, int(has.sum()), variance, prior, score))
    divergence = _finite({name: value[:, -1] for name, value in after["sizes"]["kl"].items()})
    return life._replace(parts=parts, contraction=contraction, divergence=divergence)
