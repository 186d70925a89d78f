"""The federation chooses settings of `adapt`, such as a step size or a prior's width, by how well newcomers predict.

    rounds 1 … R_c     a fifth of the participants does not train: to the shared model they are newcomers
    after round R_c    each of them, for few, some and many rows (5, 20, three quarters of its own), for each candidate c:
                           adapt with c on so many of its rows, ℓ_c = Σ log p(y | x) over its other rows
                       and sends Σ ℓ_c, Σ (ℓ_c − ℓ_0)² over rows and how many rows these are: sums, a few numbers in all
    server             for each size the c whose Σ ℓ_c is largest; c = 0, which moves little, where none is ahead by an error
    rounds R_c + 1 …   everybody trains

An algorithm declares candidates with its settings (`setting(…, choose=…)`). They are traced values of one program. A setting
that a user has given is not chosen. The choice is kept with the run, and `adapt` here applies it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import STILL, Algorithm, AnyNetwork, Data, OfPopulation, Sum, settled
from fedbayes.engine import keys
from fedbayes.engine import round as steps
from fedbayes.engine.candidates import Candidates, Lanes, at, candidates
from fedbayes.engine.cohort import CACHE, for_each, group_width
from fedbayes.errors import UserError
from fedbayes.primitives.training import rows, shuffle

SIZES = (5, 20, None)
"""Rows that newcomers adapt with; None is three quarters of their own."""
LIMITS = (10, 50)
"""Rows up to which the choice for the first size holds, and for the second."""
LABELS = (f"up to {LIMITS[0]} rows", f"up to {LIMITS[1]} rows", "more rows")
DRAWS, REPEATS = 6, 3
"""Draws of rows that all newcomers together make for each size, and those of one newcomer at most; each makes at least one."""
FEWEST, QUERY = 5, 50
"""Rows that a client must have left to score, and how many of them are scored at most."""
MOST = 150
"""Rows that a client adapts with, at most."""
SHARE, NEWCOMERS = 0.2, 10
"""The share of participants that are newcomers, and how many at most."""
ENOUGH = 2
"""Newcomers from which on a choice is made: a single one says nothing of others, and its rows are missed in the training."""
BETWEEN = 8.0
"""Variance of a gain between newcomers, in units of its variance by rows."""
WHEN, LEAST = 0.8, 10
"""The share of rounds after which the choice is made, and the fewest rounds of a run in which one is."""
FLOOR = -1e3
"""The log score of a row counts as at least this, and as at most its opposite: one row does not decide, sums are finite."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings of `adapt` by the number of rows."""

    names: tuple[str, ...]
    values: Float[Array | np.ndarray, "sizes names"]

    def without(self, fields: Collection[str]) -> Choice | None:
        """The choice of settings in other fields; None where none is left.

        >>> Choice(("tune.lr", "sigma"), np.ones((3, 2))).without(["tune"]).names
        ('sigma',)
        """
        kept = [place for place, name in enumerate(self.names) if name.partition(".")[0] not in fields]
        return Choice(tuple(self.names[place] for place in kept), np.asarray(self.values)[:, kept]) if kept else None

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {"names": list(self.names), "values": np.asarray(self.values, float).tolist()}

    @classmethod
    def from_json(cls, algorithm: AnyNetwork, given: Mapping[str, Any] | None) -> Choice | None:
        """The choice that `to_json` gave; refused where the algorithm declares no such settings."""
        if given is None:
            return None
        names, values = tuple(map(str, given["names"])), np.asarray(given["values"], np.float32)
        if strange := sorted(set(names) - set(algorithm.choices)):
            raise UserError(f"the choice has {strange[0]!r}, which {algorithm.title} does not let a federation choose")
        if values.shape != (len(SIZES), len(names)) or not np.isfinite(values).all():
            raise UserError(f"the choice has shape {values.shape}; expected {(len(SIZES), len(names))} finite numbers")
        return cls(names, values)


