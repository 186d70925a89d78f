"""`fedbayes advise`: candidate methods for data, from measurements on data like it, and the command that compares them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fedbayes.algorithms.default import MOST
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import show
from fedbayes.errors import UserError
from fedbayes.study.options import DataOptions, arguments

USAGE = """usage: fedbayes advise DATA [options]
       fedbayes advise MODEL.py

Name two or three methods to compare on DATA, by what was measured on data like it, and the command that compares them.
For a NumPyro model over silos (as for fedbayes fit), say which method fits it, and why.

fedbayes advise --data DATA --help lists the options."""
HELD_OUT = 0.2  # the share of clients that the comparison keeps as newcomers, where the data names none


@dataclasses.dataclass(frozen=True)
class Options:
    """Name two or three methods to compare on a data set, by what was measured on data like it, and the command to do so."""

    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows."""
    newcomer_rows: int | None = None
    """Rows that a new client has; by default those of the median client."""
    unlabelled: bool = False
    """New clients have rows, but no labels."""


def main(given: Sequence[str]) -> None:
    """Print the advice."""
    if not given or list(given) in (["-h"], ["--help"]):
        print(USAGE)
        return
    if given[0].endswith(".py"):
        show(of_model(Path(given[0]), given[1:]))
        return
    rest = list(given) if given[0].startswith("-") else ["--data", *given]
    options: Options = parse(Options, rest, "fedbayes advise", Options.__doc__ or "")
    show(text(options.data, options.newcomer_rows, options.unlabelled))


def text(options: DataOptions, newcomer_rows: int | None = None, unlabelled: bool = False) -> str:
    """Advice for a data set: what it is, the measured sets like it, candidates with reasons, and the command."""
    from fedbayes.data.profile import profile
    from fedbayes.study.advise import CLOSE, advise, read

    clients = options.load()
    of = profile(clients)
    rows, nearest, candidates, remarks = advise(of, read(), newcomer_rows, unlabelled)
    lines = [
        f"{clients.name}: {of.text()}",
        f"newcomers {'without' if unlabelled else 'with'} labels, measured with {rows} rows",
        "",
        f"nearest measured sets (distance; up to {CLOSE:g} is close):",
        *(
            f"  {apart:.2f}  {one.title}: {one.profile.text()}; log score of FedAvg {one.shared:.3f}"
            + (f", fine-tuned {one.tuned[rows]:.3f}" if rows in one.tuned and not unlabelled else "")
            for apart, one in nearest
        ),
        *([] if nearest else ["  none"]),
        "",
        "candidates:",
        *(f"  {one.method:<14} {one.reason}" for one in candidates),
        *(f"note: {remark}" for remark in remarks),
    ]
    if not clients.unseen.any() and of.clients > 2:
        options = dataclasses.replace(options, hold_out=max(1, round(HELD_OUT * of.clients)))
    elif not clients.unseen.any():
        lines.append("note: none of 2 clients can be held out, so the comparison is about these two, not about newcomers")
    command = [
        "fedbayes",
        "compare",
        *(one.method for one in candidates),
        *arguments(options, dataclasses.replace(DataOptions(), data="")),
    ]
    return "\n".join([*lines, "", "compare them on this data:", f"  {shlex.join(command)}"])


def of_model(path: Path, given: Sequence[str]) -> str:
    """Advice for a model file: the method that suits the model, one besides, and the commands."""
    from fedbayes.cli.fit import model_file
    from fedbayes.results.simulate import suited

    if given:
        raise UserError(f"advise takes no options for a model file, but {given[0]!r} was given")
    file, _ = model_file(path, [])
    model, n = file.algorithm.structured, file.algorithm.structured.size()
    _, why = suited(model.population, model.silo, file.silos)
    if why:
        reasons = {"sfvi": f"the default for this model; {why}", "sfvi-avg": "local steps, so fewer rounds than sfvi"}
    else:
        ep = f"the default: NUTS in each silo, for at most {MOST} global latents and no parameters θ"
        reasons = {"ep": ep, "pvi": "variational, so no chains: faster, and its standard deviations may be too small"}
    if file.name not in reasons:
        reasons[file.name] = "the file names it"
    fit = f"fedbayes fit {shlex.quote(str(path))} --algorithm"
    lines = [
        f"{path.name}: {n} global latents, {len(file.silos)} silos",
        "",
        "candidates:",
        *(f"  {name:<14} {reason}" for name, reason in reasons.items()),
        "note: docs/structured-models.md has the table of methods, docs/results/panel.md what was measured",
        "",
        "fit the model; the verdict says how far to rely on it, and another method is a second opinion:",
        *(f"  {fit} {name}" for name in reasons),
    ]
    return "\n".join(lines)
