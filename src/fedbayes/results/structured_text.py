"""The figures of a fit over silos as text, and its verdict in words."""

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
    """How far the posterior can be relied on, why, what to do next, and the bound."""
    found = result.get("verdict")
    words = (_words(found) if isinstance(found, dict) else _before(result)).rstrip()
    bound = "" if result.get("bound") is None else f"bound {result['bound']:.2f}"
    return "; ".join(part for part in (words, bound) if part)


def is_warning(result: dict[str, Any]) -> bool:
    """Whether the verdict is anything but good."""
    found = result.get("verdict")
    return not isinstance(found, dict) or found.get("verdict") != "good"


def _words(found: dict[str, Any]) -> str:
    checks, kind = found.get("checks", {}), found["verdict"]
    head = f"verdict: {kind}" + (", corrected" if checks.get("corrected") else "")
    parts = [head]
    if reasons := found.get("reasons"):
        parts.append(f" ({'; '.join(reasons)})")
    parts.append(f". Next: {found['next']}. ")
    khat, ess = checks.get("khat"), checks.get("ess")
    weights = []
    if khat is not None and ess is not None:
        error = checks.get("khat_error")
        weights.append(
            f"q: k̂ {khat:.2f}" + ("" if error is None else f" ± {error:.2f}") + f", effective share {100 * ess:.0f} %"
        )
    if checks.get("corrected"):
        used = checks["reference"]
        rounds = f"{used['rounds']} evidence round{'s' * (used['rounds'] > 1)}, {used['bytes'] / 1000:.0f} kB a silo"
        weights.append(f"corrected draws: {used['ess']:.0f} effective, {rounds}")
    return "".join(parts) + "; ".join(weights)


def _before(result: dict[str, Any]) -> str:
    """Of a result that an earlier version wrote."""
    khat, ess = result.get("khat"), result.get("ess")
    words = "verdict: not checked (an earlier version made this run). Next: fit again"
    return words if khat is None or ess is None else f"{words}. q: k̂ {khat:.2f}, effective share {100 * ess:.0f} %"
