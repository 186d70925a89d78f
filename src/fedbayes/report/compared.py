"""Several runs on one page: methods on the same data, each over its seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from fedbayes.engine.choose import described_over
from fedbayes.evaluation.assess import MANY, Evaluation, few
from fedbayes.evaluation.differences import difference_sheet, differences, intervals
from fedbayes.evaluation.score import HIGHER_IS_BETTER, SHOWN, Score, kept, pooled
from fedbayes.evaluation.tables import PERCENT
from fedbayes.report import curves, structured
from fedbayes.report.blocks import Picture, Pictures, Prose, Section, Table, draw
from fedbayes.report.format import TITLES, distinct, flat, number, scaled, size
from fedbayes.report.newcomers import newcomers
from fedbayes.report.records import GROUPS, Record
from fedbayes.report.sections import evaluation_curves, traffic
from fedbayes.sheets import WORDS

SAME = ("algorithm", "options", "rounds", "cohort", "in_turn", "dropout", "network", "file", "model", "start")
"""What runs of one method have in common; their seeds differ, and how often they were evaluated does not matter."""


class Method(NamedTuple):
    """Runs that differ in their seed only."""

    label: str
    records: list[Record]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t-interval over seeds; of one seed there is none.

    >>> [round(part, 2) for part in interval([1.0, 2.0, 3.0])]
    [2.0, -0.48, 4.48]
    """
    mean, found = float(np.mean(values)), intervals(np.array(values)[:, None])["seeds"]
    return (mean, mean, mean) if found is None else (mean, *found)


def data_sets(records: Sequence[Record]) -> list[tuple[str, list[Record], bool]]:
    """Runs by what they were on, with a name, and whether each seed has a partition of its own (`compare --vary-data`)."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        described = {name: value for name, value in record.about_data.items() if name != "fingerprint"}
        alike.setdefault(json.dumps([record.data_name, described], sort_keys=True), []).append(record)
    found = []
    for members in alike.values():
        prints: dict[Any, list[Record]] = {}
        for record in members:
            prints.setdefault(record.about_data.get("fingerprint"), []).append(record)
        seeds = {(record.config.get("seed"), record.about_data.get("fingerprint")) for record in members}
        if len(seeds) == len({seed for seed, _ in seeds}):  # each seed is of one partition
            found.append((members[0].data_name, members, len(prints) > 1))
        else:
            found += [(f"{members[0].data_name} ({key})", part, False) for key, part in prints.items()]
    return found


def methods(records: Sequence[Record], varied: bool = False) -> list[Method]:
    """Runs of the same algorithm with the same options together, named by what tells them apart."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_settings(record, varied), sort_keys=True), []).append(record)
    settings = [_settings(members[0], varied) for members in groups.values()]
    found: list[Method] = []
    for own, members in zip(settings, groups.values(), strict=True):
        others = [other for other in settings if other["algorithm"] == own["algorithm"]]
        apart = [name for name in own if any(other.get(name) != own[name] for other in others)]
        said = [f"{name.removeprefix('options.')} {own[name]}" for name in apart if name != "model"][:3]
        found.append(Method(own["algorithm"] + (f" ({', '.join(said)})" if said else ""), members))
    labels = [method.label for method in found]
    return [
        method._replace(label=f"{method.label} #{place + 1}") if labels.count(method.label) > 1 else method
        for place, method in enumerate(found)
    ]


def _settings(record: Record, varied: bool) -> dict[str, str]:
    found = flat({name: record.config[name] for name in SAME if name in record.config})
    # Another partition has other counts of rows and other constants of standardisation.
    dropped = ("N", "D", "model") if varied else ()
    # The length of a schedule that follows from the rounds of the run says nothing of its own.
    follows = {name for name in found if name.endswith(".rounds") and found[name] == found["rounds"]}
    return {name: value for name, value in found.items() if name.split(".")[-1] not in dropped and name not in follows}


def overview(records: Sequence[Record], sets: int) -> Section:
    """Which runs the page is about, and what is wrong with them."""
    blocks: list[Any] = [Prose(f"{record.folder}: {note}", warning=True) for record in records for note in record.notes]
    if len({record.structured for record in records}) > 1:
        said = "Models over silos and networks over clients have no figure in common; each has its own part."
        blocks.append(Prose(said, True))
    elif sets > 1:
        said = f"The runs are on {sets} different data sets, so each has its own part and no table mixes them."
        blocks.append(Prose(said, True))
    head, rows = ("run", "algorithm", "data", "state", "seed", "rounds"), []
    for one in records:
        rows.append([str(one.folder), one.algorithm, one.data_name, one.state, str(one.config.get("seed")), str(one.rounds)])
    blocks.append(Table(head, rows, f"{len(records)} runs; fedbayes report RUN gives the page of one", 4))
    return Section("Runs", blocks)


