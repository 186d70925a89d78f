"""Every algorithm's numbers are those in golden/numbers.json, so that a change of code alone can be told from one of results.

Of each array, three sums are kept. On a processor that rounds differently, or after a change on purpose, write them anew, in
one process: `FEDBAYES_WRITE_NUMBERS=tests/golden/numbers.json python -m pytest tests/test_same_numbers.py`.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from table import POPULATED, TABLE, method, methods

import fedbayes as fb

NUMBERS = Path(__file__).parent / "golden" / "numbers.json"
TOLERANCE = 1e-6
"""Of an array, relative to the sum of its absolute values; of a figure, relative to it or, below 1, absolute."""
MIXED, ALIKE = (4, 4, 5), (4, 4, 4)
WAYS = {
    "": (MIXED, {}),
    "-loop": (MIXED, {"loop": True}),
    "-cohort": (ALIKE, {"cohort": 2}),
    "-in-turn": (ALIKE, {"in_turn": True}),
    "-in-turn-mixed": (MIXED, {"in_turn": True}),
}


@methods("clients")
def test_over_clients(name, model, clients, request):
    over_clients(name, "vmap", model, clients, request)


@pytest.mark.parametrize("name", [method(name) for name in POPULATED])
def test_over_clients_without_a_population(name, model, clients, request):
    """As the papers have it: the numbers that these methods had before newcomers started from the population."""
    over_clients(name, "vmap", model, clients, request, population=False)


@pytest.mark.parametrize("name", [method(name, often=()) for name in ("fedavg", "fedper", "bpfed", "fedvi")])
def test_over_clients_one_by_one(name, model, clients, request):
    over_clients(name, "loop", model, clients, request)


@pytest.mark.parametrize("name", [method(name, often=()) for name in ("fedper", "bpfed")])
def test_over_clients_one_by_one_without_a_population(name, model, clients, request):
    over_clients(name, "loop", model, clients, request, population=False)


def over_clients(name, mode, model, clients, request, **settings):
    algorithm = dataclasses.replace(TABLE[name](model), **settings)
    fit = fb.simulate(algorithm, clients, rounds=3, cohort=3, seed=5, dropout=0.2, clients=mode)
    local = fit.simulation.local.get(np.arange(len(clients)))
    rounds = [entry for entry in fit.history if "evaluation" not in entry]
    scores = jax.tree.map(lambda score: [*score.values()], fit.evaluation.summary(), is_leaf=lambda node: "rows" in node)
    case = name + ("-alone" if settings else "") + ("" if mode == "vmap" else "-loop")
    check(case, {"server": fit.simulation.state, "local": local}, {"history": rounds, "evaluation": scores}, request)


@pytest.mark.parametrize("way", ["", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way)])
@pytest.mark.parametrize("name", [method(name) for name in ("sfvi", "sfvi-avg", "pvi")])  # EP's chains are chaotic
def test_over_silos(name, way, request):
    counts, options = WAYS[way]
    y = np.random.default_rng(7).normal(1.0, 1.0, sum(counts)).astype(np.float32)
    data = {f"s{i}": {"y": part} for i, part in enumerate(np.split(y, np.cumsum(counts)[:-1]))}
    fit = fb.simulate(TABLE[name](population, silo), data, rounds=3, seed=5, correct=False, **options)
    own = {place: fit.simulation.own(place) for place in data}
    check(
        name + way,
        {"server": fit.simulation.state, "own": own},
        {
            "history": [{key: entry[key] for key in ("round", "bound")} for entry in fit.history],
            "posterior": fit.result["posterior"],
        },
        request,
    )


def population():
    return numpyro.sample("mean", dist.Normal(0.0, 2.0)), numpyro.sample("scale", dist.HalfNormal(1.0))


def silo(shared, data):
    mean, scale = shared
    with numpyro.plate("units", data["y"].shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
        numpyro.sample("y", dist.Normal(effect, 0.5), obs=data["y"])


def check(name, states, figures, request):
    found = {"arrays": {where: sums(leaf) for where, leaf in paths(states).items()}, "figures": jax.tree.map(rounded, figures)}
    if path := os.environ.get("FEDBAYES_WRITE_NUMBERS"):
        write(Path(path), name, found)
        return
    kept = json.loads(NUMBERS.read_text())
    if name not in kept and request.config.getoption("--method"):
        write(NUMBERS, name, found)
        return
    assert name in kept, f"{NUMBERS.name} has no numbers of {name}; make test-method NAME={name} writes them"
    kept = kept[name]
    assert kinds(found) == kinds(kept)
    off = deviations(found, kept)
    worst = max(off, key=off.get)
    print(f"{name}: {off[worst]:.1e} at most, in {worst}")
    beyond = {where: float(value) for where, value in off.items() if not value <= TOLERANCE}
    assert not beyond, f"{name}: {len(beyond)} of {len(off)} numbers deviate, {worst} by {off[worst]:.1e}"


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def sums(leaf):
    """The kind of an array, its sum, the sum of its absolute values, and a sum with random weights."""
    values = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    values = np.asarray(values).astype(np.float64).reshape(-1)
    weights = np.random.default_rng(0).normal(size=values.size)
    return [f"{leaf.dtype}{list(leaf.shape)}", *map(rounded, (values.sum(), np.abs(values).sum(), values @ weights))]


def rounded(value):
    return float(f"{value:.9g}")


def kinds(numbers):
    return {where: kind for where, (kind, *_) in numbers["arrays"].items()}, jax.tree.structure(numbers["figures"])


def deviations(found, kept):
    off = {}
    for where, (_, *numbers) in kept["arrays"].items():
        off[where] = np.abs(np.subtract(found["arrays"][where][1:], numbers)).max() / (numbers[1] or 1.0)
    figures = paths(found["figures"])
    for where, number in paths(kept["figures"]).items():
        off[where] = abs(figures[where] - number) / max(1.0, abs(number))
    return off


def write(path, name, found):
    """Add a case, which is a line of the file."""
    cases = json.loads(path.read_text()) if path.exists() else {}
    cases[name] = found
    lines = [f"{json.dumps(case)}:{json.dumps(cases[case], separators=(',', ':'), allow_nan=False)}" for case in sorted(cases)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
