"""A deployment without a network: the coordinator and its sites in one process, with faults where a test asks for them."""

import numpy as np

from fedbayes import trees, wire
from fedbayes.deploy.coordinator import Coordinator, Reply
from fedbayes.deploy.experiment import Experiment, site_rows
from fedbayes.deploy.site import Site
from fedbayes.errors import UserError


class Direct:
    """A post that hands requests to sites in the same process, and keeps every array that passed it."""

    def __init__(self, sites, faults=None):
        self.places, self.faults, self.seen = dict(enumerate(sites)), faults or {}, []

    def sites(self):
        return [number for number in self.places if self.faults.get(number) != "away"]

    def ask(self, request, patience):
        for number, facts in request.facts.items():
            assert self.faults.get(number) != "away", "nobody can ask a site that is away"
            site = self.places[number]
            down = wire.assemble(request.arrays, site.experiment.received(request.kind), "the broadcast")
            self.seen.append(request.arrays)
            given = (facts["run"], facts["round"], facts["counted"], down)
            what = {"round": site.train, "score": site.score, "evidence": site.evidence, "choose": site.choose}[request.kind]
            try:
                answer = what(*given)
            except UserError as problem:
                if request.kind != "evidence":
                    raise
                yield Reply(number, {}, {}, str(problem))
                continue
            arrays = {path: np.asarray(leaf) for path, leaf in trees.named(answer).items()}
            reply = Reply(number, {"round": facts["round"], "run": facts["run"]}, dict(arrays))
            self.seen.append(arrays)
            if request.kind == "round":
                fault = self.faults.get((number, facts["round"])) or self.faults.get(number)
            else:
                fault = self.faults.get((number, request.kind))
            yield from spoilt(reply, fault)


def spoilt(reply, fault):
    """The replies that a site with a fault sends instead."""
    if fault is None:
        return [reply]
    first = next(path for path, array in reply.arrays.items() if array.size > 1)
    array = reply.arrays[first]
    changed = {
        "nan": {first: np.full_like(array, np.nan)},
        "shape": {first: array[..., None]},
        "dtype": {first: array.astype(np.float64)},
        "extra": {"secret": np.ones(3, np.float32)},
        "heavy": {"weight": np.float32(1e30)},
        "huge": {first: np.full_like(array, np.finfo(array.dtype).max)},
        "unrows": {"rows": -reply.arrays.get("rows", np.float32(0))},
        "norm": {path: 100 * value for path, value in reply.arrays.items() if path != "weight"},
    }
    if fault in ("lost", "late", "killed"):
        return []
    if fault == "twice":
        return [reply, reply]
    if fault == "error":
        return [reply._replace(problem="the site failed", arrays={})]
    if fault == "old":
        return [reply._replace(facts={**reply.facts, "round": reply.facts["round"] - 1})]
    if fault == "missing":
        return [reply._replace(arrays={path: value for path, value in reply.arrays.items() if path != first})]
    return [reply._replace(arrays={**reply.arrays, **changed.get(fault, {})})]


def deployment(algorithm, parts, tmp_path, rounds=3, faults=None, **options):
    """A coordinator, its post and its sites over the data of each."""
    example = parts[0].train
    experiment = Experiment(
        algorithm, example, lambda settings: parts[settings["number"]], rounds, len(parts), seed=5, **options
    )
    sites = [Site(experiment, number, tmp_path / f"site{number}", part) for number, part in enumerate(parts)]
    return Coordinator(experiment, tmp_path / "server"), Direct(sites, faults)


def parts_of(clients):
    """Each client's rows, as a site has them."""
    return [site_rows(clients, name) for name in clients.names]
