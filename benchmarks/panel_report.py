"""The tables of docs/results/panel.md, from the figures that panel.py left."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import MISSING, put
from panel_judges import known
from panel_models import MODELS, load

PAGE = Path(__file__).parent.parent / "docs" / "results" / "panel.md"
TITLES = {
    "ep": "EP",
    "ep corrected": "EP, corrected",
    "pvi": "PVI",
    "pvi corrected": "PVI, corrected",
    "sfvi": "SFVI",
    "sfvi corrected": "SFVI, corrected",
    "sfvi-avg": "SFVI-Avg",
    "sfvi-avg corrected": "SFVI-Avg, corrected",
    "consensus": "consensus MC",
    "meta-analysis": "meta-analysis",
    "pooled nuts": "pooled NUTS",
}
BEFORE = "before"
"""The label of the version before EP, whose figures have a table of their own."""
CLOSE, OFF = (0.15, 0.15), (0.3, 0.3)
"""How far the worst mean, in standard deviations, and the worst standard deviation, as a share, may be from the judge's."""

Row = dict[str, Any]
Rows = dict[tuple[str, str], list[Row]]
"""The seeds of each model and method."""


def write(known: dict[tuple[str, str, str, int], Row], label: str) -> int:
    """Fill the page's tables."""
    rows, before = chosen(known, (label, "peer")), chosen(known, (BEFORE,))
    put(PAGE, "models", models())
    put(PAGE, "judges", judges())
    put(PAGE, "summary", summary(rows))
    for method in TITLES:
        if f"<!-- {method} -->" in PAGE.read_text() and any(name == method for _, name in rows):
            put(PAGE, method, details(rows, method))
    put(PAGE, "verdicts", verdicts(rows))
    if before:
        put(PAGE, "before", summary(before))
        put(PAGE, "verdicts before", verdicts(before))
    print(f"wrote {PAGE}")
    return 0


def chosen(known: dict[tuple[str, str, str, int], Row], labels: tuple[str, ...]) -> Rows:
    """What has these labels, by model and method."""
    found: Rows = {}
    for (label, model, method, _), row in sorted(known.items()):
        if label in labels:
            found.setdefault((model, method), []).append(row)
    return found


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Markdown of a table."""
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)).replace("| --- ", "|---")


def models() -> str:
    """What is in the panel."""
    lines = []
    for name in MODELS:
        model = load(name)
        rows = [model.structured.rows(data) for data in model.silos.values()]
        size = f"{min(rows)}" if len(set(rows)) == 1 else f"{min(rows)}–{max(rows)}"
        what = " ".join((MODELS[name].__doc__ or "").split())
        lines.append([model.title, what, str(len(rows)), size, str(model.structured.size())])
    return table(["", "model", "silos", "rows in a silo", "global latents"], lines)


def judges() -> str:
    """How good the judges are."""
    lines = []
    for name, judge in known().items():
        facts = judge.facts
        seconds = f"{facts['seconds']:.0f} + {facts['compiling']:.0f}"
        figures = [f"{facts['error_mean']:.3f}", f"{facts['error_sd']:.3f}", f"{facts['ess']:.0f}", f"{facts['r_hat']:.3f}"]
        lines.append([load(name).title, f"4 × {facts['draws']:,}", *figures, str(facts["divergent"]), seconds])
    head = ["", "draws", "error of means, sd", "error of sds", "least ESS", "r-hat", "divergent", "seconds + compiling"]
    return table(head, lines)


def extreme(rows: list[Row], scale: str) -> tuple[float | None, float | None]:
    """The worst mean and the worst ratio of standard deviations over seeds."""
    means = [row[f"mean {scale}"] for row in rows if row[f"mean {scale}"] is not None]
    ratios = [row[f"sd {scale}"] for row in rows if row[f"sd {scale}"] is not None]
    return max(means, default=None), max(ratios, key=far, default=None)


def far(ratio: float) -> float:
    """How far a ratio is from 1."""
    return abs(math.log(max(ratio, 1e-9)))


def within(mean: float | None, ratio: float | None, limits: tuple[float, float]) -> bool:
    """Whether both are within the limits; what a method does not give is not counted."""
    return (mean is None or mean <= limits[0]) and (ratio is None or abs(ratio - 1) <= limits[1])


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or none."""
    if value is None:
        return "none"
    return f"{value:.{digits}f}" if value < 100 else f"{value:.0f}"


