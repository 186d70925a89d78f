"""The federation chooses settings of `adapt`, such as a step size or a prior's width, by how well newcomers predict.

    rounds 1 … R_c     a fifth of the participants does not train: to the shared model they are newcomers
    after round R_c    each of them, for few, some and many rows (5, 20, three quarters of its own), for each candidate c:
                           adapt with c on so many of its rows, ℓ_c = Σ log p(y | x) over its other rows
                       and sends Σ ℓ_c, Σ (ℓ_c − ℓ_0)² over rows and how many rows these are: sums, a few numbers in all
    server             for each size the c whose Σ ℓ_c is largest; c = 0, which does not adapt, where none is ahead by an error
    rounds R_c + 1 …   everybody trains

An algorithm declares candidates with its settings (`setting(…, choose=…)`). They are traced values of one program. A setting
that a user has given is not chosen. The choice is kept with the run, and `adapt` here applies it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Algorithm, AnyNetwork, Data, Sum, settled
from fedbayes.engine import keys
from fedbayes.engine import round as steps
from fedbayes.errors import UserError
from fedbayes.primitives.training import rows, shuffle

SIZES = (5, 20, None)
"""Rows that newcomers adapt with; None is three quarters of their own."""
LIMITS = (10, 50)
"""Rows up to which the choice for the first size holds, and for the second."""
LABELS = (f"up to {LIMITS[0]} rows", f"up to {LIMITS[1]} rows", "more rows")
REPEATS = (4, 4, 4)
"""How often the rows of each size are drawn anew."""
QUERY = 5
"""Fewest rows that a client must have left to score."""
MOST = 200
"""Rows of a client that are used, at most."""
SHARE, NEWCOMERS = 0.2, 50
"""The share of participants that are newcomers, and how many at most."""
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


class Candidates(NamedTuple):
    """Settings to choose from; the first candidate does not adapt."""

    names: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


def candidates(algorithm: AnyNetwork) -> Candidates:
    """All combinations of the values that an algorithm declares, of settings that have their default value.

    >>> import fedbayes as fb
    >>> names, values = candidates(fb.FedAvg(fb.models.linear((2,), fb.models.Categorical(2))))
    >>> names, len(values), values[0]
    (('tune.lr', 'tune.steps'), 11, (0.0, 0.0))
    """
    default = {field.name: field.default for field in dataclasses.fields(algorithm)}
    grids = {name: grid for name, grid in algorithm.choices.items() if _at(algorithm, name) == _at(default, name)}
    if not grids:
        return Candidates((), ())
    others = itertools.product(*(grid[1:] for grid in grids.values()))
    every = (tuple(grid[0] for grid in grids.values()), *others)
    return Candidates(tuple(grids), tuple(tuple(map(float, one)) for one in every))


def _at(config: Any, name: str) -> Any:
    """A setting by its dotted name."""
    first, _, rest = name.partition(".")
    value = config[first] if isinstance(config, dict) else getattr(config, first)
    return _at(value, rest) if rest else value


class Plan(NamedTuple):
    """Participants who do not train until a round, after which the choice is made."""

    newcomers: np.ndarray
    until: int

    @classmethod
    def of(cls, algorithm: AnyNetwork, seed: int, participants: np.ndarray, rounds: int) -> Plan | None:
        """The plan of a run; None for a short run, a single client, or a method that declares no candidates."""
        seed = steps.checked_seed(seed)
        if rounds < LEAST or len(participants) < 2 or not candidates(algorithm).names:
            return None
        count = min(NEWCOMERS, max(1, round(SHARE * len(participants))))
        return cls(steps.take_part(seed, 0, participants, count), round(WHEN * rounds))

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
        """Adapt with each candidate on some rows, score the others."""
        key = keys.fold(key, np.uint32(keys.CHOOSE))
        values, count = jnp.asarray(self.settings.values, jnp.float32), min(MOST, data.mask.shape[0])
        chosen = shuffle(key, data)[:count]
        data = Data(*(leaf[chosen] for leaf in data))
        n = jnp.sum(data.mask)

        def split(number: Int[Array, ""], size: Int[Array, ""], room: int) -> tuple[Array, Array, Array]:
            for_rows, for_adapt, for_draws = jax.random.split(jax.random.fold_in(key, number), 3)
            order = shuffle(for_rows, data)
            support = Data(*(leaf[order[:room]] for leaf in data))
            support = support._replace(mask=support.mask & (jnp.arange(room) < size))
            query = data.mask & (jnp.argsort(order) >= size) & (n >= size + QUERY)

            def log_score(value: Float[Array, " names"]) -> Float[Array, " n"]:
                adapting = settled(self.trained, dict(zip(self.settings.names, value, strict=True)))
                state = adapting.adapt(for_adapt, down, local, support)
                draws = self.trained.predict(for_draws, down, state, data.x)
                each = self.trained.likelihood.log_prob(draws, data.y)
                mixed = jax.nn.logsumexp(each, axis=0) - np.float32(np.log(draws.shape[0]))
                return jnp.where(jnp.isfinite(mixed), jnp.clip(mixed, FLOOR, -FLOOR), FLOOR)

            scores = jnp.where(query[None], jax.vmap(log_score)(values), 0.0)
            ahead = scores - scores[:1]
            return jnp.sum(scores, axis=1), jnp.sum(ahead**2, axis=1), jnp.sum(query).astype(jnp.float32)

        # Few rows in arrays of few rows: a method that looks at all rows at once would else look at padding.
        known = [size for size, repeats in zip(SIZES, REPEATS, strict=True) for _ in range(repeats) if size is not None]
        given = jnp.arange(1, 1 + len(known)), jnp.asarray(known)
        found = jax.lax.map(lambda one: split(one[0], one[1], min(max(known), count)), given)
        more = 1 + len(known) + jnp.arange(REPEATS[SIZES.index(None)])
        many = jax.lax.map(lambda number: split(number, 3 * n // 4, count), more)
        sizes = np.array([*(SIZES.index(size) for size in known), *[SIZES.index(None)] * len(more)])
        every = (jnp.concatenate(both) for both in zip(found, many, strict=True))
        return Up(*(jax.ops.segment_sum(part, sizes, len(SIZES)) for part in every)), local

    def server(self, key: PRNGKeyArray, server: Any, down: Any, up: Up) -> Any:
        """The sums as they are."""
        return up

    def adapt(self, key: PRNGKeyArray, down: Any, local: Any, data: Any) -> Any:
        """Nothing is fitted."""
        return local

    def predict(self, key: PRNGKeyArray, down: Any, local: Any, x: Any) -> Any:
        """The trained algorithm predicts."""
        raise UserError("a choosing round predicts nothing; ask the algorithm that was trained")


def plausible(told: Up) -> None:
    """Refuse sums that no newcomer's rows give: a negative or too large number of rows, or scores beyond their bounds.

    >>> each = np.zeros((3, 2), np.float32)
    >>> plausible(Up(each - 50, each, np.full(3, 10, np.float32)))
    >>> plausible(Up(each, each, np.full(3, -10, np.float32)))
    Traceback (most recent call last):
    fedbayes.errors.UserError: it scored -10 rows for 'up to 10 rows'; expected 0 to 800
    """
    score, square, count = (np.asarray(part, np.float64) for part in told)
    for label, scored, most in zip(LABELS, count, MOST * np.array(REPEATS), strict=True):
        if not 0 <= scored <= most:
            raise UserError(f"it scored {scored:g} rows for {label!r}; expected 0 to {most}")
    room = 1.001 * count[:, None]  # sums are rounded
    if (np.abs(score) > -FLOOR * room).any() or (square < 0).any() or (square > (2 * FLOOR) ** 2 * room).any():
        limits = f"a log score of each between {FLOOR:g} and {-FLOOR:g}"
        raise UserError(f"its sums are beyond what its rows can give; expected {limits}")


class Chosen(NamedTuple):
    """A choice, and by how much the chosen candidate is ahead of not adapting, for each size."""

    choice: Choice
    gain: Float[np.ndarray, " sizes"]
    error: Float[np.ndarray, " sizes"]
    rows: Float[np.ndarray, " sizes"]

    def to_json(self) -> dict[str, Any]:
        """What a run's result and report tell of it."""
        told: dict[str, Any] = {}
        for place, label in enumerate(LABELS):
            values = dict(zip(self.choice.names, np.asarray(self.choice.values[place], float).tolist(), strict=True))
            told[label] = {
                "settings": {name: float(f"{value:.6g}") for name, value in values.items()},
                "gain": float(self.gain[place]),
                "error": float(self.error[place]),
                "rows": int(self.rows[place] / REPEATS[place]),
            }
        return told


