"""Do a study: its search, its runs, and what came out of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbayes import files
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation
from fedbayes.evaluation.differences import Difference, best, differences, winners
from fedbayes.results.folder import read_evaluation
from fedbayes.study.crew import Done, Progress, Task, perform_all, usual_processes
from fedbayes.study.study import Job, Study


class Try(NamedTuple):
    """One try of a search: its settings, its figure on validation rows and in which mode, or why it failed."""

    settings: tuple[str, ...]
    score: float | None
    mode: str | None
    failure: str | None


class Choice(NamedTuple):
    """What a search chose for a method on some data."""

    settings: tuple[str, ...] | None
    tries: list[Try]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of a study: data → method → seed → result and evaluation."""

    study: Study
    results: dict[str, dict[str, dict[int, dict[str, Any]]]]
    evaluations: dict[str, dict[str, dict[int, Evaluation]]]
    failures: dict[str, str]
    """Folder of a run that failed, and why."""
    search: dict[tuple[str, str], Choice]

    def crossed(self, data: str) -> bool:
        """Whether all runs are on the same rows, so that clients can be paired over seeds."""
        prints = {result["data"]["fingerprint"] for seeds in self.results[data].values() for result in seeds.values()}
        return len(prints) == 1

    def baseline(self, data: str) -> str | None:
        """What the others are compared with: the study's, or the first that has a result."""
        named = self.study.baseline or next(iter(self.study.methods))
        return named if named in self.results[data] else None

    def differences(self, data: str) -> list[Difference]:
        """Of every method from the baseline."""
        runs, base = self.evaluations[data], self.baseline(data)
        if base is None:
            return []
        others, crossed = (name for name in runs if name != base), self.crossed(data)
        return [one for name in others for one in differences(name, runs[name], base, runs[base], crossed=crossed)]

    def winners(self, data: str, unit: str) -> set[tuple[str, str, str, str]]:
        """What is best beyond doubt: method, mode, group, figure."""
        return winners(self.evaluations[data], self.crossed(data), unit)

    def missing(self, data: str) -> list[str]:
        """The runs on some data that have no result."""
        there, wanted = self.results.get(data, {}), itertools.product(self.study.methods, self.study.seeds)
        return [f"{name} seed {seed}" for name, seed in wanted if seed not in there.get(name, {})]


Bars = Callable[[Sequence[Job]], Any]


def run_study(
    study: Study, out: Path, processes: int | None, bars: Bars, *, force: bool = False, track: tuple[str, ...] = ()
) -> Outcome:
    """The search on validation rows, where there is one, then every run; what is finished in `out` is read, not repeated."""

    def done(jobs: list[Job], track: tuple[str, ...] = ()) -> list[Done]:
        tasks = [Task(job, str(out), force, track) for job in jobs]
        with bars(jobs) as progress:
            moved: Progress = progress
            return perform_all(tasks, processes or usual_processes(tasks), moved)

    failures: dict[str, str] = {}
    choices: dict[tuple[str, str], Choice] = {}
    if study.search is not None:
        tries = study.search_jobs()
        choices = choose(study, tries, done(tries), out)
        for (data, name), choice in choices.items():
            if choice.settings is None:
                failures[study.place(data, name)] = f"no try of the search ended well: {choice.tries[0].failure}"
    jobs = study.jobs(None if study.search is None else {key: one.settings for key, one in choices.items() if one.settings})
    results: dict[str, Any] = {data: {} for data in study.data}
    evaluations: dict[str, Any] = {data: {} for data in study.data}
    for job, end in zip(jobs, done(jobs, track) if jobs else [], strict=True):
        if end.failure is not None:
            failures[job.place] = end.failure
            continue
        result, evaluation = read_run(out / job.place, end)
        results[job.data_name].setdefault(job.method, {})[job.seed] = result
        evaluations[job.data_name].setdefault(job.method, {})[job.seed] = evaluation
    _same_rows(results)
    return Outcome(study, results, evaluations, failures, choices)


def _same_rows(results: dict[str, Any]) -> None:
    """Refuse to compare methods that were run on other rows, as happens where a file changed between two calls."""
    for data, methods in results.items():
        rows: dict[int, str] = {}
        for name, seed, result in ((name, *each) for name, seeds in methods.items() for each in seeds.items()):
            if rows.setdefault(seed, result["data"]["fingerprint"]) != result["data"]["fingerprint"]:
                raise UserError(
                    f"{name} seed {seed} has other rows of {data} than the methods before it; --force runs all anew"
                )


def choose(study: Study, jobs: Sequence[Job], ends: Sequence[Done], out: Path) -> dict[tuple[str, str], Choice]:
    """The try of each method on each data whose figure on validation rows is best."""
    assert study.search is not None
    figure, mode = study.search.figure, study.search.mode
    tries: dict[tuple[str, str], list[Try]] = {}
    for job, end in zip(jobs, ends, strict=True):
        own = job.settings[len(study.methods[job.method].settings) :]
        score, where = None, None
        if end.failure is None:
            found = files.read_json(out / job.place / "result.json", metrics=dict)["metrics"]
            scores = {
                name: groups["participating"].get(figure, {}).get("rows")
                for name, groups in found.items()
                if mode in (name, "best") and "participating" in groups
            }
            if not scores and mode != "best" and mode not in found:
                raise UserError(
                    f"search.mode is {mode!r}, which {job.method} has not with its settings; search in another mode"
                )
            if not scores or None in scores.values():
                raise UserError(f"search.figure is {figure!r}, which {job.data_name} has not on its validation rows")
            where = best(figure, scores)
            score = scores[where or ""]
        tries.setdefault((job.data_name, job.method), []).append(Try(own, score, where, end.failure))
    chosen = {}
    for key, each in tries.items():
        numbered = {str(number): one.score for number, one in enumerate(each) if one.score is not None}
        first = best(figure, numbered) if numbered else None
        chosen[key] = Choice(None if first is None else each[int(first)].settings, each)
    return chosen


def read_run(folder: Path, end: Done) -> tuple[dict[str, Any], Evaluation]:
    """The result and the clients' scores of a finished run."""
    result = files.read_json(folder / "result.json", rounds=int, modes=list, metrics=dict)
    return result, read_evaluation(folder, result, np.array(end.unseen, bool))
