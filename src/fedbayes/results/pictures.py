"""Pictures of a fit over silos: the bound as it rose, and the marginals of what all silos share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbayes import files
from fedbayes.models.structured import numbers

MOST = 24  # numbers whose marginals are drawn
STYLES = ("-", "--", "-.", ":")
COLOURS = ("#1f4e79", "#c0504d", "#7f7f7f", "#4f9d69", "#8064a2", "#e08e2b")


def write_pictures(fit: Any, folder: Path) -> None:
    """posterior.png, posterior.nc and bound.png, or movement.png for a method without a bound, in the folder of a run."""
    if len(fit.bound):
        save_figure(bound_figure(fit), folder / "bound.png", dpi=120)
    else:
        save_figure(movement_figure(fit), folder / "movement.png", dpi=120)
    named = [(name, value) for name, value in numbers(fit.draws(4000)) if value.std() > 0]
    if named:
        save_figure(marginals({"posterior": dict(named[:MOST])}), folder / "posterior.png", dpi=120)
    draws = fit.posterior(2000)
    for group in draws.groups():
        del draws[group].attrs["created_at"]  # a run that is repeated leaves the same bits
    with files.replacing(folder / "posterior.nc") as part:
        draws.to_netcdf(str(part), engine="h5netcdf")


def save_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a picture in the format that its name says."""
    with files.replacing(path) as part:
        figure.savefig(part, format=path.suffix[1:], **options)


def bound_figure(fit: Any) -> Figure:
    """The bound over rounds; the axis begins where the last nine tenths lie, so that the end can be seen."""
    rounds, bound = np.array([entry["round"] for entry in fit.history]), fit.bound
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(rounds, bound, color=COLOURS[0], linewidth=1.5)
    if limits := tail(bound[len(bound) // 10 :]):
        axes.set_ylim(*limits)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("round")
    axes.set_ylabel("bound on log p(y)")
    axes.set_title(f"{fit.result['algorithm']} over {len(fit.simulation.names)} silos", loc="left", fontsize=10)
    return figure


def movement_figure(fit: Any) -> Figure:
    """How far each round moved q, and the Monte Carlo noise of it, in standard deviations of q."""
    rounds = np.array([entry["round"] for entry in fit.history])
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, label) in enumerate((("moved", "movement of q"), ("noise", "its Monte Carlo noise"))):
        values = np.array([entry[name] for entry in fit.history])
        axes.semilogy(rounds, values, STYLES[number], color=COLOURS[number], marker="o", markersize=3, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("standard deviations of q")
    axes.legend(frameon=False, fontsize=9)
    axes.set_title(f"{fit.result['algorithm']} over {len(fit.simulation.names)} silos", loc="left", fontsize=10)
    return figure


def tail(values: np.ndarray) -> tuple[float, float] | None:
    """Limits of an axis that shows these values; None where they are all one."""
    width = np.ptp(values) if len(values) else 0.0
    return (values.min() - 0.05 * width, values.max() + 0.1 * width) if width > 0 else None


def marginals(methods: dict[str, dict[str, Any]], columns: int = 3) -> Figure:
    """The marginal density of each number, one panel each, a line for each method's draws."""
    names = list(dict.fromkeys(name for draws in methods.values() for name in draws))
    columns = min(columns, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.9 * columns, 2.1 * lines + 0.2 * len(methods)), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(lines, columns, place + 1)
        for number, (method, draws) in enumerate(methods.items()):
            if name in draws:
                grid, density = smooth(np.asarray(draws[name], float))
                style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number % len(STYLES)]}
                axes.plot(grid, density, linewidth=1.6, label=method, **style)
                if number == 0:  # what the others are held against
                    axes.fill_between(grid, density, color=style["color"], alpha=0.15, linewidth=0)
        axes.set_title(name, fontsize=10)
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    if len(methods) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False, fontsize=9)
    return figure


def smooth(draws: np.ndarray, points: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A kernel density estimate, with Silverman's width.

    >>> grid, density = smooth(np.random.default_rng(0).normal(size=4000))
    >>> bool(abs(np.trapezoid(density, grid) - 1) < 0.01)
    True
    """
    low, high = np.quantile(draws, [0.0005, 0.9995])
    spread = min(draws.std(), np.subtract(*np.quantile(draws, [0.75, 0.25])) / 1.34) or draws.std() or 1.0
    width = 0.9 * spread * len(draws) ** -0.2
    grid = np.linspace(low - 3 * width, high + 3 * width, points)
    edges = np.concatenate([grid - (grid[1] - grid[0]) / 2, grid[-1:] + (grid[1] - grid[0]) / 2])
    counts = np.histogram(draws, edges)[0] / len(draws)
    offsets = (np.arange(points)[:, None] - np.arange(points)) * (grid[1] - grid[0]) / width
    return grid, (np.exp(-0.5 * offsets**2) / (width * np.sqrt(2 * np.pi))) @ counts
