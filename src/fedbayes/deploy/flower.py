"""An experiment on Flower: a ServerApp for the coordinator, a ClientApp for each site.

    app.py of a Flower project:      server = server_app(experiment)
                                     client = client_app(experiment)

A site's own settings (`--node-config`) are its number, the folder of its state, and what `experiment.load` asks for, such as a
file; but for the number none of them travels. Messages are the arrays of `Down` and `Up` under their names, and a few facts of
the round.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable import inflatable_utils

from fedbayes import __version__, trees, wire
from fedbayes.deploy.coordinator import Coordinator, Reply, Request
from fedbayes.deploy.experiment import Experiment
from fedbayes.deploy.site import Site
from fedbayes.engine.compile_cache import keep_compiled
from fedbayes.errors import UserError

log = logging.getLogger("fedbayes")
LARGE = 2**24  # bytes of a message from which on memory is worth some time
POLL = 0.1  # seconds between two looks for answers
M_MMAP_THRESHOLD = -3  # glibc's name for the size from which on an array has pages of its own
M_ARENA_MAX = -8  # and for how many heaps its threads have
GREETING = 120.0  # seconds that a node has to say which site it is
AGAIN = 60.0  # seconds after which a node that was refused is asked again


def server_app(experiment: Experiment) -> ServerApp:
    """The server of an experiment; its run config has `out`, the folder of the run."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        keep_compiled()
        log.setLevel(logging.INFO)
        log.handlers = logging.getLogger("flwr").handlers  # what goes elsewhere is discarded
        try:
            coordinator = Coordinator(experiment, Path(str(context.run_config.get("out") or "run")).expanduser())
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
        def work() -> tuple[dict[str, Any], dict[str, Any]]:
            for leaves in experiment.manifests():
                wire.check(leaves)
            return {"number": int(_settings(context)["number"]), "fingerprint": experiment.fingerprint}, {}

        return _answered(message, work)

    @app.train("round")
    def round(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "train"))

    @app.query("score")
    def score(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "score"))

    @app.query("choose")
    def choose(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "choose"))

    @app.query("evidence")
    def evidence(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _at_site(experiment, message, context, "evidence"))

    return app


class Told(UserError):
    """An error of a site whose words hold nothing of its own, so that they may leave it."""


def _settings(context: Context) -> dict[str, Any]:
    """A node's own settings; in Flower's simulation a node has a partition instead of a number, and `state` is the run's."""
    given = {"number": context.node_config.get("partition-id"), "state": context.run_config.get("state")}
    settings = {name: value for name, value in given.items() if value not in (None, "")} | dict(context.node_config)
    for name in ("number", "state"):
        if name not in settings:
            advice = (
                "start it with --node-config 'number=0 state=\"…\" …', or in Flower's simulation the run with -c 'state=\"…\"'"
            )
            raise Told(f"the site's settings lack {name}; {advice}")
    return settings


