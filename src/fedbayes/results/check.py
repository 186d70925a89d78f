"""A test of life: which parts of a fit's uncertainty are worth something on clients' test rows."""

from __future__ import annotations

import jax
import numpy as np

from fedbayes.algorithm import AnyNetwork
from fedbayes.data.clients import Clients
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import MODES
from fedbayes.evaluation.dissect import Given, dissect
from fedbayes.evaluation.life import Check, Life, Worth
from fedbayes.models.predictive import is_numeric
from fedbayes.results.fit import Fit
from fedbayes.results.posterior import checked_rows
from fedbayes.results.simulate import simulate

MOST = 64
"""Clients of a mode, by default at most."""


def check(
    fit: Fit,
    clients: Clients | None = None,
    *,
    modes: tuple[str, ...] | None = None,
    most: int = MOST,
    elsewhere: np.ndarray | None = None,
    twin: bool = False,
) -> Check:
    """Take the uncertainty of a fit apart: averaging, learnt scales, the person, the prior, and noise while training.

    Args:
        fit: A fit over clients.
        clients: Their rows, where the fit was opened from a folder.
        modes: Which of global, personal and adapted; by default those in which predictions differ.
        most: Clients of a mode, at most; drawn at random where there are more.
        elsewhere: Rows of another kind, on which predictions should be less sure; by default the test rows with each feature
            permuted over a client's rows.
        twin: Also train the same method without noise in its steps, for as many rounds, where it has such a twin.

    >>> import fedbayes as fb
    >>> clients = fb.data.synthetic(clients=20, rows=60, features=8, classes=4)
    >>> fit = fb.simulate(fb.FedPop(fb.network("linear", clients), sigma=0.5), clients, rounds=10, choose=False)
    >>> found = check(fit)
    >>> found["adapted"].parts["person"].sign
    1
    """
    if not isinstance(fit, Fit):
        raise UserError(
            f"the fit is {type(fit).__name__}, but this test is for networks over clients; see fit.verdict for silos"
        )
    data = fit.simulation.data if clients is None else clients
    names = [str(name) for name in data.names]
    if names != fit.members.names:
        raise UserError(
            f"the rows are of {data.name} with {len(names)} clients, but the fit is of {len(fit.members.names)} others"
        )
    if most < 2:
        raise UserError(f"most is {most}, but a standard error over clients needs at least two")
    rows = None if elsewhere is None else checked_rows(elsewhere, data.shape)
    algorithm, lives = fit.shared.algorithm, []
    found = [_life(fit, data, mode, most, rows) for mode in _modes(fit, modes)]
    other = _twin(fit, data) if twin else None
    for life, alone in found:
        if other is not None:
            worth = alone - _life(other, data, life.mode, most, rows)[1]
            life = life._replace(parts={**life.parts, "training": Worth.of(worth)})
        lives.append(life)
    said = (
        "elsewhere: the test rows with each feature permuted over rows"
        if rows is None
        else f"elsewhere: {len(rows)} given rows"
    )
    return Check(algorithm.title, data.name, tuple(lives), is_numeric(algorithm.likelihood), said)


def _modes(fit: Fit, modes: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those that are asked for; by default not personal where clients keep nothing, nor global where there is no posterior."""
    algorithm, shared = fit.shared.algorithm, fit.shared
    if modes is not None:
        if unknown := [mode for mode in modes if mode not in MODES or (mode == "global" and not algorithm.has_global)]:
            raise UserError(f"there is no mode {unknown[0]!r} of {algorithm.title} to check; choose from {', '.join(MODES)}")
        return modes
    keeps = bool(jax.tree.leaves(shared.local))
    posterior = algorithm.beliefs(shared.down, shared.local).posterior
    there = {"global": posterior is not None and algorithm.has_global, "personal": keeps, "adapted": True}
    return tuple(mode for mode in MODES if there[mode])


def _life(fit: Fit, data: Clients, mode: str, most: int, elsewhere: np.ndarray | None) -> tuple[Life, np.ndarray]:
    shared, states = fit.shared, fit.members.states
    able = (data.test_counts > 0) & (~data.unseen if mode == "personal" else data.train_counts > 0)
    ids = np.flatnonzero(able)
    if len(ids) < 2:
        raise UserError(f"{len(ids)} clients have test rows to check the mode {mode} with, but it takes at least two")
    if len(ids) > most:
        ids = np.sort(np.random.default_rng(0).choice(ids, most, replace=False))

    def fresh(group: np.ndarray) -> object:
        return jax.tree.map(lambda leaf: np.broadcast_to(leaf, (len(group), *leaf.shape)), shared.local)

    given = Given(shared.algorithm, shared.down, shared.key, shared.choice)
    return dissect(given, data, ids, mode, fresh if mode == "global" else states.get, elsewhere)


def _twin(fit: Fit, data: Clients) -> Fit:
    """The same run without noise in its steps."""
    algorithm: AnyNetwork | None = fit.shared.algorithm.deterministic
    if algorithm is None:
        raise UserError(
            f"{fit.shared.algorithm.title} with these settings has no twin without noise in its steps; leave twin out"
        )
    same = {name: fit.result[name] for name in ("cohort", "seed", "dropout")}
    return simulate(algorithm, data, fit.result["rounds"], **same, choose=fit.shared.choice is not None, modes=("adapted",))
