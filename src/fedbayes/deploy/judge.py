"""The verdict on a deployed fit of a structured model: evidence rounds over the post, after the last round of training."""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes.algorithm import AnyAlgorithm
from fedbayes.algorithms.evidence import Told
from fedbayes.deploy.experiment import Experiment
from fedbayes.engine import keys, reduce, silo_programs
from fedbayes.engine import round as steps
from fedbayes.errors import UserError
from fedbayes.models.structured import numbers
from fedbayes.results.coordinates import Standardised
from fedbayes.results.correction import Tilted
from fedbayes.results.mixtures import Points
from fedbayes.results.structured_fit import global_numbers, summarised
from fedbayes.results.verdict import LARGEST, Case, assess

log = logging.getLogger("fedbayes")
DRAWS = 4000  # of what silos share, for the result


class Asking(Protocol):
    """What a verdict needs of a coordinator."""

    experiment: Experiment
    state: Any
    round: int
    history: list[dict[str, Any]]

    @property
    def run(self) -> str:
        """The run's name."""

    @property
    def counted(self) -> dict[int, int]:
        """The last round of each site that was counted."""

    def present(self, post: Any, cohort: list[int], least: int, grace: float) -> list[int]:
        """The sites of a cohort that can be reached."""

    def request(self, algorithm: AnyAlgorithm, state: Any, kind: str, round: int, key: Any, sites: list[int]) -> Any:
        """An algorithm's broadcast for some sites."""

    def gather(self, post: Any, request: Any, up: Any) -> tuple[reduce.Partial, list[int], dict[int, str]]:
        """The sum of what sites answer, who answered, and why others are not counted."""


class Unanswered(UserError):
    """Sites without whose evidence there is no verdict."""


def judged(coordinator: Asking, post: Any) -> dict[str, Any]:
    """The verdict, and the posterior of what silos share, corrected where the verdict asks for it."""
    algorithm, experiment = coordinator.experiment.structured, coordinator.experiment
    shared, structured = algorithm.shared(coordinator.state), algorithm.structured
    dtype = shared.eta.mean.dtype

    def log_prior(z: Points) -> np.ndarray:
        return np.asarray(silo_programs.log_populations(structured, shared.theta, jnp.asarray(z, dtype)))

    factors = algorithm.factors(coordinator.state)
    tilted = functools.partial(Tilted.of, structured, shared.eta, factors, experiment.seed)
    case = Case(
        q=shared.eta,
        log_prior=log_prior,
        ask=functools.partial(_ask, coordinator, post),
        numbers=functools.partial(global_numbers, structured, shared),
        bounds=[entry["bound"] for entry in coordinator.history if "bound" in entry],
        health=algorithm.health(coordinator.state, {}),
        why_not="",
        samples=algorithm.samples,
        seed=experiment.seed,
        frame=Standardised.of(structured, shared.theta, shared.eta) if 0 < shared.eta.mean.size <= LARGEST else None,
        tilted=None if factors is None else tilted,
    )
    try:
        found = assess(case, experiment.correct)
    except Unanswered as problem:
        log.warning("the fit is not checked: %s", problem)
        found = assess(case._replace(why_not=str(problem)))
    if found.corrected is not None:
        z = found.corrected.resampled(DRAWS, experiment.seed)
    else:
        noise = np.random.default_rng(experiment.seed).normal(size=(DRAWS, shared.eta.mean.size))
        z = np.asarray(silo_programs.global_draws(shared.eta, jnp.asarray(noise, dtype)))
    values = silo_programs.global_values(structured, shared.theta, jnp.asarray(z, dtype))
    sites = numbers({name: values[name] for name in structured.global_names()}, LARGEST)
    of_q = {name: found.verdict["checks"].get(name) for name in ("khat", "ess")}
    return {"estimates": summarised(sites), **of_q, "verdict": found.verdict}


def _ask(coordinator: Asking, post: Any, z: Points, round: int) -> Told:
    """One evidence round. Every site that was counted has to answer: a sum without one is another model's."""
    experiment, algorithm = coordinator.experiment, coordinator.experiment.evidence
    everyone = [number for number, last in coordinator.counted.items() if last]
    key, number = keys.of_round(experiment.seed, coordinator.round + 1), coordinator.round + 1
    state = algorithm.asking(coordinator.experiment.structured.shared(coordinator.state), z)
    if away := sorted(set(everyone) - set(coordinator.present(post, everyone, len(everyone), 0.0))):
        raise Unanswered(f"not all sites told their evidence (sites {', '.join(map(str, away))} cannot be reached)")
    request = coordinator.request(algorithm, state, "evidence", number, key, everyone)
    partial, answered, problems = coordinator.gather(post, request, experiment.evidence_up)
    if missing := sorted(set(everyone) - set(answered)):
        why = "; ".join(f"site {site}: {problems.get(site, 'no answer')}" for site in missing)
        raise Unanswered(f"not all sites told their evidence ({why})")
    log.info("evidence round %d: sites %s", round, ", ".join(map(str, sorted(answered))))
    return jax.device_get(steps.close(algorithm, key, state, None, partial, {}).state.told)
