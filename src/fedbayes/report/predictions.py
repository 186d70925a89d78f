"""The parts of a page about predictions: of each client, how far they can be believed, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbayes.evaluation.score import HIGHER_IS_BETTER, SHOWN, metrics, pooled
from fedbayes.report import curves
from fedbayes.report.blocks import Pictures, Prose, Section, Table, draw
from fedbayes.report.calibration import reliability
from fedbayes.report.format import TITLES, distinct, number, scaled, styles
from fedbayes.report.records import Record

WHOLE = 100  # clients up to which a table has all of them
NAMED = 30  # of the worst tenth, so many are named


def clients(record: Record) -> Section:
    """Accuracy and calibration of each client, and who is worst off."""
    if record.scores is None:
        return Section("Clients", [Prose(f"Figures of single clients are kept when a run ends; this run is {record.state}.")])
    blocks: list[Any] = []
    first, calibration = SHOWN[record.numeric][0], SHOWN[record.numeric][2]
    each = {mode: metrics(score, record.numeric) for mode, score in record.scores.items()}
    for group, members in record.groups().items():
        members = members & (np.asarray(next(iter(record.scores.values())).rows) > 0)
        modes = [mode for mode in distinct(record, group) if mode in each]
        if not members.any() or not modes:
            continue
        pictures = []
        for name in (first, calibration):
            values = {mode: scaled(name, each[mode][name][members]) for mode in modes}
            medians = ", ".join(f"{mode} {np.median(value):.3g}" for mode, value in values.items())
            caption = f"{TITLES[name]} of each of the {members.sum()} {group} clients, the worst first. Medians: {medians}."
            title, better = f"{TITLES[name]}, {group} clients", name in HIGHER_IS_BETTER
            pictures.append(draw(curves.in_order, title, values, styles(values), better, caption=caption))
        main = next(mode for mode in ("adapted", "personal", "global") if mode in modes)
        if group == "participating" and "personal" in modes:
            main = "personal"
        blocks += [Pictures(pictures), *_worst(record, group, members, main, each, (first, calibration))]
    note = "Calibration error of one client, over few rows, is biased upwards."
    return Section("Clients", [*blocks, Prose(note)] if blocks else [Prose("No client has test rows.")])


def _worst(
    record: Record,
    group: str,
    members: np.ndarray,
    mode: str,
    each: Mapping[str, Mapping[str, np.ndarray]],
    names: Sequence[str],
) -> list[Table]:
    shown = (*names, "log_score")
    assert record.scores is not None
    rows = np.asarray(record.scores[mode].rows)

    def table(order: np.ndarray, caption: str, summary: str = "") -> Table:
        head = ["client", "test rows", *(TITLES[name] for name in shown)]
        cells = [
            [record.name(client), f"{rows[client]:.0f}", *(number(name, each[mode][name][client]) for name in shown)]
            for client in order
        ]
        return Table(head, cells, caption, 1, summary)

    tables, ids = [], np.flatnonzero(members)
    for name in names:
        values = each[mode][name][ids]
        # Of few rows many clients have the same accuracy: then the log score says who is worse off.
        order = ids[np.lexsort((each[mode]["log_score"][ids], values if name in HIGHER_IS_BETTER else -values))]
        tenth = -(-len(ids) // 10)
        more = f", the first {NAMED}" if tenth > NAMED else ""
        clients = "1 client" if tenth == 1 else f"{tenth} clients"
        caption = f"Worst tenth by {TITLES[name]}: {clients} of {len(ids)} {group}{more} ({mode})"
        tables.append(table(order[: min(tenth, NAMED)], caption))
        if name == names[0] and len(ids) <= WHOLE:
            tables.append(table(order, f"All {group} clients ({mode}), the worst first", f"All {len(ids)} {group} clients"))
    return tables


def calibration(record: Record) -> Section:
    """Reliability diagrams, or levels of a number."""
    if record.scores is None:
        return Section("Calibration", [Prose("Reliability diagrams are drawn from the scores that a finished run has.")])
    pictures = []
    for group, members in record.groups().items():
        for mode in distinct(record, group):
            score = pooled(record.scores[mode], members)
            if not score.rows:
                continue
            title, found = f"{mode}, {group}", metrics(score, record.numeric)
            if record.numeric:
                caption = f"{title}: mean gap between levels and shares {float(found['calibration_error']):.3f}."
                pictures.append(draw(curves.levels, score, title, caption=caption))
            else:
                sure = 100 * float(np.sum(score.bin_confidence) / score.rows)
                right, ece = (100 * float(found[name]) for name in ("accuracy", "ece"))
                caption = f"{title}: mean confidence {sure:.1f} %, accuracy {right:.1f} %, ECE {ece:.1f} %."
                pictures.append(draw(reliability, {title: score}, caption=caption))
    said = (
        "On the dashed line each predictive quantile has its share of rows below it."
        if record.numeric
        else "A bar is the share of right labels among predictions of that confidence. Where it ends below the dashed line, "
        "predictions are surer than they should be. Below: how many rows have which confidence."
    )
    return Section("Calibration", [Prose(said), Pictures(pictures)] if pictures else [Prose("No client has test rows.")])


def uncertainty(record: Record) -> Section:
    """Aleatoric and epistemic parts."""
    total, part = ("variance", "epistemic_variance") if record.numeric else ("entropy", "mutual_information")
    unit = "variance" if record.numeric else "nats"
    rows, by_group = [], dict[str, dict[str, tuple[float, float]]]()
    for mode, groups in record.figures.items():
        for group, found in groups.items():
            if total in found and part in found and mode in distinct(record, group):
                whole, epistemic = found[total]["rows"], found[part]["rows"]
                share = f"{100 * epistemic / whole:.1f}" if whole > 0 else "—"
                rows.append([mode, group, f"{whole:.4f}", f"{whole - epistemic:.4f}", f"{epistemic:.4f}", share])
                by_group.setdefault(group, {})[mode] = (whole - epistemic, epistemic)
    if not rows:
        return Section("Uncertainty", [Prose("There are no figures yet.")])
    pictures = []
    for group, parts in by_group.items():
        ends = "; ".join(f"{mode} {a:.3g} and {e:.3g}" for mode, (a, e) in parts.items())
        caption = f"Aleatoric and epistemic uncertainty of a test row, {group} clients: {ends} {unit}."
        pictures.append(draw(curves.parts_of_uncertainty, f"{group} clients", parts, unit, caption=caption))
    head = ("mode", "clients", f"total ({unit})", "aleatoric", "epistemic", "epistemic %")
    said = "Aleatoric uncertainty would stay with more data; epistemic uncertainty, where draws disagree, would go."
    none = all(epistemic == 0 for parts in by_group.values() for _, epistemic in parts.values())
    said += " This algorithm predicts with one draw, so it has no epistemic part." if none else ""
    return Section("Uncertainty", [Prose(said), Pictures(pictures), Table(head, rows, "Mean over test rows", 2)])