def adapt(algorithm: AnyNetwork, choice: Choice | None, key: PRNGKeyArray, down: Any, local: Any, data: Data) -> Any:
    """`algorithm.adapt` with the settings that were chosen for so many rows."""
    return chosen(algorithm, choice, rows(data)).adapt(key, down, local, data)


def chosen(algorithm: AnyNetwork, choice: Choice | None, count: Float[Array, ""]) -> AnyNetwork:
    """The algorithm with the settings that were chosen for so many rows, which are traced."""
    if choice is None:
        return algorithm
    values = jnp.asarray(choice.values)[jnp.sum(count > jnp.asarray(LIMITS, jnp.float32))]
    return settled(algorithm, dict(zip(choice.names, values, strict=True)))


def of_population(algorithm: AnyNetwork) -> bool:
    """Whether all that is chosen are properties of the population, the same for all numbers of rows."""
    return all(isinstance(algorithm.choices[name], OfPopulation) for name in candidates(algorithm).names)


class Plan(NamedTuple):
    """Participants who do not train until a round, after which the choice is made."""

    newcomers: np.ndarray
    until: int
    repeats: int
    """How often each newcomer draws rows of each size: as often as it may where what is chosen is a property of the population,
    of which every draw of few rows tells something."""

    @classmethod
    def of(cls, algorithm: AnyNetwork, seed: int, participants: np.ndarray, rounds: int) -> Plan | None:
        """The plan of a run; None for a short run, few clients, or a method that declares no candidates."""
        seed = steps.checked_seed(seed)
        count = min(NEWCOMERS, max(1, round(SHARE * len(participants))))
        if rounds < LEAST or len(participants) <= count or count < ENOUGH or not candidates(algorithm).names:
            return None
        repeats = REPEATS if of_population(algorithm) else min(REPEATS, max(1, round(DRAWS / count)))
        return cls(steps.take_part(seed, 0, participants, count), round(WHEN * rounds), repeats)

    def training(self, round: int, participants: np.ndarray) -> np.ndarray:
        """The participants that may train in a round."""
        return participants if round > self.until else np.setdiff1d(participants, self.newcomers)


class Up(NamedTuple):
    """Of each size and candidate Σ ℓ_c and Σ (ℓ_c − ℓ_0)² over a newcomer's rows; of each size how many rows were scored."""

    score: Sum[Float[Array, "sizes candidates"]]
    square: Sum[Float[Array, "sizes candidates"]]
    rows: Sum[Float[Array, " sizes"]]