def summary(rows: Rows) -> str:
    """Worst mean and worst ratio of standard deviations over latents and seeds; bold where both are close."""
    methods = [method for method in TITLES if any(found == method for _, found in rows)]
    lines = []
    for name in MODELS:
        cells = []
        for method in methods:
            found = rows.get((name, method), [])
            good = [row for row in found if "error" not in row]
            if not good:
                cells.append("failed" if found else MISSING)
                continue
            worst = extreme(good, "real")
            text = ", ".join(number(value) for value in worst)
            cells.append(f"**{text}**" if within(*worst, CLOSE) and len(good) == len(found) and worst != (None, None) else text)
        if set(cells) != {MISSING}:
            lines.append([load(name).title, *cells])
    counts = [f"{sum(line[place + 1].startswith('**') for line in lines)} of {len(lines)}" for place in range(len(methods))]
    return table(["", *(TITLES[method] for method in methods)], [*lines, ["close on", *counts]]) if lines else ""


def spread(values: list[float], digits: int = 2) -> str:
    """Least and largest over seeds."""
    if not values:
        return "none"
    low, high = number(min(values), digits), number(max(values), digits)
    return low if low == high else f"{low}–{high}"


def details(rows: Rows, method: str) -> str:
    """A method on every model, with the range over seeds."""
    lines = []
    for name in MODELS:
        found = rows.get((name, method), [])
        good = [row for row in found if "error" not in row]
        if not found:
            continue
        if not good:
            lines.append([load(name).title, *["none"] * 5, found[0]["error"], *["none"] * 4])
            continue

        def of(key: str, good: list[Row] = good) -> list[float]:
            return [row[key] for row in good if row[key] is not None]

        def which(key: str, worst: Callable[[Row], float], good: list[Row] = good) -> str:
            known = [row for row in good if row[key] is not None]
            return f" ({max(known, key=worst)[key]})" if known else ""

        seconds = statistics.mean(row["seconds"] - row["compiling"] for row in good)
        compiling = max(row["compiling"] for row in good)  # later seeds find the programs compiled
        lines.append(
            [
                load(name).title,
                spread(of("mean real")) + which("mean of real", lambda row: row["mean real"]),
                spread(of("sd real")) + which("sd of real", lambda row: far(row["sd real"])),
                spread(of("mean own")),
                spread(of("sd own")),
                f"{len(good)} of {len(found)}",
                "; ".join(dict.fromkeys(short(row) for row in good)),
                spread(of("rounds"), 0),
                spread([value / 1000 for value in of("bytes")], 1),
                f"{seconds:.0f} + {compiling:.0f}",
                f"{good[0]['nuts']['seconds']:.0f} + {good[0]['nuts']['compiling']:.0f}",
            ]
        )
    head = ["", "worst mean, sd (of)", "worst sd ratio (of)", "mean, own scale", "sd, own scale", "seeds", "verdict", "rounds"]
    return table([*head, "kB a silo", "seconds + compiling", "pooled NUTS's"], lines) if lines else ""


def short(row: Row) -> str:
    """A verdict in a word or two."""
    return str(row["word"]) if row.get("word") else {None: "not checked", True: "warned", False: "good"}[row["warned"]]


def verdicts(rows: Rows) -> str:
    """Fits that are off by .3 sd or 30 % × what the verdict says."""
    lines = []
    for method, title in TITLES.items():
        found = [row for (_, one), several in rows.items() if one == method for row in several if "error" not in row]
        if not found or method in ("consensus", "meta-analysis"):
            continue
        counts = []
        for right in (False, True):
            some = [row for row in found if within(row["mean real"], row["sd real"], OFF) == right]
            counts += [str(sum(row["warned"] is warned for row in some)) for warned in (True, None, False)]
        lines.append([title, *counts])
    if lines:
        lines.append(["all", *(str(sum(int(line[place]) for line in lines)) for place in range(1, 7))])
    kinds = [f"{kind}: {said}" for kind in ("off", "right") for said in ("warned", "not checked", "not warned")]
    return table(["", *kinds], lines) if lines else ""
