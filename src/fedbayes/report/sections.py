"""The parts of one run's page that are not about predictions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbayes import wire
from fedbayes.engine.choose import described
from fedbayes.evaluation.score import SHOWN, about_numbers
from fedbayes.evaluation.tables import PERCENT
from fedbayes.report import curves
from fedbayes.report.blocks import Command, Pictures, Prose, Section, Table, draw
from fedbayes.report.format import TABLED, TITLES, count, distinct, flat, number, scaled, size, styles
from fedbayes.report.labels import distribution_figure
from fedbayes.report.records import GROUPS, Figures, Record, figures_of

ARRAYS = 200  # arrays of a message that are listed
MEANING = (
    "Global: the shared model. Personal: with what the client kept from training. Adapted: after adapting to the client's "
    "training rows. Unseen clients never trained, so their personal model is the shared one. The first figures are over all "
    "test rows; the last three give each client the same weight."
)
FIRST = "first rounds, with compilation"
PARTS = {"training": "other rounds", "posterior": "posterior and pictures"}


def what_was_run(record: Record) -> Section:
    """The command, the settings, and what is wrong with the folder."""
    blocks: list[Any] = [Prose(note, warning=True) for note in record.notes]
    if record.command is not None:
        blocks += [Prose("To run it again, in a folder of its own:"), Command(record.command)]
    else:
        blocks += [Prose("The folder keeps no command: the run was made by fedbayes compare or from Python, or never ended.")]
    facts, data = record.config, record.about_data
    rows = [["algorithm", record.algorithm]]
    if record.structured:
        rows += [["model file", str(facts["file"])]] if "file" in facts else []
        rows += [["silos", f"{len(data.get('silos', {}))} ({count(sum(data.get('silos', {}).values()))} rows)"]]
    elif data:
        unseen = f", {data['unseen']} of them unseen" if data.get("unseen") else ""
        target = "a number" if data.get("classes") is None else f"{data['classes']} classes"
        who = f"{data.get('name')}: {data.get('clients')} clients{unseen}, {count(data.get('rows', 0))} rows, {target}"
        network = facts.get("network", facts.get("options", {}).get("model", {}).get("name", "—"))
        rows += [["data", who], ["network", str(network)]]
    cohort = facts.get("cohort")
    taking = "one silo, each in its turn" if facts.get("in_turn") else "all" if cohort is None else f"{cohort}"
    rows += [["rounds", str(record.rounds)], [f"{'silos' if record.structured else 'clients'} a round", taking]]
    rows += [["seed", str(facts.get("seed"))]]
    rows += [["dropout", str(facts["dropout"])]] if facts.get("dropout") else []
    rows += [["state", record.state], ["fedbayes", str(facts.get("fedbayes", "—"))]]
    options = [[name, value] for name, value in flat(facts.get("options", {})).items() if not name.startswith("model.")]
    summary = f"All {len(options)} options of {record.algorithm}"
    blocks.append(Table(("", ""), rows, "The run", words=2))
    blocks.append(Table(("option", "value"), options, f"Options of {record.algorithm}", 2, summary))
    return Section("What was run", blocks)


def results(record: Record) -> Section:
    """Figures by mode and group."""
    if not record.figures:
        why = "no client has test rows" if record.result is not None else "the run has not been evaluated yet"
        return Section("Results", [Prose(f"There are no figures: {why}.")])
    when = "after the last round" if record.result is not None else f"after round {record.evaluations[-1][0]}"
    blocks: list[Any] = [result_table(record.figures, f"Every client on its own test rows, {when}")]
    if average := figures_of((record.result or {}).get("average")):
        last = record.config.get("average_last")
        blocks.append(result_table(average, f"Mean over the last {last} rounds"))
    blocks.append(Prose(MEANING))
    if told := (record.result or {}).get("choice"):
        rows = [[label, words] for label, words in described(told)]
        blocks.append(
            Table(("to adapt with", "settings"), rows, "Chosen by clients that had not trained yet, on their rows", 2)
        )
    return Section("Results", blocks)


def result_table(figures: Figures, caption: str) -> Table:
    """One line for each mode and group."""
    numeric = about_numbers(figures)
    first, names = SHOWN[numeric][0], TABLED[numeric]
    head = ["mode", "clients", *(TITLES[name] for name in names), "mean over clients", "spread over clients", "worst tenth"]
    rows = []
    for mode, groups in figures.items():
        for group, found in groups.items():
            shown = [(name, "rows") for name in names] + [(first, form) for form in ("clients", "spread", "worst_tenth")]
            rows.append([mode, group, *(number(name, found[name][form]) if name in found else "—" for name, form in shown)])
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
    if len(record.evaluations) < 2:
        said = "Clients were evaluated once, at the end; --evaluate-every 10 gives accuracy and calibration over rounds too."
        return Section("Learning curves", [*blocks, Prose(said)])
    pictures = []
    for group, name in itertools.product(GROUPS, SHOWN[record.numeric]):
        if found := evaluation_curves(record, group, name):
            ends = ", ".join(f"{mode} {curve.y[-1]:.4g}" for mode, curve in found.items())
            caption = f"{TITLES[name]}, {group} clients: mean over clients, band: one standard deviation. At the end {ends}."
            pictures.append(draw(curves.over_rounds, f"{TITLES[name]}, {group}", found, styles(found), caption=caption))
    return Section("Learning curves", [*blocks, Pictures(pictures)])


def evaluation_curves(record: Record, group: str, name: str) -> dict[str, curves.Curve]:
    """By mode: the mean over clients after each evaluation, and its spread."""
    found = {}
    for mode in distinct(record, group):
        points = [
            (round, figures[mode][group][name]["clients"], figures[mode][group][name]["spread"])
            for round, figures in record.evaluations
            if name in figures.get(mode, {}).get(group, {})
        ]
        if points:
            x, y, spread = np.array(points).T
            low, high = y - spread, y + spread
            if name in PERCENT:
                low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
            found[mode] = curves.Curve(x, *(scaled(name, part) for part in (y, low, high)))
    return found


def labels(record: Record) -> Section:
    """Who has which labels."""
    if (data := record.data) is None:
        said = "The folder does not say who has which labels: it has no about.json, as runs of older versions."
        return Section("Labels", [Prose(said)])
    if data.labels is None and data.quantiles is None:
        said = "There are too many clients and classes to keep; fedbayes data describe --plot draws them."
        return Section("Labels", [Prose(said)])
    sizes = np.array(data.train) + np.array(data.test)
    what = "targets" if data.labels is None else "labels"
    caption = f"Who has which {what}: {len(sizes)} clients with {sizes.min()} to {sizes.max()} rows"
    if data.labels is not None:
        present = np.count_nonzero(np.array(data.labels), axis=1)
        caption += f", of {present.min()} to {present.max()} of the {len(data.classes or [])} classes"
    return Section("Labels", [Pictures([draw(distribution_figure, data, caption=f"{caption}.", wide=True)])])


def sent(record: Record) -> Section:
    """What crosses in a round and over the run."""
    if not record.messages:
        said = "The folder does not say what was sent; fedbayes wire does, for any algorithm."
        return Section("What was sent", [Prose(said)])
    who, (down, up, about) = "silo" if record.structured else "client", traffic(record)
    said = (
        f"Over {record.round or record.rounds} rounds{about}: {size(down)} to {who}s and {size(up)} from them. Nothing of a "
        f"{who}'s local state or rows is sent as it is. Mean and sum: the server needs only the sum over {who}s; stack: it "
        "sees each one's."
    )
    blocks: list[Any] = [Prose(said)]
    for clients, leaves in record.messages:
        of = f" ({clients} silo{'s' * (clients > 1)} of this form)" if record.structured and len(record.messages) > 1 else ""
        for message, title in (("down", f"To each {who}{of}"), ("up", f"From each {who}{of}")):
            chosen = [leaf for leaf in leaves if leaf.message == message]
            blocks.append(_fields(chosen, f"{title}, each round", message == "up"))
        rows = [
            [one.message, one.path, str(list(one.shape)), one.dtype, one.reduction or "—", count(one.bytes)] for one in leaves
        ]
        more = f", the first {ARRAYS}" if len(rows) > ARRAYS else ""
        head = ("message", "array", "shape", "type", "reduction", "bytes")
        blocks.append(Table(head, rows[:ARRAYS], f"Arrays of a round{more}", 5, f"All {len(rows)} arrays{of}"))
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
        rows.append([name, *kinds, str(len(parts)), count(numbers), count(sum(leaf.bytes for leaf in parts))])
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
    if record.structured:
        total, cohort = sum(count for count, _ in record.messages), record.config.get("cohort")
        if record.config.get("in_turn"):
            cohort = 1
        share = 1.0 if cohort is None else cohort if cohort < 1 else cohort / total
        about = " (about, as silos of several forms take turns)" if share < 1 and len(record.messages) > 1 else ""
        return each["down"] * share * rounds, each["up"] * share * rounds, about
    cohort = record.messages[0][0]
    answered = {entry["round"]: entry["clients"] for entry in record.timing if "clients" in entry}
    whole = sum(answered.values()) if len(answered) >= rounds else cohort * rounds * (1 - record.config.get("dropout", 0.0))
    return each["down"] * rounds, each["up"] / cohort * whole, ""


def time(record: Record) -> Section:
    """Seconds of each part."""
    if not record.timing:
        return Section("Time", [Prose("The folder keeps no times: it has no timing.jsonl, as runs of older versions.")])
    parts: dict[str, list[float]] = {}
    for entry in record.timing:
        name = str(entry["part"])
        if name == "training":  # the first entry, or the first after the run was resumed, has the compilation in it
            name = FIRST if FIRST not in parts else name
        parts.setdefault(name, []).append(entry["seconds"])
    total = sum(sum(values) for values in parts.values())
    rows = []
    for name, values in parts.items():
        share, median = f"{100 * sum(values) / max(total, 1e-9):.0f}", f"{1000 * np.median(values):,.1f}"
        rows.append([PARTS.get(name, name), f"{sum(values):.2f}", share, str(len(values)), median])
    rows.append(["all", f"{total:.2f}", "100", "", ""])
    return Section("Time", [Table(("part", "seconds", "%", "times", "median ms"), rows, "Seconds on the machine that ran it")])
