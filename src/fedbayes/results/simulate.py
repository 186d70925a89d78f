"""From an algorithm and clients to a fit: rounds, checkpoints, evaluation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np

from fedbayes import wire
from fedbayes.algorithm import AnyNetwork, AnyStructured, NetworkAlgorithm, StructuredAlgorithm
from fedbayes.algorithms.default import default
from fedbayes.data.clients import Clients
from fedbayes.engine import round as steps
from fedbayes.engine.choose import Choice, Choosing, Plan
from fedbayes.engine.clients import Simulation
from fedbayes.engine.local_state import States
from fedbayes.engine.round import round_count
from fedbayes.engine.silo_data import naming_silo
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation, assess, modes_of
from fedbayes.results.fit import Fit
from fedbayes.results.folder import AGAIN, SCHEMA, Run, about, describe_data, fingerprint, identity
from fedbayes.results.loop import listening, recorder, run_rounds
from fedbayes.results.opened import keep
from fedbayes.results.structured_fit import SiloFit
from fedbayes.results.structured_run import fit_silos

log = logging.getLogger("fedbayes")


@overload
def simulate(algorithm: AnyNetwork, data: Clients, rounds: int | None = ..., **options: Any) -> Fit: ...


@overload
def simulate(algorithm: AnyStructured, data: Mapping[str, Any], rounds: int | None = ..., **options: Any) -> SiloFit: ...


def simulate(algorithm: Any, data: Any, rounds: int | None = None, **options: Any) -> Fit | SiloFit:
    """Train an algorithm: over clients (`simulate_clients` has the options), or a structured model over silos (`fit_silos`).

    Without `rounds` there are as many as the method commonly needs: 100 over clients.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> fb.simulate(fb.FedAvg(fb.network("mlp", clients)), clients, rounds=2, cohort=5)
    Fit(FedAvg, 2 rounds on digits)
    """
    if isinstance(algorithm, NetworkAlgorithm):
        if not isinstance(data, Clients):
            given, title = type(data).__name__, algorithm.title
            raise UserError(f"data is {given}, but it is Clients for {title}, a network's method; EP, PVI and SFVI fit silos")
        return simulate_clients(algorithm, data, algorithm.default_rounds if rounds is None else rounds, **options)
    if not isinstance(algorithm, StructuredAlgorithm):
        given = algorithm.__name__ if isinstance(algorithm, type) else repr(algorithm)
        raise UserError(f"the algorithm is {given}, but it is one with its network or model, such as fb.FedAvg(model)")
    if not isinstance(data, Mapping):
        raise UserError(f"data is {type(data).__name__}, but {algorithm.title} fits silos: give a dict of names and their data")
    return fit_silos(algorithm, data, rounds, **options)


def fit(
    population: Callable[[], Any],
    silo: Callable[[Any, Any], None],
    silos: Mapping[str, Any],
    rounds: int | None = None,
    **options: Any,
) -> SiloFit:
    """Fit a NumPyro model over silos: `simulate` with the method that suits the model, EP up to 120 global latents.

    Args:
        population: Samples what all silos share.
        silo: Given what `population` returned and a silo's data: samples its own latents and observes its data.
        silos: Each silo's data by its name.
        rounds: At most so many; EP ends by itself.
        options: Those of `fit_silos`, such as seed and folder.

    >>> import fedbayes as fb, numpyro, numpyro.distributions as dist
    >>> def population():
    ...     return numpyro.sample("mean", dist.Normal(0.0, 10.0))
    >>> def silo(mean, data):
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])
    >>> found = fb.fit(population, silo, {"a": {"y": np.ones(8)}, "b": {"y": np.zeros(8)}})
    >>> bool(abs(found.draws()["mean"].mean() - 0.5) < 0.05)
    True
    """
    algorithm, why = suited(population, silo, silos if isinstance(silos, Mapping) else {})
    if why:
        log.warning("%s", why)
    return simulate(algorithm, silos, rounds, **options)


def suited(
    population: Callable[[], Any], silo: Callable[[Any, Any], None], silos: Mapping[str, Any]
) -> tuple[AnyStructured, str]:
    """The algorithm that suits a model, and why where it is not EP; an error names the silo that it was read with."""
    for name, data in silos.items():
        return naming_silo(name, default, population, silo, data)
    return default(population, silo)


def simulate_clients(
    algorithm: AnyNetwork,
    data: Clients,
    rounds: int = 100,
    *,
    cohort: int | float | None = None,
    seed: int = 0,
    dropout: float = 0.0,
    clients: Literal["vmap", "loop"] = "vmap",
    evaluate_every: int = 0,
    average_last: int = 0,
    modes: tuple[str, ...] | None = None,
    choose: bool = True,
    folder: Path | str | None = None,
    resume: bool = False,
    force: bool = False,
    checkpoint_every: int = 10,
    callbacks: Sequence[Any] = (),
    config: dict[str, Any] | None = None,
) -> Fit:
    """Train `algorithm` over the clients for some rounds, then score every client.

    Args:
        algorithm: What to train.
        data: The clients.
        rounds: How many rounds; also the length of every schedule that has none of its own.
        cohort: How many clients take part in a round, or which share; all by default.
        seed: Of everything that is random.
        dropout: Share of a cohort that does not answer.
        clients: "vmap", or "loop" to run them one by one and see which step of which client fails.
        evaluate_every: Score every client each so many rounds too, into the history.
        average_last: Score every client after each of the last so many rounds, and give the mean of their figures in
            `result["average"]`, as some papers report.
        modes: Which of global, personal and adapted to score; by default all that the algorithm has. adapted:5 is after `adapt`
            on five rows.
        choose: Let the federation choose settings of `adapt`, in runs of ten rounds and eight participants or more: a fifth of
            them joins the training late, and scores candidates as newcomers do (`fedbayes.engine.choose`).
        folder: Where to keep the run; without one, nothing is written.
        resume: Go on from the folder's checkpoint.
        force: Start over in a folder that holds a run.
        checkpoint_every: Rounds between checkpoints.
        callbacks: Called with the simulation and the `Round` after each; trackers (`fedbayes.results.trackers`) are such.
        config: What else identifies the run, for config.json.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> fit = fb.simulate(fb.FedAvg(fb.network("mlp", clients)), clients, rounds=2, cohort=5)
    >>> fit
    Fit(FedAvg, 2 rounds on digits)
    >>> x, y = clients.rows("3", "test")
    >>> fit.predict(x[:2], client="3", adapted=True).shape
    (2, 10)
    """
    rounds = round_count(rounds)
    check_reads(algorithm, data)
    if not 0 <= average_last <= rounds:
        raise UserError(f"average_last is {average_last}, but it is a number of rounds out of {rounds}")
    algorithm = algorithm.planned(rounds, **data.facts)
    modes = modes_of(algorithm, modes)
    settings = identity(algorithm, rounds=rounds, cohort=cohort, seed=seed, dropout=dropout, evaluate_every=evaluate_every)
    settings |= {"average_last": average_last, "modes": list(modes), "data": describe_data(data)}
    settings |= {"model": fingerprint(algorithm, data), **({} if choose else {"choose": False}), **(config or {})}
    # All that can be wrong is found before anything is written, and before a run that is there is removed.
    plan = Plan.of(algorithm, seed, data.participants, rounds) if choose else None
    leaves = wire.manifest(algorithm, data.example)
    messages = [(steps.cohort_size(cohort, len(data.participants)), leaves)]
    if plan is not None:
        messages.append((len(plan.newcomers), wire.manifest(Choosing(algorithm, plan.repeats), data.example)))
    for _, sent in messages:
        wire.check(sent)
    simulation = Simulation(algorithm, data, cohort=cohort, seed=seed, dropout=dropout, clients=clients, plan=plan)
    run = Run(Path(folder), settings, resume, force) if folder is not None else None
    with run or contextlib.nullcontext():
        history: list[dict[str, Any]] = []
        if run is not None:
            simulation.local = States(simulation.fresh, len(data), run.folder / "local")
            history = run.restore(simulation)
            simulation.choice = Choice.from_json(algorithm, run.choice)
            if simulation.choice is not None:  # it stays, also where the run is extended
                simulation.plan = None
            if run.finished:
                result, evaluation = run.outcome(simulation)
                return Fit.of(simulation, evaluation, result, history)
            run.tell(about(messages, data))
        listeners = listening(callbacks, settings)
        record = recorder(history, run, listeners)

        def evaluated(round: int) -> Evaluation:
            started = time.perf_counter()
            evaluation = assess(simulation, modes)
            if run is not None:
                run.time("evaluation", round, time.perf_counter() - started)
            record({"round": round, "evaluation": evaluation.summary()})
            return evaluation

        def after(round: int) -> None:
            if simulation.plan is not None and round == simulation.plan.until:
                started = time.perf_counter()
                record({"round": round, "choice": simulation.choose().to_json()})
                if run is not None:
                    run.time("choice", round, time.perf_counter() - started)
            if ((evaluate_every and round % evaluate_every == 0) or round > rounds - average_last) and round < rounds:
                evaluated(round)

        run_rounds(simulation, rounds, record, run, listeners, due=lambda round: round % checkpoint_every == 0, after=after)
        evaluation = evaluated(rounds)
        result = {"schema": SCHEMA, **settings, "metrics": history[-1]["evaluation"]}
        if told := next((one["choice"] for one in history if one.get("choice")), None):
            result["choice"] = told
        if average_last:
            recent = [one["evaluation"] for one in history if "evaluation" in one and one["round"] > rounds - average_last]
            if len(recent) < average_last:
                raise UserError(f"metrics.jsonl lacks evaluations of the last {average_last} rounds; {AGAIN}")
            result["average"] = jax.tree.map(lambda *values: float(np.mean(values)), *recent)
        fit = Fit.of(simulation, evaluation, result, history)
        if run is not None:
            keep(fit, run.folder)
            run.finish(result, evaluation)
        for one in listeners:
            one.finished(result)
        return fit


def check_reads(algorithm: AnyNetwork, data: Clients) -> None:
    """Refuse a network that was made for other rows."""
    model, row = algorithm.model, jax.ShapeDtypeStruct((1, *data.shape), data.x.dtype)
    try:
        jax.eval_shape(model.apply, jax.eval_shape(model.init, jax.random.key(0)), row)
    except (TypeError, ValueError) as problem:
        why, advice = str(problem).splitlines()[0], 'make one for this data, such as fb.network("mlp", clients)'
        raise UserError(f"{model} cannot read rows of shape {data.shape} ({why}); {advice}") from problem
