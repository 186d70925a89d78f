"""`fedbayes deploy`: a Flower project, a federation on this machine, a site's own predictions."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import Positional

from fedbayes import files
from fedbayes.cli.arguments import parse, python_file
from fedbayes.cli.display import progress_bar, result_table, show
from fedbayes.errors import UserError

USAGE = """usage: fedbayes deploy COMMAND …

commands:
  new           write a small Flower project: fedbayes deploy new my-federation --algorithm fedhb-niw
  local         run a project on this machine, as separate processes with TLS and keys: fedbayes deploy local --sites 3
  certificates  an authority, the server's certificate, and a key for each site
  personalise   predict at a site with its own model, from what it keeps

fedbayes deploy COMMAND --help lists the options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class New:
    """Options of `fedbayes deploy new`."""

    folder: Positional[Path]
    """Of the project; it must not be there yet."""
    algorithm: str = "fedhb-niw"
    """Which algorithm (fedbayes list)."""
    sites: int = 3
    """How many sites there are."""
    rounds: int = 5
    """How many rounds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Options of `fedbayes deploy local`."""

    project: Path | None = None
    """The project's folder; without one, a new one is made from the embedded digits."""
    out: Path = Path("federation-run")
    """Where the run, the sites' states, certificates and logs go."""
    algorithm: str = "fedhb-niw"
    """Of a new project."""
    sites: int = 3
    """Of a new project."""
    rounds: int = 3
    """Of a new project."""
    patience: float = 900.0
    """Seconds after which it is given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificates:
    """Options of `fedbayes deploy certificates`."""

    folder: Positional[Path]
    """Where they go."""
    host: tuple[str, ...] = ("localhost", "127.0.0.1")
    """Names and addresses by which sites reach the server."""
    sites: int = 0
    """How many key pairs to make."""
    days: int = 365
    """How long the certificates are good for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personalise:
    """Options of `fedbayes deploy personalise`."""

    project: Path
    """The project's folder."""
    number: int
    """The site's number."""
    state: Path
    """Where the site keeps its state."""
    data: str | None = None
    """The site's rows, as in its node config."""
    rows: Path | None = None
    """An .npz file with x, rows to predict; by default the site's test rows."""
    adapted: bool = False
    """Fit the model to the site's training rows first."""
    out: Path | None = None
    """CSV file for the predictions; or me.safetensors, for the model itself, which fedbayes predict reads."""


def main(arguments: Sequence[str]) -> None:
    """Dispatch."""
    commands = {"new": new, "local": local, "certificates": certificates, "personalise": personalise}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] not in commands:
        raise UserError(f"deploy has no command {arguments[0]!r}; it has {', '.join(commands)}")
    commands[arguments[0]](arguments[1:])


def new(arguments: Sequence[str]) -> None:
    """Write a project."""
    from fedbayes.deploy.template import write_project

    options: New = parse(New, arguments, "fedbayes deploy new", "Write a small Flower project that runs as it is.")
    for path in write_project(options.folder, options.algorithm, options.sites, options.rounds):
        print(path)
    print(f"try it: fedbayes deploy local --project {options.folder}")


def certificates(arguments: Sequence[str]) -> None:
    """Write certificates and keys."""
    from fedbayes.deploy.tls import make_certificates, make_key

    does = "Make an authority, the server's certificate and key, and a key pair for each site."
    options: Certificates = parse(Certificates, arguments, "fedbayes deploy certificates", does)
    if (options.folder / "ca.crt").exists():
        raise UserError(f"{options.folder} has certificates already; choose another folder, or remove them")
    make_certificates(options.folder, options.host, options.days)
    for number in range(options.sites):
        make_key(options.folder / f"site{number}")
    print(f"certificates: {options.folder}; server.key and the keys without .pub are secret")