def compared(name: str, records: Sequence[Record], varied: bool, several: bool) -> list[Section]:
    """The parts of a page about the runs on one data set."""
    where = f" on {name}" if several else ""
    if records[0].structured:
        parts = structured.side_by_side(records, _labels(records))
        return [part._replace(title=part.title + where) for part in parts]
    found, numeric = methods(records, varied), any(one.numeric for one in records)  # a run without figures is not known to be
    done = [Method(label, [one for one in members if one.figures and one.result]) for label, members in found]
    done, sections = [method for method in done if method.records], []
    if done:
        blocks = [*_results(done, numeric, varied), *_differences(done, numeric, varied)]
        sections.append(Section(f"Results{where}", blocks))
        if pictures := [] if numeric else _newcomers(done):
            sections.append(Section(f"Newcomers{where}", [Prose(NEWCOMERS), Pictures(pictures)]))
    sections.append(Section(f"Learning curves{where}", _curves(found, numeric)))
    return [*sections, Section(f"Options and cost{where}", [*_options(found, varied), *_chosen(found), _cost(found)])]


def _labels(records: Sequence[Record]) -> list[str]:
    labels = [f"{record.algorithm}, seed {record.config.get('seed')}" for record in records]
    return labels if len(set(labels)) == len(labels) else [str(record.folder) for record in records]


def _results(found: Sequence[Method], numeric: bool, varied: bool) -> list[Any]:
    names, blocks, pictures = SHOWN[numeric], [], []
    for group in GROUPS:
        rows, lines = [], []
        for label, records in found:
            for mode in distinct(records[0], group):
                figures = [one.figures[mode][group] for one in records if group in one.figures.get(mode, {})]
                if not figures:
                    continue
                cells = [_cell(name, [one[name]["rows"] for one in figures if name in one]) for name in names]
                cells.append(_cell(names[0], [one[names[0]]["worst_tenth"] for one in figures if names[0] in one]))
                rows.append([label, mode, str(len(figures)), *cells])
                if values := [one[names[0]]["rows"] for one in figures if names[0] in one]:
                    short = label if len(label) <= 18 else label[:17] + "…"
                    lines.append((f"{short}, {mode}", *scaled(names[0], _bounded(names[0], values)).tolist()))
        if rows:
            head = ("method", "mode", "seeds", *(TITLES[name] for name in names), f"worst tenth, {TITLES[names[0]]}")
            blocks.append(Table(head, rows, f"{group.capitalize()} clients: mean over seeds [95 % interval]", 2))
            best = (max if names[0] in HIGHER_IS_BETTER else min)(lines, key=lambda line: line[1])
            title = f"{TITLES[names[0]]}, {group} clients"
            caption = f"{title}: mean over seeds and its interval, as in the table. Best: {best[0]} with {best[1]:.4g}."
            pictures.append(draw(curves.intervals, title, lines, "mean and 95 % interval", caption=caption))
    said = "Figures are over all test rows; the interval is Student's t over seeds, cut at 0 and 100 %, and one seed has none."
    same = " All runs have the same clients: the interval is that of training."
    said += " Each seed has a partition of its own." if varied else same
    said += " Methods differ in their number of seeds." if len({len(method.records) for method in found}) > 1 else ""
    return [Prose(said), *blocks, Pictures(pictures)]


def _differences(found: Sequence[Method], numeric: bool, varied: bool) -> list[Table]:
    """Of every method from the first, as `fedbayes compare` prints them; where runs have their clients' scores."""
    runs: dict[str, dict[int, Evaluation]] = {}
    for label, records in found:
        for one in records:
            if (evaluation := one.evaluation) is not None:
                runs.setdefault(label, {})[int(one.config["seed"])] = evaluation
    first, *others = runs or [""]
    all_told = [one for label in others for one in differences(label, runs[label], first, runs[first], crossed=not varied)]
    told = [one for one in all_told if one.mode in distinct(found[0].records[0], one.group)]
    if not told:
        return []
    sheet = difference_sheet(told, "both", numeric)
    bold, rows = Markup("<b>{}</b>"), []
    for section in sheet.sections:
        for row in section:
            rows.append([section[0][0].text, *(bold.format(one.text) if one.bold else one.text for one in row[1:])])
    return [Table(sheet.headings, rows, f"D{sheet.title[1:]}, in pairs: {sheet.caption}", WORDS)]


NEWCOMERS = (
    "Clients that never trained, after they adapted. Left: the share of right labels among predictions of like confidence. "
    "Right: accuracy over the rows that are answered, the surest first."
)


def _newcomers(found: Sequence[Method]) -> list[Picture]:
    """One for each number of rows that unseen clients adapted with; the first method's shared model beside them."""
    first = found[0].records[0]
    pictures = []
    for mode in sorted((mode for mode in distinct(first, "unseen") if mode.startswith("adapted")), key=few):
        scores = {f"{found[0].label}, shared": _unseen(found[0], "global")} if "global" in first.figures else {}
        scores |= {label: _unseen(Method(label, records), mode) for label, records in found}
        shown = {label: score for label, score in scores.items() if score is not None and score.rows}
        title = f"Newcomers with {few(mode)} rows" if few(mode) < MANY else "Newcomers with all their rows"
        kept_of = ", ".join(f"{label} {100 * kept(score, 0.9):.0f} %" for label, score in shown.items())
        caption = f"{title}. Rows that can be answered with 90 % of the answers right: {kept_of}."
        pictures += [draw(newcomers, shown, title, caption=caption, wide=True)] if shown else []
    return pictures


