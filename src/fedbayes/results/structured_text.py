"""The figures of a fit over silos as text."""

from __future__ import annotations

from typing import Any

KEYS = ("mean", "sd", "5%", "95%")
HEADINGS = ("mean", "sd", "5 %", "95 %")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """A line for each number: its name and its figures; a parameter has a value alone."""
    posterior = [[name, *(f"{found[key]:.3f}" for key in KEYS)] for name, found in result["posterior"].items()]
    return posterior + [[name, f"{value:.3f}", "—", "—", "—"] for name, value in result["theta"].items()]


def table(result: dict[str, Any]) -> str:
    """The figures of a fit as text."""
    lines = [f"{'':24}" + "".join(f"{heading:>10}" for heading in HEADINGS)]
    for name, figures in result["posterior"].items():
        lines.append(f"{name:24}" + "".join(f"{figures[key]:10.3f}" for key in KEYS))
    for name, value in result["theta"].items():
        lines.append(f"{name:24}{value:10.3f}    (a parameter: no posterior)")
    return "\n".join([*lines, verdict(result)])


def verdict(result: dict[str, Any]) -> str:
    """The bound, and how far the posterior can be relied on, in a sentence."""
    bound, khat, ess = f"bound {result['bound']:.2f}", result["khat"], result["ess"]
    if khat is None:
        return f"{bound}; not checked: {result['unchecked']}" if result.get("unchecked") else bound
    if ess > 0.8:
        words = "q is close to the posterior" + (", but for its far tails" if khat > 0.7 else "")
    else:
        words = (
            "q misses part of the posterior" if khat <= 0.7 else "q is not the posterior: fit longer, or with a richer family"
        )
    return f"{bound}; importance weights: k̂ {khat:.2f}, effective share {100 * ess:.0f} %: {words}"
