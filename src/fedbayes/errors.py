"""The one error that a user is meant to read."""

import difflib
import re
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """What was given, what was expected, what to do: one sentence, printed without a traceback.

    The command line ends with exit code 2 on it. A bug in fedbayes raises anything else.
    """


def printable(text: str) -> str:
    r"""Text without control characters, which a terminal would obey; lines stay lines.

    >>> printable("red \x1b[31m\x07 alert\nnext")
    'red [31m alert\nnext'
    """
    return re.sub("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", "", text)


def nearest(word: str, choices: Iterable[Any]) -> str:
    """A hint for a word that is not among the choices: the nearest, and all of them if they are few.

    >>> nearest("MLPP", ["linear", "mlp"])
    'did you mean mlp? there is linear, mlp'
    """
    words = [str(choice) for choice in choices]
    folded = {choice.casefold(): choice for choice in words}
    near = difflib.get_close_matches(word.casefold(), folded, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(folded[choice] for choice in near)}? " if near else ""
    return f"{hint}there is {', '.join(words[:20])}{' …' if len(words) > 20 else ''}"
