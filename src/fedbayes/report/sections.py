"""The parts of one run's page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedbayes import wire
from fedbayes.commands.display import PERCENT, SHOWN
from fedbayes.commands.display import TITLES as MAIN_TITLES
from fedbayes.evaluate import HIGHER_IS_BETTER, Score, metrics
from fedbayes.report import curves
from fedbayes.report.blocks import Command, Picture, Pictures, Prose, Section, Table, draw
from fedbayes.report.calibration import pooled, reliability
from fedbayes.report.labels import distribution_figure
from fedbayes.report.records import Figures, Record
from fedbayes.stances import STANCES

TITLES = {**MAIN_TITLES, "brier": "Brier", "crps": "CRPS", "entropy": "entropy", "mutual_information": "mutual information"}
TABLED = {False: ("accuracy", "log_score", "brier", "ece", "mce"), True: ("rmse", "log_score", "crps", "calibration_error")}
STYLES = {"personal": 0, "adapted": 1, "global": 2}
"""Colour and dash of each stance."""
WHOLE = 100
"""Clients up to which a table has all of them."""
NAMED = 30
"""Of the worst tenth, so many are named."""
ARRAYS = 200
"""Arrays of a message that are listed."""
PARTS = {
    "training": "training",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "posterior": "posterior and pictures",
}


def number(name: str, value: float) -> str:
    """A figure as the tables have it.

    >>> number("accuracy", 0.875), number("log_score", -0.25)
    ('87.5', '-0.250')
    """
    return f"{100 * value:.1f}" if name in PERCENT else f"{value:.3f}"


def scaled(name: str, values: Any) -> np.ndarray:
    """Figures as the pictures have them."""
    return np.asarray(values, float) * (100 if name in PERCENT else 1)


def what_was_run(record: Record) -> Section:
    """The command, the settings, and what is wrong with the folder."""
    blocks: list[Any] = [Prose(note, warning=True) for note in record.notes]
    if record.command is not None:
        blocks += [Prose("To run it again, in a folder of its own:"), Command(record.command)]
    else:
        blocks.append(
            Prose("The folder keeps no command: the run was made by fedbayes compare or from Python, or never ended.")
        )
    facts, data = record.config, record.about_data
    rows = [["algorithm", record.algorithm]]
    if record.structured:
        rows += [["model file", str(facts["file"])]] if "file" in facts else []
        rows += [["silos", f"{len(data.get('silos', {}))} ({_count(sum(data.get('silos', {}).values()))} rows)"]]
    elif data:
        unseen = f", {data['unseen']} of them unseen" if data.get("unseen") else ""
        target = "a number" if data.get("classes") is None else f"{data['classes']} classes"
        rows += [
            ["data", f"{data.get('name')}: {data.get('clients')} clients{unseen}, {_count(data.get('rows', 0))} rows, {target}"]
        ]
        rows += [["network", str(facts.get("network", facts.get("options", {}).get("model", {}).get("name", "—")))]]
    cohort = facts.get("cohort")
    taking = "one silo, each in its turn" if facts.get("in_turn") else "all" if cohort is None else f"{cohort}"
    rows += [["rounds", str(record.rounds)], ["clients a round", taking], ["seed", str(facts.get("seed"))]]
    rows += [["dropout", str(facts["dropout"])]] if facts.get("dropout") else []
    rows += [["state", record.state], ["fedbayes", str(facts.get("fedbayes", "—"))]]
    options = [[name, value] for name, value in flat(facts.get("options", {})).items() if not name.startswith("model.")]
    blocks.append(Table(("", ""), rows, "The run", words=2))
    blocks.append(
        Table(
            ("option", "value"),
            options,
            f"Options of {record.algorithm}",
            2,
            f"All {len(options)} options of {record.algorithm}",
        )
    )
    return Section("What was run", blocks)


def flat(options: Any, prefix: str = "") -> dict[str, str]:
    """Nested options by dotted name.

    >>> flat({"train": {"lr": 0.1}, "mu": None})
    {'train.lr': '0.1', 'mu': '—'}
    """
    found = {}
    for name, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else "—" if value is None else str(value)
            found[f"{prefix}{name}"] = text
    return found


def results(record: Record) -> Section:
    """Figures by stance and group."""
    if not record.figures:
        why = "no client has test rows" if record.result is not None else "the run has not been evaluated yet"
        return Section("Results", [Prose(f"There are no figures: {why}.")])
    when = "after the last round" if record.result is not None else f"after round {record.evaluations[-1][0]}"
    blocks: list[Any] = [result_table(record.figures, f"Every client on its own test rows, {when}")]
    if average := (record.result or {}).get("average"):
        last = record.config.get("average_last")
        blocks.append(result_table(average, f"Mean over the last {last} rounds"))
    blocks.append(
        Prose(
            "Global: the shared model. Personal: with what the client kept from training. Adapted: after adapting to the client's "
            "training rows. Unseen clients never trained, so their personal model is the shared one. The first figures are over "
            "all test rows; the last three give each client the same weight."
        )
    )
    return Section("Results", blocks)


def result_table(figures: Figures, caption: str) -> Table:
    """One line for each stance and group."""
    numeric = any("rmse" in group for groups in figures.values() for group in groups.values())
    first, names = SHOWN[numeric][0], TABLED[numeric]
    head = ["stance", "clients", *(TITLES[name] for name in names), "mean over clients", "spread over clients", "worst tenth"]
    rows = []
    for stance, groups in figures.items():
        for group, found in groups.items():
            cells = [number(name, found[name]["rows"]) if name in found else "—" for name in names]
            cells += [
                number(first, found[first][form]) if first in found else "—" for form in ("clients", "spread", "worst_tenth")
            ]
            rows.append([stance, group, *cells])
    return Table(head, rows, f"{caption}; the last three columns are of {TITLES[first]}", 2)


def learning(record: Record) -> Section:
    """Curves over rounds."""
    names = list(dict.fromkeys(name for entry in record.scalars for name in entry if name != "round"))
    pictures = []
    for name in sorted(names, key=lambda name: name == "weight")[:8]:
        x, y = np.array([(entry["round"], entry[name]) for entry in record.scalars if name in entry]).T
        caption = f"{name} of each round's clients: {y[0]:.4g} in round {x[0]:.0f}, {y[-1]:.4g} in round {x[-1]:.0f}."
        pictures.append(draw(curves.over_rounds, name, {name: curves.Curve(x, y)}, caption=caption))
    blocks: list[Any] = [Pictures(pictures)] if pictures else [Prose("metrics.jsonl has no rounds.")]
    if len(record.evaluations) > 1:
        blocks.append(Pictures(_evaluations(record)))
    else:
        blocks.append(
            Prose(
                "Clients were evaluated once, at the end; --evaluate-every 10 gives accuracy and calibration over rounds too."
            )
        )
    return Section("Learning curves", blocks)


def _evaluations(record: Record) -> list[Picture]:
    pictures = []
    for group in ("participating", "unseen"):
        for name in SHOWN[record.numeric]:
            found = evaluation_curves(record, group, name)
            if found:
                ends = ", ".join(f"{stance} {curve.y[-1]:.4g}" for stance, curve in found.items())
                caption = (
                    f"{TITLES[name]}, {group} clients: mean over clients, band: one standard deviation. At the end {ends}."
                )
                pictures.append(draw(curves.over_rounds, f"{TITLES[name]}, {group}", found, STYLES, caption=caption))
    return pictures


def evaluation_curves(record: Record, group: str, name: str) -> dict[str, curves.Curve]:
    """By stance: the mean over clients after each evaluation, and its spread."""
    found = {}
    for stance in distinct(record, group):
        points = [
            (round, figures[stance][group][name]["clients"], figures[stance][group][name]["spread"])
            for round, figures in record.evaluations
            if name in figures.get(stance, {}).get(group, {})
        ]
        if points:
            x, y, spread = np.array(points).T
            low, high = y - spread, y + spread
            if name in PERCENT:
                low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
            found[stance] = curves.Curve(x, *(scaled(name, part) for part in (y, low, high)))
    return found


def distinct(record: Record, group: str) -> list[str]:
    """The stances of a group: for clients that never trained, personal is global."""
    stances = [stance for stance in STANCES if stance in record.figures]
    return [stance for stance in stances if not (group == "unseen" and stance == "personal" and "global" in stances)]


def clients(record: Record) -> Section:
    """Accuracy and calibration of each client, and who is worst off."""
    if record.scores is None:
        return Section("Clients", [Prose(f"Figures of single clients are kept when a run ends; this run is {record.state}.")])
    blocks: list[Any] = []
    first, calibration = SHOWN[record.numeric][0], SHOWN[record.numeric][2]
    each = {stance: metrics(score, record.numeric) for stance, score in record.scores.items()}
    for group, members in record.groups().items():
        members = members & (np.asarray(next(iter(record.scores.values())).rows) > 0)
        stances = [stance for stance in distinct(record, group) if stance in each]
        if not members.any() or not stances:
            continue
        pictures = []
        for name in (first, calibration):
            values = {stance: scaled(name, each[stance][name][members]) for stance in stances}
            medians = ", ".join(f"{stance} {np.median(value):.3g}" for stance, value in values.items())
            caption = f"{TITLES[name]} of each of the {members.sum()} {group} clients, the worst first. Medians: {medians}."
            title, better = f"{TITLES[name]}, {group} clients", name in HIGHER_IS_BETTER
            pictures.append(draw(curves.in_order, title, values, STYLES, better, caption=caption))
        main = next(stance for stance in ("adapted", "personal", "global") if stance in stances)
        if group == "participating" and "personal" in stances:
            main = "personal"
        blocks += [Pictures(pictures), *_worst(record, group, members, main, each, (first, calibration))]
    note = "Calibration error of one client, over few rows, is biased upwards."
    return Section("Clients", [*blocks, Prose(note)] if blocks else [Prose("No client has test rows.")])


def _worst(
    record: Record,
    group: str,
    members: np.ndarray,
    stance: str,
    each: Mapping[str, Mapping[str, np.ndarray]],
    names: Sequence[str],
) -> list[Table]:
    shown = (*names, "log_score")
    assert record.scores is not None
    rows = np.asarray(record.scores[stance].rows)

    def table(order: np.ndarray, caption: str, summary: str = "") -> Table:
        head = ["client", "test rows", *(TITLES[name] for name in shown)]
        cells = [
            [record.name(client), f"{rows[client]:.0f}", *(number(name, each[stance][name][client]) for name in shown)]
            for client in order
        ]
        return Table(head, cells, caption, 1, summary)

    tables, ids = [], np.flatnonzero(members)
    for name in names:
        values = each[stance][name][ids]
        order = ids[np.argsort(values if name in HIGHER_IS_BETTER else -values, kind="stable")]
        tenth = -(-len(ids) // 10)
        more = f", the first {NAMED}" if tenth > NAMED else ""
        clients = "1 client" if tenth == 1 else f"{tenth} clients"
        caption = f"Worst tenth by {TITLES[name]}: {clients} of {len(ids)} {group}{more} ({stance})"
        tables.append(table(order[: min(tenth, NAMED)], caption))
        if name == names[0] and len(ids) <= WHOLE:
            tables.append(table(order, f"All {group} clients ({stance}), the worst first", f"All {len(ids)} {group} clients"))
    return tables


def calibration(record: Record) -> Section:
    """Reliability diagrams, or levels of a number."""
    if record.scores is None:
        return Section("Calibration", [Prose("Reliability diagrams are drawn from the scores that a finished run has.")])
    pictures = []
    for group, members in record.groups().items():
        for stance in distinct(record, group):
            score = pooled(record.scores[stance], members)
            if not score.rows:
                continue
            title, found = f"{stance}, {group}", metrics(score, record.numeric)
            if record.numeric:
                caption = f"{title}: mean gap between levels and shares {float(found['calibration_error']):.3f}."
                pictures.append(draw(curves.levels, score, title, caption=caption))
            else:
                sure = float(np.sum(score.bin_confidence) / score.rows)
                caption = (
                    f"{title}: mean confidence {100 * sure:.1f} %, accuracy {100 * float(found['accuracy']):.1f} %, "
                    f"ECE {100 * float(found['ece']):.1f} %."
                )
                pictures.append(draw(reliability, {title: score}, caption=caption))
    said = (
        "On the dashed line each predictive quantile has its share of rows below it."
        if record.numeric
        else "A bar is the share of right labels among predictions of that confidence. Where it ends below the dashed line, predictions "
        "are surer than they should be. Below: how many rows have which confidence."
    )
    return Section("Calibration", [Prose(said), Pictures(pictures)] if pictures else [Prose("No client has test rows.")])


def uncertainty(record: Record) -> Section:
    """Aleatoric and epistemic parts."""
    total, part = ("variance", "epistemic_variance") if record.numeric else ("entropy", "mutual_information")
    unit = "variance" if record.numeric else "nats"
    rows, by_group = [], dict[str, dict[str, tuple[float, float]]]()
    for stance, groups in record.figures.items():
        for group, found in groups.items():
            if total in found and part in found:
                whole, epistemic = found[total]["rows"], found[part]["rows"]
                share = f"{100 * epistemic / whole:.1f}" if whole > 0 else "—"
                rows.append([stance, group, f"{whole:.4f}", f"{whole - epistemic:.4f}", f"{epistemic:.4f}", share])
                by_group.setdefault(group, {})[stance] = (whole - epistemic, epistemic)
    if not rows:
        return Section("Uncertainty", [Prose("There are no figures yet.")])
    pictures = []
    for group, parts in by_group.items():
        ends = "; ".join(f"{stance} {a:.3g} and {e:.3g}" for stance, (a, e) in parts.items())
        caption = f"Aleatoric and epistemic uncertainty of a test row, {group} clients: {ends} {unit}."
        pictures.append(draw(curves.parts_of_uncertainty, f"{group} clients", parts, unit, caption=caption))
    head = ("stance", "clients", f"total ({unit})", "aleatoric", "epistemic", "epistemic %")
    said = (
        "Aleatoric uncertainty would stay with more data; epistemic uncertainty, on which posterior draws disagree, would go."
    )
    none = all(epistemic == 0 for parts in by_group.values() for _, epistemic in parts.values())
    said += " This algorithm predicts with one draw, so it has no epistemic part." if none else ""
    return Section("Uncertainty", [Prose(said), Pictures(pictures), Table(head, rows, "Mean over test rows", 2)])


def labels(record: Record) -> Section:
    """Who has which labels."""
    if record.data is None:
        return Section(
            "Labels", [Prose("The folder does not say who has which labels: it has no about.json, as runs of older versions.")]
        )
    data = record.data
    if data.labels is None and data.quantiles is None:
        return Section(
            "Labels", [Prose("There are too many clients and classes to keep; fedbayes data describe --plot draws them.")]
        )
    sizes = np.array(data.train) + np.array(data.test)
    caption = f"Who has which {'labels' if data.labels is not None else 'targets'}: {len(sizes)} clients with {sizes.min()} to {sizes.max()} rows"
    if data.labels is not None:
        present = np.count_nonzero(np.array(data.labels), axis=1)
        caption += f", of {present.min()} to {present.max()} of the {len(data.classes or [])} classes"
    return Section("Labels", [Pictures([draw(distribution_figure, data, caption=f"{caption}.", wide=True)])])


def sent(record: Record) -> Section:
    """What crosses in a round and over the run."""
    if not record.messages:
        return Section(
            "What was sent", [Prose("The folder does not say what was sent; fedbayes wire does, for any algorithm.")]
        )
    who, blocks = "silo" if record.structured else "client", list[Any]()
    for count, leaves in record.messages:
        of = f" ({count} silos of this form)" if record.structured and len(record.messages) > 1 else ""
        for message, title in (("down", f"To each {who}{of}"), ("up", f"From each {who}{of}")):
            blocks.append(
                _fields([leaf for leaf in leaves if leaf.message == message], f"{title}, each round", message == "up")
            )
        rows = [
            [leaf.message, leaf.path, str(list(leaf.shape)), leaf.dtype, leaf.reduction or "—", _count(leaf.bytes)]
            for leaf in leaves
        ]
        more = f", the first {ARRAYS}" if len(rows) > ARRAYS else ""
        head = ("message", "array", "shape", "type", "reduction", "bytes")
        blocks.append(Table(head, rows[:ARRAYS], f"Arrays of a round{more}", 5, f"All {len(rows)} arrays{of}"))
    down, up, about = traffic(record)
    blocks.insert(
        0,
        Prose(
            f"Over {record.round if record.round else record.rounds} rounds{about}: {size(down)} to {who}s and {size(up)} from them. "
            f"Nothing of a {who}'s local state or rows is sent as it is. Mean and sum: the server needs only the sum over {who}s; "
            f"stack: it sees each one's."
        ),
    )
    return Section("What was sent", blocks)


def _fields(leaves: Sequence[wire.Leaf], caption: str, up: bool) -> Table:
    fields: dict[str, list[wire.Leaf]] = {}
    for leaf in leaves:
        fields.setdefault(leaf.path.split("/")[0], []).append(leaf)
    rows = []
    for name, parts in fields.items():
        depends = ", ".join(sorted({source for leaf in parts for source in leaf.depends}))
        kinds = [", ".join(sorted({leaf.reduction for leaf in parts})), depends or "—"] if up else []
        numbers = sum(int(np.prod(leaf.shape, dtype=int)) for leaf in parts)
        rows.append([name, *kinds, str(len(parts)), _count(numbers), _count(sum(leaf.bytes for leaf in parts))])
    total = sum(leaf.bytes for leaf in leaves)
    head = ("field", *(("reduction", "depends on") if up else ()), "arrays", "numbers", "bytes")
    return Table(head, rows, f"{caption}: {size(total)}", 3 if up else 1)


def traffic(record: Record) -> tuple[float, float, str]:
    """Bytes to clients and from them over the rounds so far, and a word where they are not exact."""
    rounds = record.round or record.rounds
    each = {
        message: sum(count * leaf.bytes for count, leaves in record.messages for leaf in leaves if leaf.message == message)
        for message in ("down", "up")
    }
    share, about = 1.0, ""
    if record.structured:
        total = sum(count for count, _ in record.messages)
        cohort = record.config.get("cohort")
        share = (
            1 / total if record.config.get("in_turn") else 1.0 if cohort is None else cohort if cohort < 1 else cohort / total
        )
        about = " (about, as silos of several forms take turns)" if share < 1 and len(record.messages) > 1 else ""
        return each["down"] * share * rounds, each["up"] * share * rounds, about
    cohort = record.messages[0][0]
    answered = {entry["round"]: entry["clients"] for entry in record.timing if "clients" in entry}
    whole = sum(answered.values()) if len(answered) >= rounds else cohort * rounds * (1 - record.config.get("dropout", 0.0))
    return each["down"] * rounds, each["up"] / cohort * whole, about


def time(record: Record) -> Section:
    """Seconds of each part."""
    if not record.timing:
        return Section("Time", [Prose("The folder keeps no times: it has no timing.jsonl, as runs of older versions.")])
    parts: dict[str, list[float]] = {}
    for place, entry in enumerate(record.timing):
        name = str(entry["part"])
        first = name == "training" and not any(other["part"] == "training" for other in record.timing[:place])
        parts.setdefault(
            "first rounds, with compilation"
            if first and record.structured
            else "first round, with compilation"
            if first
            else name,
            [],
        ).append(entry["seconds"])
    total = sum(sum(values) for values in parts.values())
    rows = [
        [
            PARTS.get(name, name),
            f"{sum(values):.2f}",
            f"{100 * sum(values) / max(total, 1e-9):.0f}",
            str(len(values)),
            f"{1000 * np.median(values):.4g}",
        ]
        for name, values in parts.items()
    ]
    rows.append(["all", f"{total:.2f}", "100", "", ""])
    return Section("Time", [Table(("part", "seconds", "%", "times", "median ms"), rows, "Seconds on the machine that ran it")])


def size(count: float) -> str:
    """Bytes in a unit that people read.

    >>> size(1234), size(5e6)
    ('1.2 kB', '5.0 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def _count(value: float) -> str:
    return f"{value:,.0f}"


NETWORK: tuple[Callable[[Record], Section], ...] = (
    *(what_was_run, results, learning, clients, calibration, uncertainty, labels, sent, time),
)
