"""What a page is made of, and how it becomes one HTML file that needs nothing else.

Text is escaped by the template: names of clients and classes come from users' files. Pictures are SVG in the page itself, whose
colours are the page's, so that they follow a light or dark screen and paper.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedbayes.results.pictures import COLOURS


class Prose(NamedTuple):
    """A paragraph; a warning stands out."""

    text: str
    warning: bool = False
    kind: str = "prose"


class Command(NamedTuple):
    """A line for a shell, to be copied."""

    text: str
    kind: str = "command"


class Table(NamedTuple):
    """A table; its first columns, `words`, are text, the others numbers. With `summary` it is closed until it is asked for."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    words: int = 1
    summary: str = ""
    kind: str = "table"


class Picture(NamedTuple):
    """An SVG with what a reader who does not see it is told."""

    svg: Markup
    caption: str
    wide: bool


class Pictures(NamedTuple):
    """Pictures side by side, or one below the other on a narrow screen."""

    pictures: Sequence[Picture]
    kind: str = "pictures"


class Section(NamedTuple):
    """A part of the page with a heading."""

    title: str
    blocks: Sequence[Prose | Command | Table | Pictures]


INK = "#010203"
"""Stands for the colour of text until a figure becomes part of a page."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedbayes",
    "figure.dpi": 150,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
INKS = {
    INK: "currentColor",
    "#000000": "currentColor",
    "#ffffff": "var(--page)",
    **{colour: f"var(--line{number})" for number, colour in enumerate(COLOURS)},
}


def draw(make: Callable[..., Figure], *given: Any, caption: str, wide: bool = False, **options: Any) -> Picture:
    """The figure that a function makes, as a part of a page.

    >>> def figure():
    ...     return Figure(figsize=(3, 2))
    >>> draw(figure, caption="nothing").svg[:4]
    Markup('<svg')
    """
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        # Not savefig, which draws everything a first time for nothing.
        FigureCanvasSVG(make(*given, **options)).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    width = float(re.search(r'width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
    svg = re.sub(r"<[^>]+>", _tag, svg)
    svg = re.sub(r">\s+<", "><", svg).strip()
    label = Markup('<svg class="plot" role="img" aria-label="{}" style="--width: {}px"').format(caption, round(width * 4 / 3))
    return Picture(label + Markup(svg[len("<svg") :]), caption, wide)


def _tag(match: re.Match[str]) -> str:
    """A tag of an SVG with the page's colours and font, and no digits that nobody sees."""
    tag = re.sub(r"#[0-9a-f]{6}\b", lambda colour: INKS.get(colour[0], colour[0]), match[0])
    tag = re.sub(r"(\.\d\d)\d+", r"\1", tag.replace("\n", " "))
    tag = re.sub(r"; font-family: [^;\"]*|font-family: [^;\"]*; ?", "", tag)
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height|version|xmlns)="[^"]*"', "", tag)
    return tag


def page(title: str, subtitle: str, sections: Sequence[Section], version: str) -> str:
    """The page as HTML."""
    loader, strict = jinja2.PackageLoader("fedbayes", "report"), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, undefined=strict, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("page.html").render(title=title, subtitle=subtitle, sections=sections, version=version)
    return _own_names(text)


def _own_names(text: str) -> str:
    """Give what each picture names a name of its own: in one page two pictures may not share them."""
    pieces = text.split('<svg class="plot"')
    for number, piece in enumerate(pieces[1:], 1):
        svg, end, rest = piece.partition("</svg>")
        svg = re.sub(r"^[^>]*>|<[^>]+>", functools.partial(_named, f"f{number}-"), svg)
        pieces[number] = svg + end + rest
    return '<svg class="plot"'.join(pieces)


def _named(prefix: str, match: re.Match[str]) -> str:
    tag = re.sub(r' id="(?![mph][0-9a-f]{10}")[^"]*"', "", match[0])  # only what is referred to needs a name
    return re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', prefix, tag)
