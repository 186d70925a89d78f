"""A picture of who has which labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from fedbayes.data import Clients
from fedbayes.data.describe import Facts, facts
from fedbayes.errors import UserError
from fedbayes.results.pictures import save_figure

NAMED = 40  # up to so many clients have a line with their name; more are sorted by their most frequent label

DRAWN = 1000  # of more clients than this, so many are drawn: a page has no more lines

TRAIN, TEST, UNSEEN, UNSEEN_TEST = "#3b6fb6", "#a9c4e6", "#d9822b", "#f0c79c"

# From clear to full, so that more is stronger on a light page and on a dark one.
SHADES = mpl.colors.LinearSegmentedColormap.from_list("shades", [(*mpl.colors.to_rgb(TRAIN), a) for a in (0.08, 1.0)])


def label_distribution(clients: Clients, path: Path | str) -> Path:
    """Save a picture (.svg, .png or .pdf) of each client's labels and rows; of each client's targets if they are numbers.

    On the left a row for each client and a column for each class, darker the larger the class's share of the client's rows; on
    the right the client's number of rows.
    """
    path = Path(path)
    figure = distribution_figure(facts(clients))
    FigureCanvasAgg(figure)
    try:
        # Text stays text in an .svg; without a date and with a fixed salt the same clients give the same file.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedbayes"}):
            save_figure(figure, path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise UserError(f"cannot write the picture {path} ({error}); give a path that ends in .svg, .png or .pdf") from error
    return path


def distribution_figure(clients: Facts) -> Figure:
    """The picture that `label_distribution` saves, from what is known of the clients without their rows."""
    count, unseen = len(clients.names), np.array(clients.unseen)
    few, order = count <= NAMED, np.arange(count)
    counts = None if clients.labels is None else np.array(clients.labels)
    if not few and counts is None:
        order = np.argsort(_quantiles(clients)[:, 2], kind="stable")
    elif not few and counts is not None:
        order = np.lexsort((-counts.max(1) / counts.sum(1), counts.argmax(1)))
    if len(order) > DRAWN:
        order = order[np.linspace(0, len(order) - 1, DRAWN).astype(int)]
    height = 1.3 + (0.24 * count if few else 6.5)
    classes = 12 if clients.classes is None else max(len(clients.classes), 5)
    width = 3.4 + float(np.clip(0.38 * classes, 2.5, 9))
    # Without pyplot there is no window and no state that another figure could see.
    figure = Figure(figsize=(width, max(height, 2.6)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[max(width - 3.2, 2), 1.5])
    if counts is None:
        _targets(left, clients, order)
    else:
        _shares(left, figure, clients.classes or [], counts[order])
    _sizes(right, clients, order)
    names = np.array([name if len(name) <= 18 else name[:17] + "…" for name in clients.names])
    if few:
        left.set_yticks(range(count), labels=names[order].tolist())
        for label in np.array(left.get_yticklabels())[unseen[order]]:
            label.set_color(UNSEEN)
    else:
        left.set_yticks([])
        which = f"{len(order)} clients" if len(order) == count else f"{len(order)} of {count} clients"
        left.set_ylabel(f"{which}, by their {'median' if counts is None else 'most frequent label'}")
    left.set_ylim(len(order) - 0.5, -0.5)
    held_out = f", {unseen.sum()} unseen" if unseen.any() else ""
    rows = sum(clients.train) + sum(clients.test)
    figure.suptitle(f"{clients.name}: {count} clients{held_out}, {rows} rows", fontsize=11)
    return figure


def _quantiles(clients: Facts) -> np.ndarray:
    return np.array(clients.quantiles, float).reshape(len(clients.names), 5)


def _shares(axes: Axes, figure: Figure, classes: Sequence[str], counts: np.ndarray) -> None:
    share = counts / counts.sum(1, keepdims=True)
    most = max(float(share.max()), 1e-9)
    # A square root, so that a share of one in a hundred can be told from none.
    mesh = axes.pcolormesh(
        np.arange(counts.shape[1] + 1) - 0.5,
        np.arange(len(counts) + 1) - 0.5,
        np.ma.masked_equal(share, 0),
        cmap=SHADES,
        norm=mpl.colors.PowerNorm(0.5, vmin=0, vmax=most),
        edgecolors="white" if len(counts) <= NAMED and counts.shape[1] <= NAMED else "none",
        linewidth=0.5,
        rasterized=counts.size > 1600,
    )
    ticks = [tick for tick in (0.01, 0.1, 0.25, 0.5, 1.0) if tick <= most * 1.001]
    bar = figure.colorbar(mesh, ax=axes, location="bottom", aspect=40, shrink=0.6, pad=0.03, ticks=ticks)
    bar.ax.set_xticklabels([f"{tick:.0%}" for tick in ticks], fontsize=7)
    bar.set_label("share of the client's rows", fontsize=8)
    k = len(classes)
    step = max(1, -(-k // 62))
    long = max(len(name) for name in classes) * k > 60
    axes.set_xticks(range(0, k, step), labels=[name[:16] for name in classes[::step]])
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False, rotation=90 if long else 0)
    axes.tick_params(labelsize=5 if k > 30 else 8, axis="x", length=2)
    axes.tick_params(labelsize=8, axis="y", length=0)
    axes.spines[:].set_visible(False)


def _targets(axes: Axes, clients: Facts, order: np.ndarray) -> None:
    """The middle nine tenths, the middle half and the median of each client's targets."""
    low, first, median, third, high = _quantiles(clients)[order].T
    y = np.arange(len(order))
    thick = float(np.clip(160 / len(order), 0.6, 7))
    many = len(order) > NAMED
    axes.hlines(y, low, high, color=TEST, linewidth=thick / 3, rasterized=many)
    axes.hlines(y, first, third, color=TRAIN, linewidth=thick, rasterized=many)
    edge: dict[str, Any] = {"markeredgewidth": 0.5, "markeredgecolor": "black"}
    axes.plot(median, y, "o", color="white", markersize=min(4, thick + 1), rasterized=many, **edge)
    axes.set_xlabel("target: median, middle half and middle 90 %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _sizes(axes: Axes, clients: Facts, order: np.ndarray) -> None:
    y = np.arange(len(order))
    train, test, unseen = (np.array(part)[order] for part in (clients.train, clients.test, clients.unseen))
    thick = 0.75 if len(order) <= NAMED else 1.0
    for left, right, own, other in ((0 * train, train, TRAIN, UNSEEN), (train, train + test, TEST, UNSEEN_TEST)):
        # One collection instead of a bar for each client, which takes seconds where they are many.
        corners = np.array([[left, y - thick / 2], [left, y + thick / 2], [right, y + thick / 2], [right, y - thick / 2]])
        colours = np.where(unseen, other, own).tolist()
        bars = PolyCollection(list(corners.transpose(2, 0, 1)), facecolors=colours, rasterized=len(order) > NAMED)
        axes.add_collection(bars)
    axes.set_xlim(0, 1.05 * float((train + test).max()))
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [mpl.patches.Patch(color=TRAIN, label="training"), mpl.patches.Patch(color=TEST, label="test")]
    handles += [mpl.patches.Patch(color=UNSEEN, label="unseen")] if unseen.any() else []
    axes.legend(handles=handles, fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1)
    axes.set_xlabel("rows", fontsize=8)
