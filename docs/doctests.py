"""For the reference pages: examples in docstrings become blocks of code, so that brackets in them are not taken for links."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """`text` with a fence around every paragraph that starts with a prompt."""
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class Doctests(griffe.Extension):
    """Fences the examples of every object that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by Griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
