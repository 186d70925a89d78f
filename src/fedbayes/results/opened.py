"""A run folder is enough: the shared model and what clients keep, without anybody's rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes import files
from fedbayes.algorithm import AnyNetwork, AnyStructured
from fedbayes.engine.local_state import States
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.results import serialise
from fedbayes.results.fit import Fit, Members
from fedbayes.results.folder import AGAIN, MEMBERS, SHARED, read_evaluation, read_history
from fedbayes.results.posterior import Posterior
from fedbayes.results.structured_fit import SiloFit, kept_draws
from fedbayes.results.structured_run import fit_silos


def keep(fit: Fit, folder: Path) -> None:
    """Put the shared model and the clients' names into a run's folder."""
    members = fit.members
    about = {"names": members.names, "unseen": np.flatnonzero(members.unseen).tolist()}
    about |= {"rows": np.asarray(members.counts).tolist(), "local": members.states.digest()}
    files.write_json(folder / MEMBERS, about, compact=True)
    try:
        fit.shared.save(folder / SHARED)
    except UserError as problem:
        warnings.warn(f"{folder} can be opened with its clients' rows alone: {problem}", stacklevel=3)


def open(
    folder: Path | str,
    *,
    model: Model | None = None,
    algorithm: AnyNetwork | AnyStructured | None = None,
    silos: Mapping[str, Any] | None = None,
) -> Fit | SiloFit:
    """The fit of a finished run, from its folder alone: to predict, to personalise for newcomers, to look at its scores.

    Args:
        folder: What `simulate(…, folder=…)`, `fedbayes run` or `fedbayes fit` left.
        model: The network, where it is your own code.
        algorithm: The algorithm with its network or model, where that is your own code, as a NumPyro model always is.
        silos: The data of a structured model's silos, for what only silos can compute.

    >>> import tempfile
    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> x, y = clients.rows("3")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fit = fb.simulate(fb.FedPer(fb.network("mlp", clients)), clients, rounds=1, cohort=5, folder=folder)
    ...     again = fb.open(folder)
    ...     bool((again.predict(x, client="3") == fit.predict(x, client="3")).all())
    True
    """
    folder = Path(folder)
    if not (folder / "result.json").is_file():
        raise UserError(f"{folder} holds no finished run; give the folder that simulate or fedbayes run was given")
    result = files.read_json(folder / "result.json", rounds=int, data=dict)
    history = read_history(folder, result)
    if "posterior" in result:
        return _structured(folder, result, history, algorithm, silos)
    if not (folder / SHARED).is_file():
        raise UserError(f"{folder} has no {SHARED}: an older version wrote it, or its algorithm is your own code; run it anew")
    about = files.read_json(folder / MEMBERS, names=list, unseen=list, rows=list)
    shared = Posterior.load(folder / SHARED, model=model, algorithm=algorithm)  # type: ignore[arg-type]
    unseen = np.isin(np.arange(len(about["names"])), about["unseen"])
    states: States[Any] = States(shared.local, len(unseen), folder / "local")
    states.restore(result["rounds"], about["local"], looking=True)
    members = Members(result["data"]["name"], about["names"], unseen, np.array(about["rows"]), states)
    return Fit(shared, members, read_evaluation(folder, result, unseen), result, history)


def _structured(folder: Path, result: dict[str, Any], history: list[dict[str, Any]], algorithm: Any, silos: Any) -> SiloFit:
    if algorithm is None:
        name, give = result["algorithm"], f"algorithm=fb.{result['algorithm']}(population, silo)"
        raise UserError(f"{folder} is a run of {name} over a NumPyro model, which is code and not in a folder; give {give}")
    if silos is not None:
        options = {name: result[name] for name in ("cohort", "in_turn", "seed")}
        more = {"file": result["file"]} if "file" in result else {}
        return fit_silos(algorithm, silos, result["rounds"], **options, folder=folder, resume=True, config=more)
    arrays, about = files.read_arrays(folder / SHARED, "the shared model", AGAIN)
    shared = serialise.unflatten(about["shared"], arrays)
    planned = algorithm.planned(result["rounds"], silos=len(result["data"]["silos"]))
    return SiloFit(planned, shared, tuple(result["data"]["silos"]), result, history, corrected=kept_draws(folder))
