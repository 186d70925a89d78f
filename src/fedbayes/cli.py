"""The command line: finds the command, and turns an error that a user is meant to read into one sentence and exit code 2.

JAX takes a second to import, so nothing here does; a command's own module is imported when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from fedbayes import __version__
from fedbayes.errors import UserError

COMMANDS = {
    "quickstart": ("fedbayes.commands.quickstart", "compare four methods on the embedded digits (under a minute)"),
    "run": ("fedbayes.commands.run", "train one algorithm: fedbayes run ALGORITHM --data … --rounds … --out DIR"),
    "compare": ("fedbayes.commands.compare", "train several algorithms over several seeds: one table with mean ± spread"),
    "list": ("fedbayes.commands.listing", "the algorithms, networks and data sets that have names"),
    "wire": ("fedbayes.commands.wire", "what an algorithm sends: shapes, reductions, and what each upload depends on"),
    "data": ("fedbayes.commands.data", "describe a data set: fedbayes data describe DATA"),
}


def overview() -> str:
    """The text of `fedbayes --help`."""
    lines = ["usage: fedbayes COMMAND …", "", "Bayesian federated learning on JAX.", "", "commands:"]
    lines += [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([*lines, "", "fedbayes COMMAND --help says more; fedbayes --version prints the version."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for what a user can mend, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(overview())
        return 0
    if given[0] == "--version":
        print(__version__)
        return 0
    try:
        if given[0] not in COMMANDS:
            near = difflib.get_close_matches(given[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}" if near else f"choose one of {', '.join(COMMANDS)}"
            raise UserError(f"there is no command {given[0]!r}; {hint}")
        importlib.import_module(COMMANDS[given[0]][0]).main(given[1:])
    except UserError as problem:
        print(f"fedbayes: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nfedbayes: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
