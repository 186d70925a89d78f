"""Write README's first screen: run the quickstart, put what it prints into README and its picture into docs/images.

`make readme` runs it, after a change of defaults; it takes as long as the quickstart. A slow test holds README against a run.
"""

import contextlib
import io
import os
from pathlib import Path

from PIL import Image

from fedbayes.cli import quickstart

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- quickstart: make readme -->\n", "<!-- end of quickstart -->\n"
PICTURE = ROOT / "docs" / "images" / "quickstart.png"


def output() -> str:
    """The output of the quickstart in a terminal of 100 columns."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        quickstart.main([])
    return printed.getvalue()


def block(printed: str) -> str:
    """The same as a block of README; the last line, which has the seconds, is left out."""
    lines = [line.rstrip() for line in printed.rstrip().splitlines()][:-1]
    text = "\n".join(line for place, line in enumerate(lines) if line or lines[place - 1])  # no two empty lines
    return f"```text\n{text.strip()}\n```\n"


def readme(printed: str) -> str:
    """README with that block."""
    text = (ROOT / "README.md").read_text("utf-8")
    return text[: text.index(START)] + START + "\n" + block(printed) + "\n" + text[text.index(END) :]


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(output()), "utf-8")
    # Few colours are enough for lines and text, and take a quarter of the bytes.
    Image.open(quickstart.OUT / "newcomers.png").convert("RGB").quantize(64).save(PICTURE, optimize=True)
