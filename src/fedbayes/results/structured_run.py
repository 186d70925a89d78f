"""A fit over silos from its settings to its run folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes import files, trees, wire
from fedbayes.algorithm import AnyStructured
from fedbayes.engine.round import round_count
from fedbayes.engine.silo_data import from_shapes, naming_silo, plan, read
from fedbayes.engine.silos import SiloSimulation, SiloStates
from fedbayes.errors import UserError
from fedbayes.models.structured import numbers
from fedbayes.results import serialise
from fedbayes.results.folder import SCHEMA, SHARED, Run, about, identity
from fedbayes.results.loop import listening, recorder, run_rounds
from fedbayes.results.pictures import write_pictures
from fedbayes.results.structured_fit import CORRECTED, SiloFit, kept_draws, summarised
from fedbayes.results.verdict import LARGEST, Correct
from fedbayes.wire import provenance

if TYPE_CHECKING:
    pass

CHECKPOINT = 10.0  # seconds between checkpoints
WINDOWS = 200  # points of a run's curve of bounds


def fit_silos(
    algorithm: AnyStructured,
    data: Mapping[str, Any],
    rounds: int | None = None,
    *,
    cohort: int | float | None = None,
    in_turn: bool = False,
    seed: int = 0,
    loop: bool = False,
    correct: Correct = "auto",
    start: SiloFit | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    callbacks: Sequence[Any] = (),
    config: dict[str, Any] | None = None,
) -> SiloFit:
    """What `fedbayes.simulate` does for silos; see there.

    After the last round an evidence round judges the fit (`verdict.py`). `correct` says whether more of them may replace q's
    draws of what silos share by corrected ones: where the verdict asks for it (`"auto"`), always, or never.

    >>> import numpyro, numpyro.distributions as dist
    >>> from fedbayes.algorithms.sfvi import SFVI
    >>> def population():
    ...     return numpyro.sample("mean", dist.Normal(0.0, 10.0))
    >>> def silo(mean, data):
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])
    >>> fit = fit_silos(SFVI(population, silo, lr=0.05), {"a": {"y": np.ones(8)}, "b": {"y": np.zeros(8)}}, 500)
    >>> bool(abs(fit.draws()["mean"].mean() - 0.5) < 0.05)
    True
    """
    rounds = round_count(algorithm.rounds or algorithm.default_rounds if rounds is None else rounds)
    silos = read(data, algorithm, together=not loop)
    algorithm = plan(algorithm, silos, rounds)
    simulation = SiloSimulation(algorithm, silos, cohort=cohort, in_turn=in_turn, seed=seed, loop=loop)
    messages = []
    for group in simulation.groups:
        name = simulation.names[group.places[0]]
        leaves = naming_silo(name, wire.manifest, algorithm, trees.put_together(*simulation.parts[group.places[0]]))
        wire.check(leaves)
        messages.append((len(group.places), leaves))
    if start is not None:
        _start_from(simulation, start)
    settings = identity(algorithm, rounds=rounds, cohort=cohort, in_turn=in_turn, seed=seed, start=start and repr(start))
    settings |= {**_describe_silos(simulation), **(config or {}), **({} if correct == "auto" else {"correct": correct})}
    run = Run(Path(folder), settings, resume, force) if folder is not None else None
    with run or contextlib.nullcontext():
        history: list[dict[str, Any]] = []
        if run is not None:
            simulation.local = SiloStates(simulation, run.folder / "local")
            history = run.restore(simulation)
            if not run.finished:
                run.tell(about(messages))
        listeners = listening(callbacks, None if run is not None and run.finished else settings)
        record, saved = recorder(history, run, listeners), time.perf_counter()

        def due(round: int) -> bool:
            nonlocal saved
            if time.perf_counter() - saved < CHECKPOINT:
                return False
            saved = time.perf_counter()
            return True

        run_rounds(simulation, rounds, record, run, listeners, window=max(1, rounds // WINDOWS), due=due)
        fit = SiloFit.of(simulation, settings, history)
        if run is not None and run.finished:
            fit.result = files.read_json(run.folder / "result.json", posterior=dict)
            fit.corrected = kept_draws(run.folder)
            return fit
        began = time.perf_counter()
        fit.result = {"schema": SCHEMA, **settings, "rounds": simulation.round, **_figures(fit, correct)}
        if run is not None:
            arrays: dict[str, np.ndarray] = {}
            form = serialise.flatten(fit.shared, "shared", arrays)
            if fit.corrected is not None:
                arrays[CORRECTED] = fit.corrected
            files.save(run.folder / SHARED, arrays, {"shared": form, "silos": list(fit.names)})
            write_pictures(fit, run.folder)
            fit.result["sha256"] = {"posterior.nc": files.sha256(run.folder / "posterior.nc")}
            run.time("posterior", simulation.round, time.perf_counter() - began)
            run.finish(fit.result)
        for one in listeners:
            one.finished(fit.result)
        return fit


def _figures(fit: SiloFit, correct: Correct) -> dict[str, Any]:
    """The posterior of each number that silos share, up to a few hundred of them, the bound and the verdict."""
    verdict = fit.assess(correct).verdict
    posterior = summarised(numbers(fit.draws(4000), LARGEST))
    theta = {name: float(value[0]) for name, value in numbers({k: v[None] for k, v in fit.theta.items()}, LARGEST)}
    bounds = [entry["bound"] for entry in fit.history[-max(1, len(fit.history) // 20) :] if "bound" in entry]
    bound = float(np.mean(bounds)) if bounds else None
    of_q = {name: verdict["checks"].get(name) for name in ("khat", "ess")}
    return {"posterior": posterior, "theta": theta, "bound": bound, **of_q, "verdict": verdict}


def _start_from(simulation: SiloSimulation, start: SiloFit) -> None:
    """η_G, θ and η_L from another fit of the same model and silos."""
    algorithm = simulation.algorithm
    if not algorithm.starts_anywhere and type(algorithm) is not type(start.simulation.algorithm):
        raise UserError(f"{algorithm.title} cannot start from another method's fit; SFVI can")
    if start.simulation.names != simulation.names:
        raise UserError("a fit to start from must be of the same silos, in the same order")
    there, here = (jax.tree.map(jnp.shape, shared) for shared in (start.shared, algorithm.shared(simulation.state)))
    if there != here:
        raise UserError("a fit to start from must have the same model and family")
    simulation.state = simulation.state._replace(shared=start.shared)
    for name in simulation.names:
        simulation.put(name, algorithm.local_from(simulation.own(name), start.eta(name), start.shared))


def _describe_silos(simulation: SiloSimulation) -> dict[str, Any]:
    """Who the silos are, a digest of their data, and one of the model as a program."""
    structured = simulation.algorithm.structured
    digest, programs, rows, z = hashlib.sha256(), [], {}, jnp.zeros(structured.size())

    def log_joint(form: trees.Form, z: Any, z_L: Any, arrays: Any) -> Any:
        return structured.log_population({}, z), structured.log_silo({}, z, z_L, trees.put_together(form, arrays))

    for name in simulation.names:
        form, arrays = trees.take_apart(simulation.data(name))
        rows[name] = from_shapes(structured.rows, form, arrays)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        plates, blocks = (from_shapes(what, form, arrays) for what in (structured.plates, structured.blocks))
        z_L = {plate: jnp.zeros((plates[plate].size, d)) for plate, (_, d) in blocks.items()}
        programs.append(jax.make_jaxpr(functools.partial(log_joint, form))(z, z_L, arrays))
    return {"data": {"silos": rows, "fingerprint": digest.hexdigest()[:16]}, "model": provenance.digest(*programs)}
