"""Tables and progress bars on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from fedbayes.errors import printable
from fedbayes.evaluation.tables import figures
from fedbayes.sheets import rich


class _Plain(Console):
    """A terminal that takes names as they are: no markup, and no control characters."""

    def render(self, *what: Any, **options: Any) -> Iterator[Segment]:
        """Segments of text, cleaned."""
        for one in super().render(*what, **options):
            yield one if one.control else one._replace(text=printable(one.text))


def show(*things: Any) -> None:
    """Print tables and text, as wide as the terminal is now."""
    plain = _Plain(markup=False, emoji=False, highlight=False)
    plain.print(*things, soft_wrap=all(isinstance(thing, str) for thing in things))


@contextlib.contextmanager
def progress_bar(total: int | None = None) -> Iterator[Callable[[str, int | None], Callable[..., None]]]:
    """A bar with the time that is left; `add(label, end)` gives a callback that moves it to a number, or a simulation's round.

    With a `total` of rounds, of several runs, there is a bar for all of them too, and those that are through are not shown.
    """
    label = TextColumn("{task.description}", markup=False)
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        everything = None if total is None else progress.add_task("all rounds", total=total)

        def add(label: str, end: int | None) -> Callable[..., None]:
            task, before = progress.add_task(label, total=end), 0

            def callback(at: Any, done: Any = None) -> None:
                nonlocal before
                at = at if isinstance(at, int) else at.round
                progress.update(task, completed=at, visible=everything is None or end is None or at < end)
                if everything is not None:
                    progress.advance(everything, at - before)
                before = at

            return callback

        yield add


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, **options: Any) -> Table:
    """A table whose first columns, `words`, are text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left", **options)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def result_table(results: Mapping[str, Sequence[dict[str, Any]]], title: str) -> Table:
    """One line for each method, mode and group of clients: figures pooled over rows, mean ± spread over the seeds."""
    return rich(figures(results, title))
