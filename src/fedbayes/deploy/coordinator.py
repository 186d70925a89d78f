"""The server's side of a run, without a network: whom to ask, what to accept, how to go on.

A round asks its sites, waits until all have answered or its patience ends, checks each answer against what the algorithm
declares, and adds it to a running sum, so that one answer at a time is in memory. Who sends something else is named in the log
and not counted. After each round the state is on the disk; a run that is started again goes on from there.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedbayes import trees, wire
from fedbayes.algorithm import AnyAlgorithm, Reduce, declared
from fedbayes.deploy.experiment import Experiment, Final
from fedbayes.deploy.judge import judged
from fedbayes.engine import keys, reduce
from fedbayes.engine import round as steps
from fedbayes.engine.choose import Choice, Chosen, decided, plausible
from fedbayes.engine.choose import Up as Scores
from fedbayes.engine.round import Round
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import no_scores
from fedbayes.evaluation.score import Score, summary
from fedbayes.models.predictive import is_numeric
from fedbayes.results.folder import SCHEMA, Run, describe
from fedbayes.results.loop import over, run_rounds

log = logging.getLogger("fedbayes")
PAUSE = 0.5  # seconds between two looks at who can be reached
GRACE = 10.0  # seconds that the first round and the end wait for everyone, where fewer would do
TRIES = 3  # how often a round is tried that has too few answers


class Request(NamedTuple):
    """What goes to some sites: which kind of message, arrays by name, the same for all, and facts for each site. Whoever sends
    it may take the arrays out, as they are large."""

    kind: str
    arrays: dict[str, np.ndarray]
    facts: dict[int, dict[str, Any]]


class Reply(NamedTuple):
    """What comes back: facts and arrays by name, or why there are none."""

    site: int
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    problem: str | None = None


class Post(Protocol):
    """How messages travel."""

    def sites(self) -> list[int]:
        """The numbers of the sites that can be reached now."""

    def ask(self, request: Request, patience: float) -> Iterator[Reply]:
        """Send its sites the request and give replies as they come, one at a time, until all are there or time is up."""


class Refused(UserError):
    """An answer that does not count."""


class TooFew(UserError):
    """A round without enough answers; the state before it is kept."""


class Coordinator:
    """An experiment's server: its state, the round that it has reached, and what it counted of whom.

    Args:
        experiment: What the sites have too.
        folder: Where the run is kept; one that holds this experiment's run goes on. Other processes are kept out of it until
            `finish` ends.
    """

    def __init__(self, experiment: Experiment, folder: Path | str) -> None:
        self.experiment, self.algorithm, self.folder = experiment, experiment.algorithm, Path(folder)
        self.state, self.round, self.local = experiment.server(), 0, Counted(experiment.sites)
        for leaves in experiment.manifests():
            wire.check(leaves)
        self.about = {"algorithm": self.algorithm.title, "options": describe(self.algorithm), "seed": experiment.seed}
        shape = {"experiment": experiment.fingerprint, "rounds": experiment.rounds, "sites": experiment.sites}
        self.kept = Run(self.folder, self.about | shape, resume=True)
        self.choice: Choice | None = None
        self.history: list[dict[str, Any]] = self.kept.restore(self)
        if self.experiment.networked:
            self.choice = Choice.from_json(self.experiment.network, self.kept.choice)
        self._post: Post | None = None

    @property
    def run(self) -> str:
        """The run's name, which its messages carry."""
        return self.local.run

    @property
    def counted(self) -> dict[int, int]:
        """The last round of each site that was counted."""
        return self.local.rounds

    def finish(self, post: Post) -> dict[str, Any]:
        """All rounds that are left, then every site's score; gives the result, which is in result.json too."""
        self.kept.hold()
        try:
            if self.round:
                log.info("going on after round %d", self.round)
            tries = 0
            while self.round < self.experiment.rounds and not over(self):
                before = self.round
                try:
                    self._run(post, self.experiment.rounds)
                except TooFew as problem:
                    tries = 1 if self.round > before else tries + 1
                    if tries == TRIES:
                        raise
                    log.warning("%s; it is tried again", problem)
            return self.conclude(post)
        finally:
            self.kept.close()

    def step(self, post: Post) -> None:
        """One round. Fewer answers than the minimum leave everything as it was."""
        self._run(post, self.round + 1)

    def _run(self, post: Post, rounds: int) -> None:
        def record(entry: dict[str, Any]) -> None:
            self.history.append({"round": entry["round"], "sites": self.local.answered, **entry})
            self.kept.log(self.history[-1])

        def after(round: int) -> None:
            if self.experiment.plan is not None and round == self.experiment.plan.until:
                began = time.perf_counter()
                found, sites = self._choose(post)
                record({"round": round, "sites": sites, "choice": found.to_json()})
                self.kept.time("choice", round, time.perf_counter() - began, clients=len(sites))

        self._post = post
        run_rounds(self, rounds, record, self.kept, after=after)

    def advance(self, rounds: int) -> Iterator[Round]:
        """Run some rounds over the post."""
        for _ in range(rounds):
            yield self._one_round()

    def _one_round(self) -> Round:
        assert self._post is not None
        post, round, began = self._post, self.round + 1, time.perf_counter()
        key = keys.of_round(self.experiment.seed, round)
        cohort = self.chosen(round)
        least = min(self.experiment.minimum or len(cohort), len(cohort))
        present = self.present(post, cohort, least, 0.0 if self.round else GRACE)
        if len(present) < least:
            needs = f"round {round} needs {least} of sites {_list(cohort)}"
            there = _list(present) or "none"
            raise TooFew(f"{needs}, but only {there} can be reached; start the others, or lower `minimum`")
        partial, stacks, answered = None, {}, []
        largest: dict[str, float] = {}  # bounds on the running sums
        for reply in post.ask(self.request(self.algorithm, self.state, "round", round, key, present), self.experiment.patience):
            number = reply.site
            try:
                if number not in present or number in answered:
                    raise Refused("an answer that nobody asked for")
                up, largest = self._accept(reply, round, largest)
                partial = jax.tree.map(np.array, reduce.empty(self.experiment.up)) if partial is None else partial
                reduce.add_here(partial, up)
            except UserError as problem:
                log.warning("round %d: the answer of site %d is refused: %s", round, number, problem)
                continue
            stacks[number] = reduce.stacked(up)
            answered.append(number)
            del up, reply  # they are large, and the next one is on its way
        if missing := sorted(set(cohort) - set(answered)):
            log.warning("round %d: sites %s are not counted", round, _list(missing))
        if partial is None or len(answered) < least:
            counted = f"{len(answered)} of {len(cohort)} sites gave an answer that counts"
            raise TooFew(f"round {round}: {counted}, but {least} are needed; the state after the round before is kept")
        stacked = steps.stack([stacks[number] for number in sorted(stacks)])
        state, metrics, fine = steps.close(self.algorithm, key, self.state, None, partial, stacked)
        if not bool(fine):
            raise UserError(f"round {round}: the server's state is no longer finite; try a smaller step size")
        self.state, self.round = state, round
        self.local.count(answered, round)
        log.info("round %d of %d: sites %s", round, self.experiment.rounds, _list(self.local.answered))
        trace = {name: np.asarray(value)[None] for name, value in metrics.items()}
        return Round(round, np.array(self.local.answered), trace, time.perf_counter() - began)

    def _choose(self, post: Post) -> tuple[Chosen, list[int]]:
        """Let the sites that have not trained score candidates for settings of `adapt`; keep the choice, tell who made it."""
        plan = self.experiment.plan
        assert plan is not None
        key, sites = keys.of_round(self.experiment.seed, self.round + 1), plan.newcomers.tolist()
        present = self.present(post, sites, 1, GRACE)
        request = self.request(self.experiment.choosing, self.state, "choose", self.round, key, present)
        check = functools.partial(plausible, repeats=plan.repeats)
        partial, answered, _ = self.gather(post, request, self.experiment.choosing_up, check)
        if missing := sorted(set(sites) - set(answered)):
            log.warning("round %d: sites %s have no say in settings of adapt", self.round, _list(missing))
        found = decided(self.experiment.network, Scores(**partial.sums), plan.repeats, max(len(answered), 1))
        if answered:
            log.info("round %d: sites %s chose settings of adapt", self.round, _list(sorted(answered)))
        else:
            log.warning("round %d: nobody chose settings of adapt; the algorithm keeps its own", self.round)
        self.choice = found.choice
        return found, sorted(answered)

    def gather(
        self, post: Post, request: Request, up: Any, check: Callable[[Any], None] = lambda found: None
    ) -> tuple[reduce.Partial, list[int], dict[int, str]]:
        """The sum of what sites answer to a request that is not a round, who answered, and why others are not counted.

        `check` raises `UserError` where an answer of the right shapes cannot be true.
        """
        largest: dict[str, float] = {}
        partial, answered, problems = jax.tree.map(np.array, reduce.empty(up)), list[int](), dict[int, str]()
        asked, (kind, facts) = set(request.facts), (request.kind, next(iter(request.facts.values()), {}))
        for reply in post.ask(request, self.experiment.patience):
            try:
                if reply.site not in asked or reply.site in answered:
                    raise Refused("an answer that nobody asked for")
                if reply.problem is not None:
                    raise Refused(reply.problem)
                if reply.facts.get("round") != facts["round"] or reply.facts.get("run") != self.run:
                    raise Refused(f"it is for round {reply.facts.get('round')} of run {reply.facts.get('run')}")
                found = wire.assemble(reply.arrays, up, "the answer", finite=True)
                check(found)
                largest = grown(reply.arrays, found, largest)
            except UserError as problem:
                log.warning("%s: the answer of site %d is refused: %s", kind, reply.site, problem)
                problems[reply.site] = str(problem)
                continue
            reduce.add_here(partial, found)
            answered.append(reply.site)
        return partial, answered, problems

    def conclude(self, post: Post) -> dict[str, Any]:
        """Send everyone the last broadcast, from which sites personalise, and gather their scores."""
        key = keys.of_round(self.experiment.seed, self.round + 1)
        everyone = self.present(post, list(range(self.experiment.sites)), 0, GRACE)
        request = self.request(self.algorithm, self.state, "score", self.round, key, everyone)
        modes = self.experiment.scored
        scores = {mode: no_scores(self.experiment.sites) for mode in modes}
        scored = []
        for reply in post.ask(request, self.experiment.patience):
            try:
                if reply.problem is not None:
                    raise Refused(reply.problem)
                template = {mode: jax.tree.map(lambda leaf: leaf[0], scores[mode]) for mode in modes}
                found = wire.assemble(reply.arrays, template, "the score", finite=True) if reply.arrays else {}
            except UserError as problem:
                log.warning("the score of site %d is refused: %s", reply.site, problem)
                continue
            scored.append(reply.site)
            for mode, one in found.items():
                for column, value in zip(scores[mode], one, strict=True):
                    column[reply.site] = value
        result = {"schema": SCHEMA, **self.about, "rounds": self.round, "sites": sorted(scored)}
        result |= self.local.commit(self.round)
        if self.experiment.networked:
            numeric = is_numeric(self.experiment.network.likelihood)
            result["metrics"] = {mode: {"participating": summary(Score(*one), numeric)} for mode, one in scores.items()}
            if told := next((one["choice"] for one in self.history if one.get("choice")), None):
                result["choice"] = told
        else:
            result |= judged(self, post)
        if scored or not (self.folder / "result.json").exists():
            self.kept.finish(result)
        return result

    def chosen(self, round: int) -> list[int]:
        """The sites of a round, as the simulator draws them."""
        plan, everyone = self.experiment.plan, np.arange(self.experiment.sites)
        everyone = everyone if plan is None else plan.training(round, everyone)
        cohort = min(self.experiment.cohort or len(everyone), len(everyone))
        return steps.take_part(self.experiment.seed, round, everyone, cohort).tolist()

    def present(self, post: Post, cohort: list[int], least: int, grace: float) -> list[int]:
        """The sites of a cohort that can be reached: all, or after some grace enough of them, or when patience ends what is."""
        began = time.monotonic()
        while True:
            present, waited = sorted(set(cohort) & set(post.sites())), time.monotonic() - began
            enough = len(present) >= least and waited >= min(grace, self.experiment.patience)
            if len(present) == len(cohort) or enough or waited > self.experiment.patience:
                return present
            time.sleep(PAUSE)

    def request(self, algorithm: AnyAlgorithm, state: Any, kind: str, round: int, key: Any, sites: list[int]) -> Request:
        """An algorithm's broadcast for some sites; nobody but the request keeps it."""
        down = steps.broadcast(algorithm, key, state)
        if kind == "score":
            down = Final(down, None if self.choice is None else self.choice.values)
        told = {"run": self.run, "round": round, "fingerprint": self.experiment.fingerprint}
        arrays = {path: np.asarray(leaf) for path, leaf in trees.named(down).items()}
        return Request(kind, arrays, {number: {**told, "site": number, "counted": self.counted[number]} for number in sites})

    def _accept(self, reply: Reply, round: int, largest: dict[str, float]) -> tuple[Any, dict[str, float]]:
        """Validate a reply; return it with updated bounds on the running sums."""
        if reply.problem is not None:
            raise Refused(reply.problem)
        if reply.facts.get("round") != round or reply.facts.get("run") != self.run:
            raise Refused(f"it is for round {reply.facts.get('round')} of run {reply.facts.get('run')}")
        up = wire.assemble(reply.arrays, self.experiment.up, "the upload", finite=True)
        weight = float(reduce.weight_of(up, 0.0))
        if weight < 0 or (self.experiment.weight is not None and weight > self.experiment.weight):
            raise Refused(f"its weight is {weight:.4g}, below 0 or above what is allowed")
        if self.experiment.norm is not None:
            # Not of its weight, which is a number of rows.
            judged = jax.tree.leaves([getattr(up, field) for field in up._fields if field != "weight"])
            norm = math.hypot(*(float(np.linalg.norm(np.ravel(leaf))) for leaf in judged))
            if norm > self.experiment.norm:
                raise Refused(f"its norm is {norm:.4g}, above {self.experiment.norm:.4g}")
        return up, grown(reply.arrays, up, largest)


