"""Small pictures of a page: curves over rounds, clients in order, levels of numbers, parts of uncertainty, intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbayes.evaluation.score import BINS, Score
from fedbayes.results.pictures import COLOURS, STYLES, tail

SIZE = (3.5, 2.5)  # inches: as wide as a telephone, so that text need not shrink
POINTS = 300  # of one curve; longer ones are averaged over windows
MARKED = 30  # points up to which each has a mark


class Curve(NamedTuple):
    """Values over rounds, and a band around them where there is one."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def thinned(curve: Curve, points: int = POINTS) -> Curve:
    """At most so many points, each the mean of a window.

    >>> thinned(Curve(np.arange(6.0), np.arange(6.0)), 3).y.tolist()
    [0.5, 2.5, 4.5]
    """
    if len(curve.x) <= points:
        return curve
    parts = [None if part is None else np.array_split(np.asarray(part, float), points) for part in curve]
    return Curve(*(None if part is None else np.array([window.mean() for window in part]) for part in parts))  # type: ignore[arg-type]


def _panel(title: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.02, horizontalalignment="left", fontsize=9.5)  # wider than the axes
    axes.grid(color=COLOURS[2], alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def over_rounds(
    title: str, curves: Mapping[str, Curve], styles: Mapping[str, int] | None = None, *, end: bool = False, legend: bool = False
) -> Figure:
    """Curves over rounds, each with its band; with `end` the axis begins where the last nine tenths lie."""
    figure, axes = _panel(title)
    for number, (name, curve) in enumerate(curves.items()):
        place = number if styles is None else styles[name]
        x, y, low, high = thinned(curve)
        colour, few = COLOURS[place % len(COLOURS)], len(x) <= MARKED
        dash = STYLES[place // len(COLOURS) % len(STYLES)] if styles is None else STYLES[place % len(STYLES)]
        axes.plot(x, y, dash, color=colour, linewidth=1.5, label=name, marker="o" if few else None, markersize=2.5)
        if low is not None and high is not None:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    limits = tail(np.concatenate([curve.y[len(curve.y) // 10 :] for curve in curves.values()])) if end else None
    if limits is not None:
        axes.set_ylim(*limits)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    if legend or len(curves) > 1:
        _legend(figure, axes)
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=1 if longest > 24 else 2 if longest > 11 else 3)


def in_order(title: str, values: Mapping[str, np.ndarray], styles: Mapping[str, int], worst_first: bool) -> Figure:
    """Each client's figure, the worst client first, a line for each mode; the worst tenth is shaded."""
    figure, axes = _panel(title)
    count = max(map(len, values.values()))
    axes.axvspan(0, -(-count // 10) + 0.5 if count > 1 else 1.5, color=COLOURS[1], alpha=0.12, linewidth=0)
    for name, value in values.items():
        ordered = np.sort(value) if worst_first else -np.sort(-value)
        curve = thinned(Curve(np.arange(1, len(ordered) + 1), ordered))
        place = styles[name]
        look: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.5, "markersize": 2.5, "label": name}
        axes.plot(curve.x, curve.y, STYLES[place % len(STYLES)], marker="o" if count <= MARKED else None, **look)
    axes.set_xlim(0 if count > MARKED else 0.5, count + (0 if count > MARKED else 0.5))
    axes.set_xlabel("clients, the worst first; shaded: the worst tenth")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    _legend(figure, axes)
    return figure


def levels(score: Score, title: str) -> Figure:
    """For a number: which share of rows lies below each predictive quantile. On the diagonal all levels hold."""
    figure, axes = _panel(title, (3.0, 2.9))
    share = np.concatenate([[0.0], np.cumsum(score.bin_rows) / max(float(np.sum(score.bin_rows)), 1.0)])
    level = np.arange(BINS + 1) / BINS
    axes.plot([0, 1], [0, 1], "--", color=COLOURS[2], linewidth=1)
    axes.plot(level, share, color=COLOURS[0], marker="o", markersize=2.5, linewidth=1.5)
    axes.fill_between(level, level, share, color=COLOURS[1], alpha=0.2, linewidth=0)
    axes.set_xlabel("predictive quantile")
    axes.set_ylabel("share of rows below it")
    return figure


def parts_of_uncertainty(title: str, parts: Mapping[str, tuple[float, float]], unit: str) -> Figure:
    """Aleatoric and epistemic uncertainty, one bar for each mode."""
    figure, axes = _panel(title, (3.5, 1.15 + 0.32 * len(parts)))
    aleatoric, epistemic = np.array(list(parts.values())).T
    axes.barh(list(parts), aleatoric, color=COLOURS[0], alpha=0.75, height=0.6, label="aleatoric")
    axes.barh(list(parts), epistemic, left=aleatoric, color=COLOURS[5], height=0.6, label="epistemic")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(unit)
    _legend(figure, axes)
    return figure


def intervals(title: str, rows: Sequence[tuple[str, float, float, float]], unit: str) -> Figure:
    """A mean and its interval for each name, the first on top."""
    figure, axes = _panel(title, (3.5, 0.75 + 0.27 * len(rows)))
    for place, (_, mean, low, high) in enumerate(rows):
        axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=2.5, alpha=0.55, solid_capstyle="butt")
        axes.plot([mean], [place], "o", color=COLOURS[0], markersize=4.5)
    axes.set_yticks(range(len(rows)), labels=[name for name, *_ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    return figure
