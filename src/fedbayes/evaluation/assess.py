"""Every client of a simulation, scored on its own test rows in three modes.

global: `predict` with a fresh local state, where that is a trained model. personal: with the client's own. adapted: after
`adapt` on its training rows, with the settings that the federation chose; adapted:5 on five of them, drawn at random.
All clients are scored, not only those of the last round; those that were held out never trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import AnyNetwork, Data
from fedbayes.engine import keys
from fedbayes.engine.choose import Choice, adapt
from fedbayes.engine.clients import Call, Simulation
from fedbayes.engine.cohort import FlatRows, Padding, client_data, for_each
from fedbayes.engine.round import ADVICE, Diverged
from fedbayes.errors import UserError
from fedbayes.evaluation.score import SHAPES, SHOWN, Score, blockwise, summary
from fedbayes.evaluation.tables import figures as figures_sheet
from fedbayes.models.predictive import is_numeric
from fedbayes.primitives.training import shuffle
from fedbayes.sheets import html

MODES = ("global", "personal", "adapted")
MANY = 2**31 - 1
NO_GLOBAL = "has no global model, as a client that has no layers of its own has random ones"
BLOCK = 128  # test rows that are predicted at once
DRAWS = 2**24  # bytes of posterior draws that a vmapped group may hold
CHUNK = 256  # clients in one compiled call


class Evaluation(NamedTuple):
    """One `Score` for each client and mode, and which clients were held out."""

    round: int
    scores: dict[str, Score]
    unseen: np.ndarray
    numeric: bool

    def __repr__(self) -> str:
        held_out = f", {self.unseen.sum()} of them unseen" if self.unseen.any() else ""
        return f"Evaluation({', '.join(self.scores)} of {len(self.unseen)} clients{held_out}, after round {self.round})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.table()}"

    def _repr_html_(self) -> str:
        return self.html(repr(self))

    def html(self, title: str) -> str:
        """The main figures by mode and group of clients, for a notebook."""
        sheet = figures_sheet({"": [{"metrics": self.summary()}]}, title)
        sections = [[row[1:] or row for row in rows] for rows in sheet.sections]  # there is one method, and the title names it
        return html(sheet._replace(headings=sheet.headings[1:], sections=sections), words=2)

    def table(self) -> str:
        """The main figures as text, pooled over rows."""
        names = SHOWN[self.numeric]
        lines = [f"{'mode':10}{'clients':15}" + "".join(f"{name:>18}" for name in names)]
        for mode, groups in self.summary().items():
            for group, figures in groups.items():
                lines.append(f"{mode:10}{group:15}" + "".join(f"{figures[name]['rows']:18.4f}" for name in names))
        return "\n".join(lines)

    def summary(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """mode → participating or unseen → figure → rows, clients, spread, worst_tenth."""
        found: dict[str, dict[str, Any]] = {}
        for mode, scores in self.scores.items():
            groups = (("participating", ~self.unseen), ("unseen", self.unseen))
            each = {group: summary(Score(*(one[members] for one in scores)), self.numeric) for group, members in groups}
            found[mode] = {group: figures for group, figures in each.items() if figures}
        return found


def assess(
    simulation: Simulation, modes: tuple[str, ...] | None = None, progress: Callable[[int], None] | None = None
) -> Evaluation:
    """Score every client in the given modes, by default all that the algorithm has, as the simulation stands now."""
    data, algorithm = simulation.data, simulation.algorithm
    modes = modes_of(algorithm, modes)
    key, down = keys.of_round(simulation.seed, simulation.round), simulation.down()
    found = {mode: no_scores(len(data)) for mode in modes}
    for bucket in simulation.buckets:
        length = bucket.train.length + bucket.test.length
        slots = simulation.slots(len(bucket.ids), length, CHUNK, trees.size(down))  # adapted states may be whole networks
        for start in range(0, len(bucket.ids), slots):
            ids = bucket.ids[start : start + slots]
            test = simulation.call(ids, slots, bucket.test, "test")
            local = simulation.local.get(ids, slots)
            for mode in modes:
                if mode == "global":
                    state = jax.tree.map(lambda leaf, n=slots: np.broadcast_to(leaf, (n, *leaf.shape)), simulation.fresh)
                elif mode == "personal":
                    state = local
                else:
                    train = simulation.call(ids, slots, bucket.train, "train")
                    given = (down, simulation.choice, np.int32(few(mode)))
                    state = _per_client(adapted_of, simulation, key, given, local, train)
                    _refuse_diverged(simulation, ids, state)
                score = _per_client(scored, simulation, key, down, state, test)
                # Without a global model, a client that never trained has a random one until it adapts: that is no score.
                scored_ids = np.ones(len(ids), bool) if mode != "personal" or algorithm.has_global else ~data.unseen[ids]
                for column, value in zip(found[mode], score, strict=True):
                    column[ids[scored_ids]] = np.asarray(value)[: len(ids)][scored_ids]
            if progress is not None:
                progress(len(ids))
    return Evaluation(simulation.round, found, data.unseen, is_numeric(algorithm.likelihood))


def modes_of(algorithm: AnyNetwork, modes: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The modes to score: those that are asked for, or all that the algorithm has; one that it has not is refused.

    >>> import fedbayes as fb
    >>> model = fb.models.mlp((4,), fb.models.Categorical(2))
    >>> modes_of(fb.FedPer(model)), modes_of(fb.FedPer(model, population=False))
    (('global', 'personal', 'adapted'), ('personal', 'adapted'))
    """
    if modes is None:
        return tuple(mode for mode in MODES if mode != "global" or algorithm.has_global)
    if isinstance(modes, str):
        raise UserError(f"the modes are {modes!r}, but they are a tuple of names, such as ({modes!r},)")
    for mode in modes:
        if mode not in MODES and not few(mode) < MANY:
            raise UserError(f"there is no mode {mode!r}; choose from {', '.join(MODES)}, or adapted:5 for five rows")
    if "global" in modes and not algorithm.has_global:
        raise UserError(f"{algorithm.title} with these settings {NO_GLOBAL}; score the modes personal and adapted")
    return modes


