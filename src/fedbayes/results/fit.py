"""From an algorithm and clients to a fit: rounds, checkpoints, evaluation, predictions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import __version__, wire
from fedbayes.algorithm import AnyNetwork, AnyStructured, Data, NetworkAlgorithm, StructuredAlgorithm
from fedbayes.data.clients import Clients
from fedbayes.engine import keys
from fedbayes.engine.clients import Simulation
from fedbayes.engine.local_state import States
from fedbayes.engine.round import round_count
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import MODES, Evaluation, assess, check_modes
from fedbayes.models.predictive import Uncertainty
from fedbayes.results.folder import SCHEMA, Run, about, describe, describe_data, fingerprint
from fedbayes.results.loop import listening, run_rounds
from fedbayes.results.posterior import Posterior, RowSpec
from fedbayes.results.structured_fit import SiloFit, fit_silos


@dataclasses.dataclass
class Fit:
    """A finished simulation: its state, its history and how well it predicts."""

    simulation: Simulation
    evaluation: Evaluation
    result: dict[str, Any]
    history: list[dict[str, Any]]

    def __repr__(self) -> str:
        return f"Fit({self.result['algorithm']}, {self.result['rounds']} rounds on {self.result['data']['name']})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.evaluation.table()}"

    def _repr_html_(self) -> str:
        return self.evaluation.html(repr(self))

    def draws(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Float[Array, "s n k"]:
        """Posterior draws of the likelihood's parameters for rows `x`.

        Without a client, of the shared model; with one, of its personal model, or, `adapted`, after `adapt` on its training
        rows. A client that never trained has nothing of its own until it adapts.
        """
        return self.posterior_of(client, adapted=adapted).draws(x)

    def predict(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Float[Array, "n c"]:
        """The prediction for rows `x`: probabilities of the labels, or mean and standard deviation of a number."""
        return self.posterior_of(client, adapted=adapted).predict(x)

    def uncertainty(self, x: Any, client: str | None = None, *, adapted: bool = False) -> Uncertainty:
        """How sure the prediction for each row is: total, aleatoric and epistemic, in nats for labels."""
        return self.posterior_of(client, adapted=adapted).uncertainty(x)

    def posterior_of(self, client: str | None = None, *, adapted: bool = False) -> Posterior:
        """The model that predicts for a client, to use or to `save`: its personal one, or, `adapted`, after `adapt`.

        Without a client, the shared model.
        """
        simulation, local = self.simulation, self.simulation.fresh
        key, who, count = keys.of_round(simulation.seed, simulation.round), "everybody", None
        if client is not None:
            place = simulation.data.index(client)
            key, who = keys.fold(key, np.uint32(place)), f"client {client}"
            local = jax.tree.map(lambda leaf: leaf[0], simulation.local.get(np.array([place])))
            count = int(simulation.data.train_counts[place])
        elif adapted:
            raise UserError("adapted needs a client: it is the client's own training rows that the model is fitted to")
        local = jax.tree.map(jnp.asarray, local)
        if adapted:
            rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), simulation.data.train([place], max(1, count or 0)))
            local = simulation.algorithm.adapt(keys.fold(key, np.uint32(keys.ADAPT)), simulation.down(), local, rows)
        return self._posterior(local, key, who, count)

    def _posterior(self, local: Any, key: PRNGKeyArray, who: str, rows: int | None) -> Posterior:
        simulation = self.simulation
        run = {name: self.result[name] for name in ("algorithm", "data", "model", "fedbayes")}
        made = {"for": who, "rows": rows, "rounds": simulation.round, "seed": simulation.seed, **run}
        return Posterior(simulation.algorithm, simulation.down(), local, key, RowSpec.of(simulation.data), made)

    def adapt(self, x: Any, y: Any = None) -> Posterior:
        """A personal model for somebody's rows, who need not be among the clients.

        Labels may be missing where the method does not look at them, as FedVI.

        >>> import fedbayes as fb
        >>> clients = fb.data.load("digits", hold_out=4)
        >>> fit = fb.simulate(fb.FedVI(fb.network("mlp", clients)), clients, rounds=1, cohort=5)
        >>> x, _ = clients.rows("3")
        >>> fit.adapt(x).predict(x[:2]).shape
        (2, 10)
        """
        simulation = self.simulation
        x = RowSpec.of(simulation.data).check(x)
        if y is None and wire.adapt_reads_labels(simulation.algorithm, simulation.data.example):
            raise UserError(
                f"{self.result['algorithm']} adapts to rows with labels, but there are none; give y, or train a method that "
                "needs none, such as fedvi"
            )
        labels = np.zeros(len(x), simulation.data.y.dtype) if y is None else np.asarray(y)
        classes = simulation.data.classes
        if labels.shape != (len(x),) or (classes is not None and not np.isin(labels, np.arange(len(classes))).all()):
            kind = "a number" if classes is None else f"a label from 0 to {len(classes) - 1}"
            raise UserError(f"y has shape {labels.shape}; expected {kind} for each of the {len(x)} rows of x")
        key = keys.fold(keys.of_round(simulation.seed, simulation.round), np.uint32(len(simulation.data)))
        rows = Data(jnp.asarray(x), jnp.asarray(labels.astype(simulation.data.y.dtype)), jnp.ones(len(x), bool))
        local = jax.tree.map(jnp.asarray, simulation.fresh)
        adapted = simulation.algorithm.adapt(keys.fold(key, np.uint32(keys.ADAPT)), simulation.down(), local, rows)
        return self._posterior(adapted, key, f"{len(x)} rows", len(x))


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
            raise UserError(
                f"data is {type(data).__name__}, but it is Clients for {algorithm.title}, which trains a network; use SFVI, "
                "SFVIAvg or PVI for silos"
            )
        return simulate_clients(algorithm, data, algorithm.default_rounds if rounds is None else rounds, **options)
    if not isinstance(algorithm, StructuredAlgorithm):
        given = algorithm.__name__ if isinstance(algorithm, type) else repr(algorithm)
        raise UserError(f"the algorithm is {given}, but it is one with its network or model, such as fb.FedAvg(model)")
    if not isinstance(data, Mapping):
        raise UserError(f"data is {type(data).__name__}, but {algorithm.title} fits silos: give a dict of names and their data")
    return fit_silos(algorithm, data, rounds, **options)


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
    modes: tuple[str, ...] = MODES,
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
        modes: Which of global, personal and adapted to score.
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
    settings: dict[str, Any] = {
        "fedbayes": __version__,
        "algorithm": algorithm.title,
        "options": describe(algorithm),
        "rounds": rounds,
        "cohort": cohort,
        "seed": seed,
        "dropout": dropout,
        "evaluate_every": evaluate_every,
        "average_last": average_last,
        "modes": list(modes),
        "data": describe_data(data),
        "model": fingerprint(algorithm, data),
        **(config or {}),
    }
    check_modes(modes)
    # All that can be wrong is found before anything is written, and before a run that is there is removed.
    leaves = wire.manifest(algorithm, data.example)
    wire.check(leaves)
    simulation = Simulation(algorithm, data, cohort=cohort, seed=seed, dropout=dropout, clients=clients)
    run = Run(Path(folder), settings, resume, force) if folder is not None else None
    history: list[dict[str, Any]] = []
    if run is not None:
        simulation.local = States(simulation.fresh, len(data), run.folder / "local")
        history = run.restore(simulation)
        if run.finished:
            result, evaluation = run.outcome(simulation)
            return Fit(simulation, evaluation, result, history)
        run.tell(about([(simulation.cohort, leaves)], data))

    listeners = listening(callbacks)

    def assessed() -> Evaluation:
        started = time.perf_counter()
        evaluation = assess(simulation, modes)
        if run is not None:
            run.time("evaluation", simulation.round, time.perf_counter() - started)
        return evaluation

    def record(entry: dict[str, Any]) -> None:
        history.append(entry)
        if run is not None:
            run.log(entry)
        if "evaluation" in entry:
            for one in listeners:
                one.evaluated(entry["round"], entry["evaluation"])

    def evaluate(round: int) -> None:
        wanted = (evaluate_every and round % evaluate_every == 0) or round > rounds - average_last
        if wanted and round < rounds:
            record({"round": round, "evaluation": assessed().summary()})

    for one in listeners:
        one.started(settings)
    run_rounds(simulation, rounds, record, run, listeners, due=lambda round: round % checkpoint_every == 0, after=evaluate)
    evaluation = assessed()
    figures = evaluation.summary()
    record({"round": rounds, "evaluation": figures})
    result = {"schema": SCHEMA, **settings, "metrics": figures}
    if average_last:
        recent = [entry["evaluation"] for entry in history if "evaluation" in entry and entry["round"] > rounds - average_last]
        result["average"] = jax.tree.map(lambda *values: float(np.mean(values)), *recent)
    if run is not None:
        run.finish(result, evaluation)
    for one in listeners:
        one.finished(result)
    return Fit(simulation, evaluation, result, history)


def check_reads(algorithm: AnyNetwork, data: Clients) -> None:
    """Refuse a network that was made for other rows."""
    model, row = algorithm.model, jax.ShapeDtypeStruct((1, *data.shape), data.x.dtype)
    try:
        jax.eval_shape(model.apply, jax.eval_shape(model.init, jax.random.key(0)), row)
    except (TypeError, ValueError) as problem:
        raise UserError(
            f"{model} cannot read rows of shape {data.shape} ({str(problem).splitlines()[0]}); make one for this data, "
            'such as fb.network("mlp", clients)'
        ) from problem
