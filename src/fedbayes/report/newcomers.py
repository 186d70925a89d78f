"""Clients that never trained: how sure and how right their predictions are, and what abstaining gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedbayes.errors import UserError
from fedbayes.evaluation.score import Score, answered, kept, metrics
from fedbayes.results.pictures import COLOURS, STYLES

MERGED = 3
"""Bins of a score that are one point of the reliability curve: newcomers have few test rows."""
FEWEST = 5
"""Rows of a point, at least; the accuracy of fewer is noise."""


def newcomers(methods: Mapping[str, Score], title: str, target: float = 0.9) -> Figure:
    """Confidence and accuracy of each method, and its accuracy over the share of rows that it answers, the surest first.

    Scores are those of all newcomers. A mark is as large as the share of rows that it stands for. The ring is where
    a method that abstains reaches the target.

    >>> from fedbayes.evaluation.score import BINS
    >>> rows = np.full(BINS, 4.0)
    >>> score = Score(60.0, 20.0, -30.0, 15.0, 30.0, 0.0, rows, rows * (np.arange(BINS) + 0.5) / BINS, 0.8 * rows)
    >>> [axes.get_xlabel() for axes in newcomers({"FedAvg": score}, "5 rows").axes]
    ['how sure: mean confidence', 'share of rows answered, the surest first']
    """
    if not methods:
        raise UserError("there is no score to draw; give at least one method")
    figure = Figure(figsize=(7.6, 3.3 + 0.19 * len(methods)), layout="constrained")
    sure, share = figure.subplots(1, 2)
    sure.plot([0, 1], [0, 1], "--", color=COLOURS[2], linewidth=1, zorder=1)
    share.axhline(100 * target, color=COLOURS[2], linewidth=1, linestyle="--", zorder=1)
    lowest = 100 * target
    for number, (name, score) in enumerate(methods.items()):
        found = metrics(score, numeric=False)
        colour, dash = COLOURS[_colour(number)], STYLES[number // len(COLOURS) % len(STYLES)]
        rows, confidence, hits = (_merged(part) for part in (score.bin_rows, score.bin_confidence, score.bin_hits))
        there = rows >= FEWEST
        x, y = confidence[there] / rows[there], hits[there] / rows[there]
        sure.plot(x, y, dash, color=colour, linewidth=1.5, label=f"{name}: ECE {100 * float(found['ece']):.1f} %")
        sure.scatter(x, y, s=12 + 200 * rows[there] / rows.sum(), color=colour, alpha=0.55, linewidth=0, zorder=3)
        shares = np.arange(1, 201) / 200
        accuracy, part = answered(score, shares), kept(score, target)
        label = f"{name}: {100 * part:.0f} % answered"
        share.plot(100 * shares, 100 * accuracy, dash, color=colour, linewidth=1.5, label=label)
        if 0 < part < 1:
            ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 1.5, "clip_on": False, "zorder": 4}
            share.plot([100 * part], [100 * target], "o", color=colour, markersize=7, **ring)
        lowest = min(lowest, 100 * float(accuracy.min()))
    sure.set(xlim=(0, 1.04), ylim=(0, 1.04), xlabel="how sure: mean confidence", ylabel="how right: share of right labels")
    share.set(xlim=(0, 103), ylim=(5 * np.floor((lowest - 1) / 5), 100.9))
    share.set(xlabel="share of rows answered, the surest first", ylabel="right answers")
    for axis in (share.xaxis, share.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    sure.set_title("Above the diagonal: too modest; below: too sure", loc="left", fontsize=9)
    share.set_title(f"Abstaining where unsure; dashed: {100 * target:.0f} % right", loc="left", fontsize=9)
    for panel in (sure, share):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color=COLOURS[2], alpha=0.2, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.16))  # below, where no curve is
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10.5, fontweight="bold")
    return figure


def _colour(number: int) -> int:
    """The shared model, which is drawn first, is grey; red is for the method that the others are compared with."""
    return (2, 1, 0, 3, 4, 5)[number % len(COLOURS)]


def _merged(bins: Any) -> np.ndarray:
    return np.asarray(bins, np.float64).reshape(-1, MERGED).sum(axis=1)