def few(mode: str) -> int:
    """The rows that a mode adapts with; very many where it names none.

    >>> few("adapted:5"), few("adapted") == MANY
    (5, True)
    """
    name, _, count = mode.partition(":")
    return int(count) if name == "adapted" and count.isdigit() and int(count) > 0 else MANY


def _refuse_diverged(simulation: Simulation, ids: np.ndarray, state: Any) -> None:
    """A client whose adapted state is not finite would be scored as if it knew nothing; that is no result."""
    fine = np.asarray(_each_finite(state))[: len(ids)]
    if not fine.all():
        names = ", ".join(str(name) for name in simulation.data.names[ids[~fine][:5]])
        raise Diverged(f"adapting diverged on {(~fine).sum()} of {len(ids)} clients ({names} …); {ADVICE} in `tune`")


_each_finite = jax.jit(jax.vmap(trees.finite))


def no_scores(count: int) -> Score:
    """Room for the scores of `count` clients."""
    return Score(*(np.zeros((count, *shape), np.float32) for shape in SHAPES))


def _per_client(one: Callable[..., Any], simulation: Simulation, key: PRNGKeyArray, down: Any, state: Any, call: Call) -> Any:
    width, count = simulation.width if simulation.backend == "vmap" else 1, np.int32(len(call.ids))
    if one is scored:
        # Many posterior draws of many rows are large, whatever the size of the network.
        x = jax.ShapeDtypeStruct((min(BLOCK, call.padding.length), *simulation.data.shape), simulation.data.x.dtype)
        single = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state)
        draws = trees.size(jax.eval_shape(simulation.algorithm.predict, key, down, single, x))
        while width > 1 and (width * draws > DRAWS or call.slots % width):
            width -= 1
    return _run(one, simulation.algorithm, width, call.padding, key, down, call.padded_ids, count, state, call.rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    one: Callable[..., Any],
    algorithm: AnyNetwork,
    width: int,
    padding: Padding,
    key: PRNGKeyArray,
    down: Any,
    ids: Any,
    count: Any,
    state: Any,
    rows: FlatRows,
) -> Any:
    def client(id: Any, state: Any, start: Any, count: Any) -> Any:
        return one(algorithm, keys.fold(key, id), down, state, client_data(rows, padding, start, count))

    return for_each(client, width, count, ids, state, rows.starts, rows.counts)


def adapted(algorithm: AnyNetwork, key: PRNGKeyArray, down: Any, choice: Choice | None, local: Any, data: Data) -> Any:
    """A client's state after `adapt`; the key is the client's own of the round."""
    return adapt(algorithm, choice, keys.fold(key, np.uint32(keys.ADAPT)), down, local, data)


def adapted_of(algorithm: AnyNetwork, key: PRNGKeyArray, given: tuple[Any, Choice | None, Any], local: Any, data: Data) -> Any:
    """The same after `adapt` on so many of the rows, drawn at random."""
    down, choice, count = given
    place = jnp.argsort(shuffle(keys.fold(key, np.uint32(keys.CHOOSE)), data))
    return adapted(algorithm, key, down, choice, local, data._replace(mask=data.mask & (place < count)))


def scored(algorithm: AnyNetwork, key: PRNGKeyArray, down: Any, local: Any, data: Data) -> Score:
    """A client's score on some rows; the key is the client's own of the round."""
    draw = keys.fold(key, np.uint32(keys.PREDICT))
    return blockwise(lambda x: algorithm.predict(draw, down, local, x), algorithm.likelihood, data, BLOCK)
