"""Pictures of how far predictions can be believed: reliability diagrams and histograms of confidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from fedbayes.errors import UserError
from fedbayes.evaluation.score import BINS, Score, metrics
from fedbayes.results.pictures import COLOURS


def reliability(methods: Mapping[str, Score]) -> Figure:
    """For each method a reliability diagram, and under it how many rows have which confidence.

    A bar is the share of right labels among predictions of that confidence; where it ends below the diagonal, predictions are
    surer than they should be. Each score is one client's, or several clients' `pooled`.

    >>> import fedbayes as fb
    >>> from fedbayes.evaluation.score import pooled
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> fit = fb.simulate(fb.FedAvg(fb.network("mlp", clients)), clients, rounds=2, cohort=5, modes=("global",))
    >>> len(reliability({"FedAvg": pooled(fit.evaluation.scores["global"])}).axes)
    2
    """
    if not methods:
        raise UserError("there is no score to draw; give at least one method")
    figure = Figure(figsize=(max(3.2, 2.7 * len(methods)), 4.2), layout="constrained")
    axes = figure.subplots(2, len(methods), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    edges = np.arange(BINS) / BINS
    for (name, score), (upper, lower) in zip(methods.items(), axes.T, strict=True):
        rows = np.asarray(score.bin_rows, np.float64)
        filled = rows > 0
        safe = np.where(filled, rows, 1)
        accuracy, confidence = score.bin_hits / safe, score.bin_confidence / safe
        figures = {key: float(value) for key, value in metrics(score, numeric=False).items()}
        style = {"width": 1 / BINS, "align": "edge", "edgecolor": "white"}
        upper.bar(edges[filled], accuracy[filled], color="#9db8d2", label="share of right labels", **style)
        gap = {"facecolor": "none", "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8, "label": "gap to confidence"}
        upper.bar(edges[filled], (confidence - accuracy)[filled], bottom=accuracy[filled], **{**style, **gap})
        upper.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
        upper.set_title(f"{name}\nECE {100 * figures['ece']:.1f} %, MCE {100 * figures['mce']:.0f} %", fontsize=9)
        upper.set_ylim(0, 1)
        lower.bar(edges, rows / max(rows.sum(), 1), color=COLOURS[2], **style)
        sure = score.bin_confidence.sum() / max(rows.sum(), 1)
        for value, colour, label in ((figures["accuracy"], COLOURS[0], "accuracy"), (sure, COLOURS[1], "mean confidence")):
            lower.axvline(value, color=colour, linewidth=1.5, label=label)
        lower.set_xlim(0, 1)
        lower.set_xlabel("confidence")
        for panel in (upper, lower):
            panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("share of right labels")
    axes[1, 0].set_ylabel("share of rows")
    entries = [panel.get_legend_handles_labels() for panel in axes[:, 0]]
    handles, labels = ([item for entry in entries for item in entry[part]] for part in (0, 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(methods) > 1 else 2, frameon=False, fontsize=8)
    return figure