def _at_site(experiment: Experiment, message: Message, context: Context, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    keep_compiled(0.0)  # each message is a new process, so what compiles in no time is worth keeping too
    facts, arrays = _received(message.content)
    if facts["fingerprint"] != experiment.fingerprint:
        raise Told("the server runs another experiment than this site; bring both to the same version of the project")
    settings = _settings(context)
    if facts["site"] != int(settings["number"]):
        raise Told(f"the server takes this for site {facts['site']}, but it is {settings['number']}")
    folder = Path(str(settings["state"])).expanduser()
    here = Site(experiment, int(settings["number"]), folder, experiment.load(settings))
    down = wire.assemble(arrays, experiment.received(what), "the broadcast", finite=True)
    answer = getattr(here, what)(facts["run"], facts["round"], facts["counted"], down)
    return {"run": facts["run"], "round": facts["round"]}, trees.named(answer)


def _answered(message: Message, work: Any) -> Message:
    """A reply. What goes wrong at the site is written there; what leaves are words that hold nothing of the site's own."""
    try:
        facts, arrays = work()
    except Told as problem:
        log.error("%s", problem)
        facts, arrays = {"problem": str(problem)}, {}
    except Exception as problem:
        log.exception("the site cannot answer")
        facts, arrays = {"problem": f"the site cannot answer ({type(problem).__name__}); its own log says why"}, {}
    content = RecordDict({"facts": ConfigRecord({"version": __version__, **facts}), **_records(dict(arrays))})
    return Message(content, reply_to=message)


def _records(arrays: dict[str, Any]) -> dict[str, ConfigRecord]:
    """Arrays as Flower sends them, taken out of `arrays`. Not as its `ArrayRecord`, which is twice in the receiver's memory
    and has two objects for each array, each with a request of its own."""
    told, pieces = wire.cut(arrays)
    records = {"arrays": ConfigRecord({"told": told})}
    return records | {f"piece{number}": ConfigRecord({"bytes": piece}) for number, piece in enumerate(pieces)}


def _received(content: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of a message; these are taken out of it."""
    pieces: list[bytes] = []
    while (name := f"piece{len(pieces)}") in content:
        pieces.append(content.pop(name)["bytes"])
    return dict(content["facts"]), wire.join(str(content["arrays"]["told"]), pieces)


class FlowerPost:
    """Messages by Flower's grid, with a deadline of our own."""

    def __init__(self, grid: Grid, experiment: Experiment) -> None:
        gc.freeze()  # what is there now stays, so that to look for what does not is quick, and done often
        with contextlib.suppress(OSError, AttributeError):  # so that large arrays go back to the system when they are done
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        # An answer is often found before its last piece has come. Flower then looks again after a second; it is there at once.
        with contextlib.suppress(AttributeError):
            (inflatable_utils.pull_and_inflate_object_from_tree.__kwdefaults__ or {})["initial_backoff"] = POLL
        self.grid, self.experiment = grid, experiment
        self.node_of: dict[int, int] = {}
        self.refused: dict[int, float] = {}
        """Nodes that are not asked again before some time."""

    def sites(self) -> list[int]:
        """The numbers of the connected sites; a node that is new is asked which one it is."""
        nodes, now = set(_tried("who is there is not known now", self.grid.get_node_ids)), time.monotonic()
        self.refused = {node: until for node, until in self.refused.items() if until > now}
        new = nodes - set(self.node_of.values()) - set(self.refused)
        silent = set(new)
        for node, reply in self._exchange({node: ("query.hello", RecordDict(), "0") for node in new}, GREETING):
            silent.discard(node)
            number, problem = int(reply.facts.get("number", -1)), reply.problem
            if problem is None and reply.facts.get("fingerprint") != self.experiment.fingerprint:
                problem = "it has another version of the experiment"
            if problem is None and not 0 <= number < self.experiment.sites:
                problem = f"it says that it is site {number}, but there are {self.experiment.sites}, from 0 on"
            if problem is None and self.node_of.get(number, node) in nodes - {node}:
                problem = f"another node is site {number} already"
            if problem is not None:
                log.warning("node %s is refused for a minute: %s", node, problem)
                self.refused[node] = now + AGAIN
                continue
            self.node_of[number] = node
            log.info("site %d is there", number)
        self.refused |= dict.fromkeys(silent, now + AGAIN)
        return sorted(number for number, node in self.node_of.items() if node in nodes)

    def ask(self, request: Request, patience: float) -> Iterator[Reply]:
        """Push to each site, then look for answers, one at a time, so that one is in memory."""
        number_of = {self.node_of[number]: number for number in request.facts}
        kind = "train.round" if request.kind == "round" else f"query.{request.kind}"
        records = _records(request.arrays)  # the arrays are there once, for all sites
        asked = {
            self.node_of[number]: (kind, RecordDict({"facts": ConfigRecord(facts), **records}), str(facts["round"]))
            for number, facts in request.facts.items()
        }
        del request, records  # what has been pushed is not kept
        for node, reply in self._exchange(asked, patience):
            number = number_of[node]
            if reply.problem is not None and self.node_of.get(number) == node:
                del self.node_of[number]  # it may have changed, so it is greeted again
            yield reply._replace(site=number)
            del reply

    def _push(self, node: int, kind: str, content: RecordDict, group: str, patience: float) -> list[str]:
        """Send a message; gives its identifier, or none where the node cannot be reached."""
        message = Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=patience)
        sent = _tried(f"node {node} cannot be asked", self.grid.push_messages, [message])
        return [identifier for identifier in sent if identifier]

    def _exchange(self, asked: dict[int, tuple[str, RecordDict, str]], patience: float) -> Iterator[tuple[int, Reply]]:
        """Nodes and their replies; whoever has not answered in time is left out."""
        end = time.monotonic() + patience
        waiting: dict[str, int] = {}
        for node in list(asked):
            large = len(asked[node][1]) * wire.PIECE > LARGE
            waiting |= dict.fromkeys(self._push(node, *asked.pop(node), patience), node)
            _let_go(large)
        while waiting and time.monotonic() < end:
            for identifier in list(waiting):
                late = f"the answer of node {waiting[identifier]} cannot be fetched now"
                for message in _tried(late, self.grid.pull_messages, {identifier}):
                    reply = _reply(message)
                    large = sum(array.nbytes for array in reply.arrays.values()) > LARGE
                    _let_go(large)
                    yield waiting.pop(identifier), reply
                    del reply  # the next one is on its way
                    _let_go(large)
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            log.warning("node %s did not answer within %.0f s", node, patience)


def _tried(otherwise: str, ask: Callable[..., Iterable[Any]], *given: Any) -> Iterable[Any]:
    """What a SuperLink says, or nothing where it fails for once, which is no reason to end a run."""
    try:
        return ask(*given)
    except Exception as problem:
        log.warning("%s: %s", otherwise, problem)
        return []


def _let_go(large: bool) -> None:
    """Give memory back to the system after a large message: Flower's requests refer to themselves, and the allocator keeps
    what was in small parts."""
    if large:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _reply(message: Message) -> Reply:
    """What a message says; one that cannot be read is a problem of its sender."""
    try:
        if message.has_error():
            error = message.error
            return Reply(-1, {}, {}, f"{error.reason or 'no reason is given'} (Flower's error {error.code})")
        facts, arrays = _received(message.content)
        return Reply(-1, facts, arrays, facts.get("problem"))
    except Exception as problem:
        return Reply(-1, {}, {}, f"a message that cannot be read ({type(problem).__name__})")