def described(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `Chosen.to_json` told, in words: the settings and their gain, for each size.

    >>> one = {"settings": {"tune.lr": 0.01}, "gain": 0.25, "error": 0.04, "rows": 90}
    >>> described({"up to 10 rows": one, "more rows": {**one, "settings": {"tune.lr": 0.0}, "gain": 0.0}})[0]
    ('up to 10 rows', 'tune.lr 0.01; 0.250 ± 0.040 nats a row better than not adapting')
    >>> described({"more rows": {**one, "gain": 0.0, "rows": 0}})
    [('more rows', 'tune.lr 0.01; not chosen, as no newcomer had rows to score')]
    """
    found, chosen = [], any(one["rows"] for one in told.values())
    for label, one in told.items():
        settings = ", ".join(f"{name} {value:g}" for name, value in one["settings"].items())
        if not chosen:
            found.append((label, f"{settings}; not chosen, as no newcomer had rows to score"))
            continue
        gain = f"{one['gain']:.3f} ± {one['error']:.3f} nats a row better than not adapting"
        found.append((label, f"{settings}; {gain}" if one["gain"] > 0 else "do not adapt"))
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
            words = "not chosen" if not known else settings if told[label]["gain"] > 0 else "do not adapt"
            seeds.setdefault(words, []).append(str(seed))
        each = [f"{words} (seed{'s' * (len(of) > 1)} {', '.join(of)})" for words, of in seeds.items()]
        gains = [told[label]["gain"] for told in runs.values()]
        spread = f" ± {np.std(gains, ddof=1):.3f}" if len(gains) > 1 else ""
        found.append((label, "; ".join(each) if len(each) > 1 else next(iter(seeds)), f"{np.mean(gains):.3f}{spread}"))
    return found


def decided(algorithm: AnyNetwork, told: Up) -> Chosen:
    """The best candidate for each size, or the first where none is ahead of it by its standard error.

    A size that no newcomer has rows for takes the choice of the next smaller one, or of the next larger. Without any row, the
    algorithm's own settings stay.
    """
    settings = candidates(algorithm)
    score, square, count = (np.asarray(part, np.float64) for part in told)
    known = np.flatnonzero(count > 0)
    if not len(known):
        own = np.array([float(_at(algorithm, name)) for name in settings.names], np.float32)
        return Chosen(Choice(settings.names, np.tile(own, (len(SIZES), 1))), *np.zeros((3, len(SIZES))))
    values, gains, errors = [], [], []
    for place in range(len(SIZES)):
        at = known[known <= place][-1] if (known <= place).any() else known[0]
        mean = score[at] / count[at]
        best = int(np.argmax(mean))
        gain = mean[best] - mean[0]
        # A row that is scored again after another draw of rows to adapt with is no new row.
        error = np.sqrt(max(square[at][best] / count[at] - gain**2, 0.0) * REPEATS[at] / count[at])
        best = best if gain > error else 0
        values.append(settings.values[best])
        gains.append(gain if best else 0.0)
        errors.append(error)
    choice = Choice(settings.names, np.asarray(values, np.float32))
    return Chosen(choice, np.array(gains), np.array(errors), count)