class Counted:
    """Who was counted when, which a checkpoint keeps: a site that counts on from another round is told to go back."""

    def __init__(self, sites: int) -> None:
        self.run, self.rounds, self.answered = secrets.token_hex(8), dict.fromkeys(range(sites), 0), list[int]()

    def count(self, sites: Sequence[int], round: int) -> None:
        """These sites answered in a round."""
        self.answered = sorted(sites)
        self.rounds.update(dict.fromkeys(sites, round))

    def commit(self, round: int) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"run": self.run, "counted": {str(number): last for number, last in self.rounds.items()}}

    def restore(self, round: int, kept: Any) -> None:
        """Take up what a checkpoint kept; without one, nobody has been counted."""
        if kept is not None:
            self.run, self.rounds = str(kept["run"]), {int(number): int(last) for number, last in kept["counted"].items()}


def grown(arrays: Mapping[str, np.ndarray], up: Any, largest: Mapping[str, float]) -> dict[str, float]:
    """Bounds on the running sums with one upload more; refused where a sum could overflow."""
    means = {field for field, kind in declared(type(up)).items() if kind is Reduce.MEAN}
    bounds = {}
    for path, array in arrays.items():
        share = float(reduce.weight_of(up, 1.0)) if path.split("/")[0] in means else 1.0
        bounds[path] = largest.get(path, 0.0) + share * peak(array)
        if np.issubdtype(array.dtype, np.floating) and bounds[path] > np.finfo(array.dtype).max:
            raise Refused(f"with it the sum of {path} is too large for its numbers")
    return bounds


def peak(array: np.ndarray) -> float:
    """The largest absolute value, without a copy."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