def _unseen(method: Method, mode: str) -> Score | None:
    """Of all newcomers and seeds together; None where a run has no such scores."""
    each = [one.evaluation for one in method.records]
    parts = [pooled(one.scores[mode], one.unseen) for one in each if one is not None and mode in one.scores]
    return Score(*(np.sum(values, axis=0) for values in zip(*parts, strict=True))) if parts else None


def _bounded(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """The interval, within what the figure can be."""
    return tuple(np.clip(interval(values), 0, 1).tolist()) if name in PERCENT else interval(values)


def _cell(name: str, values: Sequence[float]) -> str:
    if not values:
        return "—"
    mean, low, high = (number(name, part) for part in _bounded(name, values))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


def _curves(found: Sequence[Method], numeric: bool) -> list[Any]:
    pictures: list[Picture] = []
    names = dict.fromkeys(name for method in found for one in method.records for entry in one.scalars for name in entry)
    for name in [name for name in names if name not in ("round", "weight")][:6]:
        lines = {}
        for label, records in found:
            curve = [{entry["round"]: entry[name] for entry in one.scalars if name in entry} for one in records]
            if (line := _over_seeds(curve)) is not None:
                lines[label] = line
        pictures.append(_picture(name, lines))
    for group, modes in (("participating", ("personal", "global")), ("unseen", ("adapted", "global"))):
        for name in SHOWN[numeric]:
            lines = {}
            for label, records in found:
                mode = next((mode for mode in modes if mode in records[0].figures), None)
                points = [evaluation_curves(one, group, name).get(mode or "") for one in records if len(one.evaluations) > 1]
                curve = [dict(zip(one.x.tolist(), one.y.tolist(), strict=True)) for one in points if one is not None]
                if (line := _over_seeds(curve)) is not None:
                    lines[f"{label}, {mode}"] = line
            if lines:
                pictures.append(_picture(f"{TITLES[name]}, {group}", lines))
    if not pictures:
        return [Prose("The runs have no rounds yet.")]
    return [Prose("Lines are means over seeds, bands reach from the lowest seed to the highest."), Pictures(pictures)]


def _over_seeds(seeds: Sequence[dict[float, float]]) -> curves.Curve | None:
    """The mean over seeds at the rounds that all have."""
    seeds = [seed for seed in seeds if seed]
    rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
    if not rounds:
        return None
    values = np.array([[seed[round] for round in rounds] for seed in seeds])
    low, high = (values.min(axis=0), values.max(axis=0)) if len(seeds) > 1 else (None, None)
    return curves.Curve(np.array(rounds), values.mean(axis=0), low, high)


def _picture(title: str, lines: dict[str, curves.Curve]) -> Picture:
    ends = "; ".join(f"{label} {line.y[-1]:.4g}" for label, line in lines.items())
    return draw(curves.over_rounds, title, lines, legend=True, caption=f"{title} over rounds. At the end: {ends}.")


def _options(found: Sequence[Method], varied: bool) -> list[Table]:
    settings = [_settings(method.records[0], varied) for method in found]
    names = dict.fromkeys(name for own in settings for name in own)
    rows = [
        [name.removeprefix("options."), *(own.get(name, "—") for own in settings)]
        for name in names
        if name not in ("model", "algorithm") and len({own.get(name) for own in settings}) > 1
    ]
    caption = "Settings in which the methods differ; a dash: it has no such setting"
    head = ("setting", *(method.label for method in found))
    return [Table(head, rows, caption, 1 + len(found), "Settings that differ")] if rows else []


def _chosen(found: Sequence[Method]) -> list[Table]:
    rows = []
    for label, records in found:
        told = {int(one.config["seed"]): one.result["choice"] for one in records if one.result and one.result.get("choice")}
        rows += [[label, *words] for words in described_over(told)]
    caption = (
        "Settings of adapt, chosen by clients that had not trained yet; gain in nats a row over the first candidate, "
        "which moves a client little"
    )
    return [Table(("method", "to adapt with", "settings", "gain"), rows, caption, 3)] if rows else []


def _cost(found: Sequence[Method]) -> Table:
    rows = []
    for label, records in found:
        seconds = [sum(entry["seconds"] for entry in one.timing) for one in records if one.timing]
        sent = [traffic(one)[:2] for one in records if one.messages]
        cells = [size(mean) for mean in np.mean(sent, axis=0)] if sent else ["—", "—"]
        rows.append([label, f"{np.mean(seconds):.1f}" if seconds else "—", *cells])
    return Table(("method", "seconds", "sent to clients", "sent from clients"), rows, "Cost of a run, mean over seeds")
