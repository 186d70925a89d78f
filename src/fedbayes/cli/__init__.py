"""The command line: finds the command, and turns an error that a user is meant to read into one sentence and exit code 2.

JAX takes a second to import, so nothing here does; a command's own module is imported when it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from fedbayes import __version__
from fedbayes.engine.compile_cache import keep_compiled
from fedbayes.errors import UserError, nearest, printable

COMMANDS = {
    "quickstart": "what the library is for, in two minutes: newcomers with few rows, a model over silos, the page of both",
    "advise": "which methods to compare on your data, from measurements: fedbayes advise DATA",
    "run": "train one algorithm: fedbayes run ALGORITHM --data … --rounds … --out DIR",
    "compare": "train several algorithms over several seeds: one table with mean ± spread",
    "fit": "fit a NumPyro model over silos: fedbayes fit FILE --algorithm … --out DIR",
    "report": "one HTML page about a run, or a comparison of several: fedbayes report RUN …",
    "check": "which uncertainty of a run is alive: averaging, scales, the person: fedbayes check RUN",
    "certify": "bound the error of clients that did not train: fedbayes certify RUN",
    "personalise": "take a personal model away from a run: fedbayes personalise RUN --out FILE",
    "predict": "predict rows with a personal model: fedbayes predict FILE --data new.csv",
    "deploy": "the same algorithms as real processes on Flower: fedbayes deploy local --sites 3",
    "list": "the algorithms, networks and data sets that have names",
    "wire": "what an algorithm sends: shapes, reductions, and what each upload depends on",
    "data": "describe a data set: fedbayes data describe DATA",
}  # each is a module of this room; that of `list` is called listing, as there is a type of that name


def overview() -> str:
    """The text of `fedbayes --help`."""
    lines = ["usage: fedbayes COMMAND …", "", "Bayesian federated learning on JAX.", "", "commands:"]
    lines += [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
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
            raise UserError(f"there is no command {given[0]!r}; {nearest(given[0], COMMANDS)}")
        keep_compiled()
        importlib.import_module(f"fedbayes.cli.{'listing' if given[0] == 'list' else given[0]}").main(given[1:])
    except UserError as problem:
        print(f"fedbayes: {printable(str(problem))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\nfedbayes: stopped{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
