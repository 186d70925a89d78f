"""A small Flower project for an experiment: what `fedbayes deploy new` writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedbayes import files
from fedbayes.algorithms import REGISTRY, find
from fedbayes.errors import UserError

PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A federation on fedbayes and Flower"
license = "Apache-2.0"
dependencies = ["fedbayes[flower]"]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "federation.app:server"
clientapp = "federation.app:client"

[tool.flwr.app.config]
out = ""     # folder of the run at the server; flwr run … -c 'out="/somewhere"'
state = ""   # in Flower's simulation alone: folder of all sites' states; real sites have their own in --node-config

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["federation"]
"""

APP = '''\
"""The two sides of the federation; everything that can be changed is in experiment.py."""

from fedbayes.deploy.flower import client_app, server_app
from federation.experiment import experiment

server = server_app(experiment)
client = client_app(experiment)
'''

NETWORK = '''\
{imports}import fedbayes as fb
from fedbayes.deploy.experiment import Experiment, SiteData, example_rows, site_rows

SITES, ROUNDS = {sites}, {rounds}
SHAPE, CLASSES = (64,), 10  # of one row, and how many labels there are
ROWS = 1347  # training rows of all sites together, about; some methods weigh their prior by it

model = fb.models.mlp(SHAPE, fb.models.Categorical(CLASSES), hidden=(64,), scale=16.0)  # pixels from 0 to 16
algorithm = fb.{cls}(model)
{train}algorithm = algorithm.planned(ROUNDS, clients=SITES, rows=ROWS)
example = example_rows(SHAPE, "float32")  # the kind of a row's numbers, as the file has them


def load(settings) -> SiteData:
    """A site's own rows, from its own settings: a file with x and y, or, to try it out, a share of the embedded digits."""
    if "data" in settings:
        return site_rows(fb.data.load(settings["data"], partition="iid", clients=1, standardise=False))
    return site_rows(fb.data.load("digits", partition="iid", clients=SITES), str(settings["number"]))
'''

TRAIN = """\
algorithm = dataclasses.replace(algorithm, train=dataclasses.replace(algorithm.train, epochs=10))  # messages are slow
"""

STRUCTURED = '''\
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedbayes as fb
from fedbayes.deploy.experiment import Experiment, SiteData

SITES, ROUNDS = {sites}, {rounds}
ROWS = 20 * SITES  # observations of all sites together, about; some methods weigh a site by its share


def population():
    """The latents that all sites share."""
    return numpyro.sample("mean", dist.Normal(0.0, 10.0)), numpyro.sample("spread", dist.HalfNormal(5.0))


def silo(shared, data):
    """The latents that stay at a site, and its observations."""
    with numpyro.plate("units", data["y"].shape[0]):
        effect = numpyro.sample("effect", dist.Normal(*shared))
        numpyro.sample("y", dist.Normal(effect, 0.3), obs=data["y"])


algorithm = fb.{cls}(population, silo).planned(ROUNDS, silos=SITES, rows=ROWS)
example = {{"y": np.zeros(20, np.float32)}}


def load(settings) -> SiteData:
    """A site's own data, from its own settings: a file with y, or, to try it out, made-up numbers."""
    if "data" in settings:
        with np.load(settings["data"]) as file:
            return SiteData({{"y": file["y"].astype(np.float32)}})
    y = np.random.default_rng(int(settings["number"])).normal(1.0, 1.0, 20)
    return SiteData({{"y": y.astype(np.float32)}})
'''

EXPERIMENT = '''\
"""What the server and every site agree on. Change it here, and bring the same file to all of them."""

{body}

experiment = Experiment(
    algorithm,
    example,
    load,
    rounds=ROUNDS,
    sites=SITES,
    minimum=max(1, SITES - 1),  # go on when one site is down
    patience=600.0,  # seconds that a round waits
)
'''

README = """\
# {name}

{cls} over {sites} sites, on fedbayes and Flower. `federation/experiment.py` is what the server and all sites have to agree on.

Try all of it on this machine, with TLS and keys, on loopback: `fedbayes deploy local --project .`

## Keys and certificates

`fedbayes deploy certificates certificates --host server.example.org --sites {sites}` writes

| file | goes to |
|---|---|
| `ca.crt` | the server and every site |
| `server.pem`, `server.key` | the server alone |
| `site0`, `site1`, … | that site alone |
| `site0.pub`, … | the server, which registers them |

## The server

Whoever reaches the server's port can start runs, whose code the sites run: let only the sites and the administrator reach it.

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
flower-superlink --host 0.0.0.0 --port 8443 --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key \\
  --enable-supernode-auth --database link.db --isolation process
flower-superexec --runtime-api-address 127.0.0.1:8443 --root-certificates ca.crt        # in another terminal
flwr supernode register site0.pub SERVER                                                # for each site
flwr run . SERVER --stream -c 'out="/var/fedbayes/run"'
```

`SERVER` is an entry of `config.toml` in Flower's home folder: `[superlink.SERVER]` with `address` and `root-certificates`. A
run that was broken off goes on with the same `flwr run` and the same `out`.

## A site

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
flower-supernode --superlink server.example.org:8443 --root-certificates ca.crt --auth-supernode-private-key site0 \\
  --host 127.0.0.1 --port 9094 --node-config 'number=0 state="/var/fedbayes" data="/srv/rows.npz"'
```

`number` is the site's own, from 0 on; `state` is where it keeps what never leaves it; `data` is its file.
"""

PREDICT = """
After a run this predicts with the site's own model, and asks nobody:

```sh
fedbayes deploy personalise --project . --number 0 --state /var/fedbayes --data /srv/rows.npz --rows new.npz --out out.csv
```
"""


def write_project(folder: Path, algorithm: str, sites: int, rounds: int) -> list[Path]:
    """The files of a project; a folder that is there is left alone."""
    cls = find(algorithm)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is there and not empty; choose another folder")
    if sites < 1 or rounds < 1:
        raise UserError(f"sites is {sites} and rounds {rounds}; both are at least 1")
    name = "".join(letter if letter.isalnum() else "-" for letter in folder.resolve().name.lower()).strip("-") or "federation"
    trains = any(field.name == "train" for field in dataclasses.fields(cls))
    values = {"name": name, "cls": cls.__name__, "sites": sites, "rounds": rounds}
    values |= {"imports": "import dataclasses\n\n", "train": TRAIN} if trains else {"imports": "", "train": ""}
    body, more = (NETWORK, PREDICT) if REGISTRY[algorithm].kind == "clients" else (STRUCTURED, "")
    texts = {
        "pyproject.toml": PYPROJECT.format(**values),
        "README.md": README.format(**values) + more,
        "federation/__init__.py": "",
        "federation/app.py": APP,
        "federation/experiment.py": EXPERIMENT.format(body=body.format(**values)),
    }
    for path, text in texts.items():
        files.write(files.make_folder((folder / path).parent) / Path(path).name, text.encode())
    return [folder / path for path in texts]