def local(arguments: Sequence[str]) -> None:
    """Run a project as processes on loopback, with a bar, the table, and one site's predictions."""
    from fedbayes.deploy.processes import federation
    from fedbayes.deploy.template import write_project

    does = "Start a SuperLink, the sites and a run on this machine, on loopback, with TLS and keys, and stop them at the end."
    options: Local = parse(Local, arguments, "fedbayes deploy local", does)
    if options.out.exists() and any(options.out.iterdir()):
        raise UserError(f"{options.out} is there and not empty; choose another folder with --out, or remove it")
    project = options.project or options.out / "project"
    if options.project is None:
        write_project(project, options.algorithm, options.sites, options.rounds)
    experiment = experiment_of(project)
    out = options.out.resolve()
    states = [{"number": number, "state": str(out / "sites")} for number in range(experiment.sites)]
    show(f"starting {experiment.sites} sites on this machine; logs are in {out / 'logs'}")
    began = time.monotonic()
    with federation(project, out, states) as started, progress_bar() as add:
        run = started.run({"out": str(out / "server")})
        moved = add("rounds", experiment.rounds)
        while run.poll() is None:
            metrics = out / "server" / "metrics.jsonl"
            moved(metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
            dead = [name for name, process in started.processes.items() if name != "run" and process.poll() is not None]
            if dead or time.monotonic() - began > options.patience:
                why = f"{', '.join(dead)} ended" if dead else f"{options.patience:.0f} s are over"
                raise UserError(f"{why} before the run was through; see {out / 'logs'}")
            time.sleep(0.5)
    result = out / "server" / "result.json"
    if not result.exists():
        raise UserError(f"the run ended without a result; see {out / 'logs' / 'run.log'}")
    if experiment.networked:
        found = files.read_json(result, algorithm=str, rounds=int, metrics=dict)
        show(result_table({found["algorithm"]: [found]}, f"{experiment.sites} sites, {found['rounds']} rounds"))
        where = ["--state", str(out / "sites"), "--out", str(out / "site0.csv")]
        personalise(["--project", str(project), "--number", "0", *where])
    show(f"run: {out / 'server'}; {time.monotonic() - began:.0f} s")


def personalise(arguments: Sequence[str]) -> None:
    """Predictions of a site's own model."""
    does = "Predict at a site with its own model: from the last broadcast and what the site keeps. Nothing is sent."
    options: Personalise = parse(Personalise, arguments, "fedbayes deploy personalise", does)
    from fedbayes.cli.predict import line, lines_of, output
    from fedbayes.deploy.site import Site

    experiment = experiment_of(options.project)
    if not experiment.networked:
        raise UserError("personalise predicts rows of a network, but this experiment fits a structured model")
    given: dict[str, Any] = {"number": options.number, "state": str(options.state)}
    given |= {} if options.data is None else {"data": options.data}
    site = Site(experiment, options.number, options.state, experiment.load(given))
    posterior = site.posterior(adapted=options.adapted)
    if options.out is not None and options.out.suffix == ".safetensors":
        posterior.save(options.out)
        show(f"personal model: {options.out}")
        return
    x, y = _rows(options.rows, site)
    table = posterior.table(x).to_numpy()
    if y is not None and not posterior.numeric:
        show(f"site {options.number}: {100 * np.mean(table[:, :-2].argmax(axis=1) == y):.1f} % of {len(y)} test rows are right")
    if options.out is not None:
        with output(options.out) as file:
            file.write(line(posterior.columns) + lines_of(table))
        show(f"predictions: {options.out}")


def _rows(path: Path | None, site: Any) -> tuple[Any, Any]:
    if path is None:
        if site.data.test is None:
            raise UserError("the site has no test rows; give rows to predict with --rows FILE.npz")
        return site.data.test.x, site.data.test.y
    from fedbayes.data.files import read_arrays
    from fedbayes.results.posterior import checked_rows

    return checked_rows(read_arrays(path, ["x"])["x"], site.data.train.x.shape[1:]).astype(site.data.train.x.dtype), None


def experiment_of(project: Path) -> Any:
    """The experiment that a project's federation/experiment.py defines."""
    path = project / "federation" / "experiment.py"
    if str(project.resolve()) not in sys.path:  # for what it imports beside it
        sys.path.append(str(project.resolve()))
    return python_file(path, ["experiment"], "the folder that fedbayes deploy new wrote").experiment
