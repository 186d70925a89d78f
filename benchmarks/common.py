"""What the scripts that make tables share: algorithms from TOML tables, cells with their spread, pages with marked sections."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fedbayes as fb
from fedbayes.algorithms import find
from fedbayes.files import write
from fedbayes.models import Model, cnn, mlp, mobilenet
from fedbayes.models.likelihoods import Categorical


def command(run: Callable[[], int]) -> None:
    """Run a script; errors that a user can mend in one sentence, and Ctrl-C without a traceback."""
    try:
        raise SystemExit(run())
    except fb.UserError as problem:
        raise SystemExit(f"error: {problem}") from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None


MISSING = "—"
"""A figure that was not run."""


def spread(values: list[float], digits: int = 2) -> str:
    """Mean ± standard deviation over seeds; a single seed has none."""
    if not values:
        return MISSING
    text = f"{statistics.mean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def found(out: Path, pattern: str) -> list[dict[str, Any]]:
    """The figures that runs below a folder left, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(out.glob(pattern))]


def check(page: Path, section: str) -> None:
    """Refuse a section for which a page has no marks.

    >>> check(Path(__file__).parent.parent / "docs" / "results" / "fedvi.md", "fedvi_femnist")
    >>> check(Path(__file__).parent.parent / "docs" / "results" / "fedvi.md", "nowhere")
    Traceback (most recent call last):
    fedbayes.errors.UserError: fedvi.md has no place for nowhere; add the lines <!-- nowhere --> and <!-- end nowhere --> to it
    """
    whole, marks = page.read_text(), (f"<!-- {section} -->", f"<!-- end {section} -->")
    if not all(mark in whole for mark in marks):
        raise fb.UserError(f"{page.name} has no place for {section}; add the lines {' and '.join(marks)} to it")


def put(page: Path, section: str, text: str) -> None:
    """Replace a section of a page, between its marks. Cells of a table that were not run here stay what they are."""
    check(page, section)
    whole = page.read_text()
    start, end = whole.index(f"<!-- {section} -->"), whole.index(f"<!-- end {section} -->")
    write(page, f"{whole[:start]}<!-- {section} -->\n{kept(whole[start:end], text)}\n{whole[end:]}".encode())


def kept(old: str, new: str) -> str:
    """`new`, with what `old` has in the same row and column where `new` has —.

    Rows without any figure are left out, and published figures below them.

    >>> top = "| | A | B |\\n|---|---|---|"
    >>> print(kept(f"{top}\\n| x | 1 | 2 |", f"{top}\\n| x | — | 3 |\\n| y | — | — |"))
    | | A | B |
    |---|---|---|
    | x | 1 | 3 |
    """
    known = {place: cell for line in _cells(old) for place, cell in line}
    lines: list[str] = []
    dropped = False
    for line, cells in zip(new.splitlines(), _cells(new), strict=True):
        found = [known.get(place, cell) if cell == MISSING else cell for place, cell in cells]
        dropped = set(found) == {MISSING} or (dropped and "published" in _split(line))
        if dropped:
            continue
        if MISSING in (cell for _, cell in cells):
            line = f"| {' | '.join([*_split(line)[: -len(found)], *found])} |"
        lines.append(line)
    return "\n".join(lines)


def _split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _cells(text: str) -> Iterator[list[tuple[tuple[str, ...], str]]]:
    """For each line the figures of a table, each with the labels of its row and the title of its column."""
    titles: list[str] = []
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        cells = _split(line)
        if after.startswith("|---"):
            titles = cells
        if not line.startswith("|") or "|---" in (line[:4], after[:4]):
            yield []
        else:
            labels = max(1, titles.count(""))
            yield [
                ((*cells[:labels], title, str(place)), cell)
                for place, (title, cell) in enumerate(zip(titles[labels:], cells[labels:], strict=False))
            ]


def network(of: dict[str, Any], data: fb.data.Clients) -> Model:
    """The network of a table [network]: its kind and options."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in of.items() if name != "kind"}
    known = {"shift": data.shift, "scale": data.scale, **options}
    return {"cnn": cnn, "mlp": mlp, "mobilenet": mobilenet}[of["kind"]](
        data.shape, Categorical(len(data.classes or ())), **known
    )


def algorithm(name: str, options: dict[str, Any], model: Model) -> Any:
    """A registered algorithm by its paper's protocol, its fields from a table; fields that are a `Training` are tables too."""
    kind = find(name)
    usual = {**{field.name: field.default for field in dataclasses.fields(kind)}, **kind.published}
    values: dict[str, Any] = {}
    for field, value in options.items():
        if isinstance(usual.get(field), fb.Training):
            value = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
            values[field] = dataclasses.replace(usual[field], **value)
        else:
            values[field] = tuple(value) if isinstance(value, list) else value
    return kind.paper(model, **values)


def figures(found: dict[str, Any]) -> dict[str, float]:
    """The figures of one mode and group that tables show: percent, over clients and over rows."""
    return {
        "accuracy": 100 * found["accuracy"]["clients"],
        "accuracy_rows": 100 * found["accuracy"]["rows"],
        "ece": 100 * found["ece"]["rows"],
        "log_score": found["log_score"]["rows"],
        "worst_tenth": 100 * found["accuracy"]["worst_tenth"],
    }