@dataclasses.dataclass(frozen=True)
class Choosing(Algorithm[Any, Any, Any, Up]):
    """The round in which newcomers score candidates for `trained`; it changes nobody's state."""

    trained: AnyNetwork
    repeats: int = REPEATS
    """How often a newcomer draws rows of each size."""

    @property
    def settings(self) -> Candidates:
        """What is chosen from."""
        return candidates(self.trained)

    def init_server(self, key: PRNGKeyArray) -> Any:
        """The trained algorithm's start."""
        return self.trained.init_server(key)

    def init_local(self, key: PRNGKeyArray, data: Any) -> Any:
        """The trained algorithm's own."""
        return self.trained.init_local(key, data)

    def broadcast(self, key: PRNGKeyArray, server: Any) -> Any:
        """The trained algorithm's broadcast."""
        return self.trained.broadcast(key, server)

    def client(self, key: PRNGKeyArray, down: Any, local: Any, data: Data) -> tuple[Up, Any]:
        """Adapt with each candidate on some rows, score others."""
        key = keys.fold(key, np.uint32(keys.CHOOSE))
        lanes, n, size = Lanes.of(self.trained, self.settings), jnp.sum(data.mask), trees.size((down, local))
        widest = lanes.values.shape[1]
        width = widest if group_width(size) >= widest else 1
        length, scored = data.mask.shape[0], min(QUERY, data.mask.shape[0])
        # A small model takes longer to compile than to run: one program. A large one gets arrays that are short for few rows.
        short = MOST if size < CACHE else max(size for size in SIZES if size is not None)

        def scores(place: Int[Array, ""], size: Int[Array, ""], room: int) -> tuple[Array, Array]:
            for_rows, for_adapt, for_draws = jax.random.split(jax.random.fold_in(key, place), 3)
            order = jnp.pad(shuffle(for_rows, data), (0, scored))
            support = Data(*(leaf[order[:room]] for leaf in data))
            support = support._replace(mask=support.mask & (jnp.arange(room) < size))
            asked = jax.lax.dynamic_slice_in_dim(order, size, scored)
            query, exists = Data(*(leaf[asked] for leaf in data)), (size + jnp.arange(scored) < n) & (n >= size + FEWEST)

            def log_score(value: Float[Array, " names"], length: Float[Array, " lengths"]) -> Float[Array, " n"]:
                settings = {**dict(zip(lanes.names, value, strict=True)), **dict(zip(lanes.lengths, length, strict=True))}
                state = settled(self.trained, settings).adapt(for_adapt, down, local, support)
                draws = self.trained.predict(for_draws, down, state, query.x)
                each = self.trained.likelihood.log_prob(draws, query.y)
                mixed = jax.nn.logsumexp(each, axis=0) - np.float32(np.log(draws.shape[0]))
                return jnp.where(exists, jnp.where(jnp.isfinite(mixed), jnp.clip(mixed, FLOOR, -FLOOR), FLOOR), 0.0)

            def group(one: tuple[Array, Array, Array]) -> Array:
                values, length, count = one
                return for_each(lambda value: log_score(value, length), width, count, values)

            return jax.lax.map(group, (lanes.values, lanes.length, lanes.members))[lanes.places], jnp.sum(exists)

        def drawn(sizes: Sequence[int | None], first: int, room: int) -> tuple[Array, Array, Array]:
            """The sums for some sizes, of which `first` come before."""
            rows = jnp.stack([jnp.minimum(3 * n // 4, MOST) if size is None else jnp.asarray(size, n.dtype) for size in sizes])

            def draw(place: Int[Array, ""]) -> tuple[Array, Array, Array]:
                found, count = scores(first * self.repeats + place, rows[place // self.repeats], min(room, length))
                return jnp.sum(found, axis=1), jnp.sum((found - found[:1]) ** 2, axis=1), count.astype(jnp.float32)

            found = jax.lax.map(draw, jnp.arange(len(sizes) * self.repeats))
            return jax.tree.map(lambda part: jnp.sum(part.reshape(len(sizes), self.repeats, *part.shape[1:]), axis=1), found)

        if short == MOST:
            return Up(*drawn(SIZES, 0, MOST)), local
        both = drawn(SIZES[:-1], 0, short), drawn(SIZES[-1:], len(SIZES) - 1, MOST)
        return Up(*jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)), local

    def server(self, key: PRNGKeyArray, server: Any, down: Any, up: Up) -> Any:
        """The sums as they are."""
        return up

    def adapt(self, key: PRNGKeyArray, down: Any, local: Any, data: Any) -> Any:
        """Nothing is fitted."""
        return local

    def predict(self, key: PRNGKeyArray, down: Any, local: Any, x: Any) -> Any:
        """The trained algorithm predicts."""
        raise UserError("a choosing round predicts nothing; ask the algorithm that was trained")


def plausible(told: Up, repeats: int = REPEATS) -> None:
    """Refuse sums that no newcomer's rows give: a negative or too large number of rows, or scores beyond their bounds.

    >>> each = np.zeros((3, 2), np.float32)
    >>> plausible(Up(each - 50, each, np.full(3, 10, np.float32)))
    >>> plausible(Up(each, each, np.full(3, -10, np.float32)))
    Traceback (most recent call last):
    fedbayes.errors.UserError: it scored -10 rows for 'up to 10 rows'; expected 0 to 150
    """
    score, square, count = (np.asarray(part, np.float64) for part in told)
    for label, scored in zip(LABELS, count, strict=True):
        if not 0 <= scored <= repeats * QUERY:
            raise UserError(f"it scored {scored:g} rows for {label!r}; expected 0 to {repeats * QUERY}")
    room = 1.001 * count[:, None]  # sums are rounded
    if (np.abs(score) > -FLOOR * room).any() or (square < 0).any() or (square > (2 * FLOOR) ** 2 * room).any():
        limits = f"a log score of each between {FLOOR:g} and {-FLOOR:g}"
        raise UserError(f"its sums are beyond what its rows can give; expected {limits}")


class Chosen(NamedTuple):
    """A choice, and by how much the chosen candidate is ahead of the first, for each size."""

    choice: Choice
    gain: Float[np.ndarray, " sizes"]
    error: Float[np.ndarray, " sizes"]
    rows: Float[np.ndarray, " sizes"]
    first: str = STILL
    """The first candidate in words."""

    def to_json(self) -> dict[str, Any]:
        """What a run's result and report tell of it."""
        told: dict[str, Any] = {}
        for place, label in enumerate(LABELS):
            values = dict(zip(self.choice.names, np.asarray(self.choice.values[place], float).tolist(), strict=True))
            told[label] = {
                "settings": {name: float(f"{value:.6g}") for name, value in values.items()},
                "gain": float(self.gain[place]),
                "error": float(self.error[place]),
                "rows": int(self.rows[place]),
                "first": self.first,
            }
        return told


def described(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings and their gain for each size, in words, from `Chosen.to_json`.

    >>> one = {"settings": {"tune.lr": 0.01}, "gain": 0.25, "error": 0.04, "rows": 90}
    >>> described({"up to 10 rows": one, "more rows": {**one, "settings": {"tune.lr": 0.0}, "gain": 0.0}})[0]
    ('up to 10 rows', 'tune.lr 0.01; 0.250 ± 0.040 nats a row better than not adapting')
    >>> described({"more rows": {**one, "gain": 0.0, "first": "the method's own settings"}})
    [('more rows', "the method's own settings")]
    >>> described({"more rows": {**one, "gain": 0.0, "rows": 0}})
    [('more rows', 'tune.lr 0.01; not chosen, as no newcomer had rows to score')]
    """
    found, chosen = [], any(one["rows"] for one in told.values())
    for label, one in told.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in one["settings"].items())
        if not chosen:
            found.append((label, f"{settings}; not chosen, as no newcomer had rows to score"))
            continue
        gain = f"{one['gain']:.3f} ± {one['error']:.3f} nats a row better than {one.get('first', STILL)}"
        found.append((label, f"{settings}; {gain}" if one["gain"] > 0 else _kept(one)))
    return found


def described_over(runs: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Choices of runs that differ in their seed: for each size the settings, with their seeds where they differ, and the gain.

    >>> one = {"settings": {"tune.lr": 0.01}, "gain": 0.25, "error": 0.04, "rows": 90}
    >>> still = {**one, "settings": {"tune.lr": 0.0}, "gain": 0.0}
    >>> described_over({0: {"more rows": one}, 1: {"more rows": still}, 2: {"more rows": one}})
    [('more rows', 'tune.lr 0.01 (seeds 0, 2); do not adapt (seed 1)', '0.167 ± 0.144')]
    """
    found = []
    for label in next(iter(runs.values()), {}):
        seeds: dict[str, list[str]] = {}
        for seed, told in runs.items():
            settings = ", ".join(f"{name} {value:g}" for name, value in told[label]["settings"].items())
            known = any(one["rows"] for one in told.values())
            words = "not chosen" if not known else settings if told[label]["gain"] > 0 else _kept(told[label])
            seeds.setdefault(words, []).append(str(seed))
        each = [f"{words} (seed{'s' * (len(of) > 1)} {', '.join(of)})" for words, of in seeds.items()]
        gains = [told[label]["gain"] for told in runs.values()]
        spread = f" ± {np.std(gains, ddof=1):.3f}" if len(gains) > 1 else ""
        found.append((label, "; ".join(each) if len(each) > 1 else next(iter(seeds)), f"{np.mean(gains):.3f}{spread}"))
    return found


def _kept(one: Mapping[str, Any]) -> str:
    """The first candidate, as advice."""
    first = one.get("first", STILL)
    return "do not adapt" if first == STILL else str(first)


def decided(algorithm: AnyNetwork, told: Up, repeats: int = REPEATS, newcomers: int = NEWCOMERS) -> Chosen:
    """The best candidate for each size, or the first where none is ahead of it by its standard error.

    Sums do not tell how much a gain varies between newcomers, so a variance is added that is `BETWEEN` times that by rows, over
    their number: of two newcomers' scores a gain must be √5 standard errors large.

    Properties of the population are one choice for all sizes, by the sums over sizes, and may lie between candidates. Else a
    size that no newcomer has rows for takes the choice of the next smaller one, or of the next larger. Without any row, the
    algorithm's own settings stay.
    """
    settings = candidates(algorithm)
    score, square, count = (np.asarray(part, np.float64) for part in told)
    known = np.flatnonzero(count > 0)
    if not len(known):
        own = [at(algorithm, name) for name in settings.names]
        own = [first if one is None else float(one) for one, first in zip(own, settings.values[0], strict=True)]
        kept = Choice(settings.names, np.tile(np.asarray(own, np.float32), (len(SIZES), 1)))
        gain, error, scored = np.zeros((3, len(SIZES)))
        return Chosen(kept, gain, error, scored, algorithm.first_candidate)
    pooled = of_population(algorithm)
    if pooled:
        score, square, count = (np.broadcast_to(part.sum(axis=0), part.shape) for part in (score, square, count))
        known = np.arange(len(SIZES))
    values, gains, errors = [], [], []
    for place in range(len(SIZES)):
        size = known[known <= place][-1] if (known <= place).any() else known[0]
        mean = score[size] / count[size]
        best = int(np.argmax(mean))
        gain = mean[best] - mean[0]
        # A row that is scored again after another draw of rows to adapt with is no new row.
        error = np.sqrt(
            max(square[size][best] / count[size] - gain**2, 0.0) * repeats / count[size] * (1 + BETWEEN / newcomers)
        )
        best = best if gain > error else 0
        values.append(_between(settings, mean, best) if pooled and best else settings.values[best])
        gains.append(gain if best else 0.0)
        errors.append(error)
    choice = Choice(settings.names, np.asarray(values, np.float32))
    return Chosen(choice, np.array(gains), np.array(errors), count / repeats, algorithm.first_candidate)


def _between(settings: Candidates, score: Float[np.ndarray, " candidates"], best: int) -> tuple[float, ...]:
    """The best candidate, moved in each setting to the top of a parabola through it and its neighbours there.

    The log score is a smooth function of the logarithm of a property of the population.
    """
    found = list(settings.values[best])
    for place in range(len(settings.names)):
        others = [row[:place] + row[place + 1 :] for row in settings.values]
        line = [one for one in range(1, len(others)) if others[one] == others[best] and settings.values[one][place] > 0]
        if best not in line:
            continue
        line.sort(key=lambda one: settings.values[one][place])
        middle = line.index(best)
        if 0 < middle < len(line) - 1:
            near = line[middle - 1 : middle + 2]
            x = [float(np.log(settings.values[one][place])) for one in near]
            found[place] = float(np.exp(_top(x, score[near].tolist())))
    return tuple(found)


def _top(x: Sequence[float], y: Sequence[float]) -> float:
    """Where the parabola through three points, of which the middle one is the highest, has its maximum.

    >>> _top([0.0, 1.0, 3.0], [-4.0, -1.0, -1.0])
    2.0
    """
    left, right = x[1] - x[0], x[2] - x[1]
    up, down = (y[1] - y[0]) / left, (y[1] - y[2]) / right
    if not up + down > 0:
        return x[1]
    return x[1] + (up * right - down * left) / (2 * (up + down))
