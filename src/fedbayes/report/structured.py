"""The parts of a page about models over silos: the posterior of what they share, the bound, and who they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbayes import files
from fedbayes.models.structured import numbers
from fedbayes.report import curves
from fedbayes.report.blocks import Pictures, Prose, Section, Table, draw
from fedbayes.report.format import count
from fedbayes.report.records import Record
from fedbayes.results.pictures import MOST, marginals
from fedbayes.results.structured_text import is_warning, verdict
from fedbayes.trees import quietly

SILOS = 200  # silos that are listed


def posterior(record: Record) -> Section:
    """The posterior table and the marginals."""
    if record.result is None:
        return Section("Posterior", [Prose(f"The posterior is kept when a run ends; this run is {record.state}.")])
    found, theta = record.result.get("posterior", {}), record.result.get("theta", {})
    inference, problem = _inference_data(record)
    intervals = {} if inference is None else _intervals(inference)
    rows = []
    for name, figures in found.items():
        low, high = intervals.get(name, ("—", "—"))
        rows.append([name, *(f"{figures[key]:.3f}" for key in ("mean", "sd", "5%", "95%")), low, high])
    rows += [[name, f"{value:.3f}", *["—"] * 5] for name, value in theta.items()]
    head = ("", "mean", "sd", "5 %", "95 %", "HDI 90 %: from", "to")
    blocks: list[Any] = [Prose(f"{_sentence(verdict(record.result))}.", warning=is_warning(record.result))]
    if rows:
        note = "; a line without a deviation is a parameter, which has no posterior" if theta else ""
        blocks.append(Table(head, rows, f"What all silos share; HDI: highest density interval, by ArviZ{note}"))
    else:
        blocks.append(Prose("There are too many numbers to list; posterior.nc has them."))
    if inference is None:
        blocks.append(Prose(f"The page has no marginals: {problem}.", warning=True))
    else:
        blocks.append(Pictures(_marginals({"posterior": draws_of(inference)})))
    return Section("Posterior", blocks)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _marginals(methods: Mapping[str, Mapping[str, np.ndarray]]) -> list[Any]:
    names = list(dict.fromkeys(name for draws in methods.values() for name, value in draws.items() if value.std() > 0))
    pictures = []
    for name in names[:MOST]:
        chosen = {method: {name: draws[name]} for method, draws in methods.items() if name in draws}
        each = ((method, draws[name].mean(), draws[name].std()) for method, draws in chosen.items())
        said = "; ".join(f"{method} mean {mean:.3g}, deviation {sd:.3g}" for method, mean, sd in each)
        pictures.append(draw(marginals, chosen, caption=f"Marginal of {name}: {said}."))
    return pictures


def _inference_data(record: Record) -> tuple[Any, str]:
    """What ArviZ reads from posterior.nc, or why it cannot."""
    path = record.folder / "posterior.nc"
    if not path.exists():
        return None, f"there is no {path}"
    known = (record.result or {}).get("sha256", {})
    if known and known.get("posterior.nc") != files.sha256(path):
        return None, f"{path} does not match its checksum in result.json; it was changed or is damaged"
    try:
        found = quietly("arviz").from_netcdf(str(path), engine="h5netcdf")
        draws_of(found)
    except Exception as problem:  # the libraries below raise all kinds for a damaged file
        return None, f"{path} cannot be read ({type(problem).__name__}); it is damaged"
    return found, ""


def draws_of(inference: Any) -> dict[str, np.ndarray]:
    """Draws of each number that silos share, by name."""
    sites = {str(name): value.to_numpy() for name, value in inference.posterior.data_vars.items()}
    return dict(numbers({name: value.reshape(-1, *value.shape[2:]) for name, value in sites.items()}))


def _intervals(inference: Any) -> dict[str, tuple[str, str]]:
    few = [str(name) for name, value in inference.posterior.data_vars.items() if value[0, 0].size <= SILOS]
    if not few:
        return {}
    table = quietly("arviz").summary(inference, var_names=few, kind="stats", hdi_prob=0.9, round_to="none")
    low, high = table.columns[2:4]
    return {str(name): (f"{row[low]:.3f}", f"{row[high]:.3f}") for name, row in table.iterrows()}


def bound(records: Sequence[Record], labels: Sequence[str]) -> Section:
    """The bound over rounds."""
    found = {}
    for record, label in zip(records, labels, strict=True):
        points = [(entry["round"], entry["bound"]) for entry in record.scalars if "bound" in entry]
        if points:
            found[label] = curves.Curve(*np.array(points, float).T)
    if not found:
        return _movement(records, labels)
    whose = {label: f" ({label})" if len(found) > 1 else "" for label in found}
    ends = "; ".join(f"{one.y[-1]:.5g} in round {one.x[-1]:.0f}{whose[label]}" for label, one in found.items())
    caption = f"The bound on log p(y) over rounds: {ends}. The axis begins where the last nine tenths lie."
    return Section("Bound", [Pictures([draw(curves.over_rounds, "bound on log p(y)", found, end=True, caption=caption)])])


def _movement(records: Sequence[Record], labels: Sequence[str]) -> Section:
    """How far each round moved q, for methods that have no bound."""
    found = {}
    for record, label in zip(records, labels, strict=True):
        points = [(entry["round"], entry["moved"]) for entry in record.scalars if entry.get("moved", 0) > 0]
        if points:
            found[label] = curves.Curve(*np.array(points, float).T)
    if not found:
        return Section("Convergence", [Prose("metrics.jsonl has no rounds.")])
    logs = {label: curves.Curve(one.x, np.log10(one.y)) for label, one in found.items()}
    caption = "How far each round would have moved q, in its standard deviations, as a power of ten."
    return Section("Convergence", [Pictures([draw(curves.over_rounds, "movement, log10 sd", logs, end=True, caption=caption)])])


def silos(record: Record) -> Section:
    """Who the silos are."""
    listed = [[str(name), count(number)] for name, number in record.about_data.get("silos", {}).items()]
    more = f", the first {SILOS}" if len(listed) > SILOS else ""
    return Section("Silos", [Table(("silo", "rows"), listed[:SILOS], f"{len(listed)} silos{more}")])


def side_by_side(records: Sequence[Record], labels: Sequence[str]) -> list[Section]:
    """Several fits of one model to the same silos."""
    results = {label: record.result for record, label in zip(records, labels, strict=True) if record.result is not None}
    blocks, rows = list[Any](), []
    for name in dict.fromkeys(name for result in results.values() for name in result.get("posterior", {})):
        cells = [result.get("posterior", {}).get(name) for result in results.values()]
        rows.append([name, *("—" if cell is None else f"{cell['mean']:.3f} ± {cell['sd']:.3f}" for cell in cells)])
    if rows:
        blocks.append(Table(("", *results), rows, "Posterior mean ± standard deviation"))
    says = [[label, verdict(result)] for label, result in results.items()]
    blocks.append(Table(("run", "how far it can be relied on"), says, "Each run's verdict and bound", 2))
    read = {label: _inference_data(record)[0] for record, label in zip(records, labels, strict=True) if label in results}
    draws = {label: draws_of(found) for label, found in read.items() if found is not None}
    if draws:
        blocks.append(Pictures(_marginals(draws)))
    return [Section("Posteriors side by side", blocks), bound(records, labels)]
