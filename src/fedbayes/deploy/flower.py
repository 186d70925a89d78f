"""An experiment on Flower: a ServerApp for the coordinator, a ClientApp for each site.

    app.py of a Flower project:      server = server_app(experiment)
                                     client = client_app(experiment)

A site's own settings (`--node-config`) are its number, the folder of its state, and what `experiment.load` asks for, such as a
file; none of them travels. Messages are the arrays of `Down` and `Up` under their names, and a few facts of the round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbayes import __version__, trees, wire
from fedbayes.cli import keep_compiled
from fedbayes.deploy.coordinator import Coordinator, Reply, Request
from fedbayes.deploy.experiment import Experiment
from fedbayes.deploy.site import Site
from fedbayes.errors import UserError

log = logging.getLogger("fedbayes")
POLL = 0.25
"""Seconds between two looks for answers."""
GREETING = 120.0
"""Seconds that a node has to say which site it is."""


def server_app(experiment: Experiment) -> ServerApp:
    """The server of an experiment; its run config has `out`, the folder of the run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keep_compiled()
        log.setLevel(logging.INFO)
        log.handlers = logging.getLogger("flwr").handlers  # what goes elsewhere is discarded
        coordinator = Coordinator(experiment, Path(str(context.run_config.get("out") or "run")).expanduser())
        try:
            coordinator.finish(FlowerPost(grid, experiment))
        except UserError as problem:
            log.error("%s", problem)
            raise
        log.info("done: %s", coordinator.folder / "result.json")

    return app


def client_app(experiment: Experiment) -> ClientApp:
    """A site of an experiment; its node config has `number`, `state` and what `experiment.load` asks for."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return _answered(message, lambda: ({"number": _number(context), "fingerprint": experiment.fingerprint}, {}))

    @app.train("round")
    def round(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "train"))

    @app.query("score")
    def score(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "score"))

    return app


def site(experiment: Experiment, settings: Mapping[str, Any]) -> Site:
    """The site that a node's settings describe."""
    for name in ("number", "state"):
        if name not in settings:
            raise UserError(f"the site's settings lack {name}; start it with --node-config 'number=0 state=\"…\" …'")
    return Site(experiment, int(settings["number"]), Path(str(settings["state"])).expanduser(), experiment.load(settings))


def _number(context: Context) -> int:
    if "number" not in context.node_config:
        raise UserError("the site's settings lack number; start it with --node-config 'number=0 state=\"…\" …'")
    return int(context.node_config["number"])


def _at_site(experiment: Experiment, message: Message, context: Context, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    keep_compiled()
    facts = dict(message.content["facts"])
    if facts["fingerprint"] != experiment.fingerprint:
        raise UserError("the server runs another experiment than this site; bring both to the same version of the project")
    here = site(experiment, context.node_config)
    if facts["site"] != here.number:
        raise UserError(f"the server takes this for site {facts['site']}, but it is {here.number}")
    down = wire.assemble(_arrays(message.content), experiment.down, "the broadcast", finite=True)
    answer = getattr(here, what)(facts["run"], facts["round"], facts["counted"], down)
    return {"run": facts["run"], "round": facts["round"]}, trees.named(answer)


def _answered(message: Message, work: Any) -> Message:
    """A reply; what goes wrong at the site is a sentence in it, and never a value."""
    try:
        facts, arrays = work()
    except UserError as problem:
        log.error("%s", problem)
        facts, arrays = {"problem": str(problem)}, {}
    return Message(_content({"version": __version__, **facts}, arrays), reply_to=message)


def _content(facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> RecordDict:
    record = ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})
    return RecordDict({"facts": ConfigRecord(dict(facts)), "arrays": record})


def _arrays(content: RecordDict) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in content["arrays"].items()}


class FlowerPost:
    """Messages by Flower's grid, with a deadline of our own."""

    def __init__(self, grid: Grid, experiment: Experiment) -> None:
        self.grid, self.experiment = grid, experiment
        self.node_of: dict[int, int] = {}
        self.refused: set[int] = set()

    def sites(self) -> list[int]:
        """The numbers of the connected sites; a node that is new is asked which one it is."""
        nodes = set(self.grid.get_node_ids())
        self.refused &= nodes
        known = {node: number for number, node in self.node_of.items()}
        new = nodes - set(known) - self.refused
        for node, message in self._exchange({node: ("query.hello", RecordDict(), "0") for node in new}, GREETING):
            problem = _problem(message)
            facts = {} if problem else dict(message.content["facts"])
            number, problem = int(facts.get("number", -1)), problem or facts.get("problem")
            if problem is None and facts.get("fingerprint") != self.experiment.fingerprint:
                problem = "it has another version of the experiment"
            if problem is None and not 0 <= number < self.experiment.sites:
                problem = f"it says that it is site {number}, but there are {self.experiment.sites}, from 0 on"
            if problem is None and self.node_of.get(number, node) in nodes - {node}:
                problem = f"another node is site {number} already"
            if problem is not None:
                log.warning("node %s is refused: %s", node, problem)
                self.refused.add(node)
                continue
            self.node_of[number] = node
            log.info("site %d is there", number)
        return sorted(number for number, node in self.node_of.items() if node in nodes)

    def ask(self, requests: Mapping[int, Request], patience: float) -> Iterator[Reply]:
        """Push to each site, then look for answers, one at a time, so that one is in memory."""
        number_of = {self.node_of[number]: number for number in requests}
        kinds = {"round": "train.round", "score": "query.score"}
        asked = {
            self.node_of[number]: (
                kinds[request.kind],
                _content(request.facts, request.arrays),
                str(request.facts["round"]),
            )
            for number, request in requests.items()
        }
        for node, message in self._exchange(asked, patience):
            number = number_of[node]
            problem = _problem(message)
            if problem is not None:
                yield Reply(number, {}, {}, problem)
                continue
            facts = dict(message.content["facts"])
            yield Reply(number, facts, _arrays(message.content), facts.get("problem"))

    def _exchange(self, asked: Mapping[int, tuple[str, RecordDict, str]], patience: float) -> Iterator[tuple[int, Message]]:
        """Nodes and their replies; whoever has not answered in time is left out."""
        end = time.monotonic() + patience
        waiting: dict[str, int] = {}
        for node, (kind, content, group) in asked.items():
            message = Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=patience)
            for identifier in self.grid.push_messages([message]):
                if identifier:
                    waiting[identifier] = node
        while waiting and time.monotonic() < end:
            for identifier in list(waiting):
                for message in self.grid.pull_messages({identifier}):
                    yield waiting.pop(identifier), message
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            log.warning("node %s did not answer within %.0f s", node, patience)


def _problem(message: Message) -> str | None:
    """Why a reply holds nothing, in words."""
    if not message.has_error():
        return None
    return f"{message.error.reason or 'no reason is given'} (Flower's error {message.error.code})"
