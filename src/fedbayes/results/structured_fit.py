"""From a structured model and silos to a posterior that ArviZ reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes import files, trees
from fedbayes.algorithm import AnyStructured
from fedbayes.algorithms.evidence import INNER, POINTS, Evidence, Told
from fedbayes.engine import keys, reduce, silo_programs
from fedbayes.engine import round as steps
from fedbayes.engine.silo_data import naming_silo
from fedbayes.engine.silos import SiloSimulation
from fedbayes.errors import UserError
from fedbayes.models.linked import like
from fedbayes.models.sites import Latent, Values
from fedbayes.models.structured import Structured, numbers
from fedbayes.primitives import gaussian, variational
from fedbayes.primitives.dependence import inseparable
from fedbayes.results.coordinates import Standardised, by_blocks
from fedbayes.results.correction import MOST, ROUNDS, Corrected, Sampler, Tilted, mended, smoothed
from fedbayes.results.folder import AGAIN, SHARED
from fedbayes.results.structured_text import HEADINGS, rows, table, verdict
from fedbayes.results.verdict import LARGEST, Assessed, Case, Correct, assess
from fedbayes.sheets import listing
from fedbayes.trees import quietly

if TYPE_CHECKING:
    import arviz as az

KEPT = 4000  # corrected draws that are kept
CORRECTED = "corrected"  # their name in the file of the shared model


@dataclasses.dataclass
class SiloFit:
    """What was learnt over silos: q(Z_G), each silo's q(Z_L | Z_G), and how the bound rose."""

    algorithm: AnyStructured
    shared: variational.Shared
    """η_G and θ."""
    names: tuple[str, ...]
    result: dict[str, Any]
    history: list[dict[str, Any]]
    trained: SiloSimulation | None = None
    adapted: tuple[str, ...] = ()
    """Silos that came later: q(Z_G) knows nothing of their data."""
    corrected: Float[np.ndarray, "s n"] | None = None
    """Draws of Z_G on the real line that take the place of q's, where the fit was corrected."""

    @classmethod
    def of(cls, simulation: SiloSimulation, result: dict[str, Any], history: list[dict[str, Any]], *adapted: str) -> SiloFit:
        """The fit of a simulation as it stands now."""
        algorithm, state = simulation.algorithm, simulation.state
        return cls(algorithm, algorithm.shared(state), simulation.names, result, history, simulation, adapted)

    def __post_init__(self) -> None:
        self._own: dict[str, dict[str, int]] = {}

    def __repr__(self) -> str:
        settings, count = self.result, len(self.names)
        return f"SiloFit({settings['algorithm']}, {settings['rounds']} rounds over {count} silo{'s' * (count > 1)})"

    def __str__(self) -> str:
        return f"{self!r}\n{table(self.result)}"

    def _repr_html_(self) -> str:
        listed = rows(self.result) or [["too many numbers to list"]]
        return listing(repr(self), ["", *HEADINGS], listed, verdict(self.result))

    @property
    def simulation(self) -> SiloSimulation:
        """The simulation that trained it, with the silos' data."""
        if self.trained is None:
            raise UserError("this fit was opened without the silos' data, which this needs; give silos=… to fb.open")
        return self.trained

    @property
    def theta(self) -> Values:
        """θ, as the model has it."""
        return self._structured.theta_values(self.shared.theta, self.trained and self.trained.data(self.names[0]))

    @property
    def _structured(self) -> Structured:
        return self.algorithm.structured

    @property
    def bound(self) -> Float[np.ndarray, " windows"]:
        """The bound as it rose, averaged over windows of rounds."""
        return np.array([entry["bound"] for entry in self.history if "bound" in entry])

    def draws(self, count: int = 1000, seed: int = 0, *, corrected: bool | None = None) -> dict[str, Array]:
        """Draws of Z_G, as the population's sites have it: (count, …) for each.

        They are those of the correction where the fit has one, and else q's; `corrected` asks for the one or the other.
        """
        if corrected and self.corrected is None:
            self.correct(seed=seed)
        if self.corrected is None or corrected is False:
            return self._sites(_global_draws(self.shared.eta, count, seed))
        random = np.random.default_rng([seed, count])
        order = random.permutation(len(self.corrected))
        chosen = order[np.arange(count) % len(order)] if count > len(order) else order[:count]
        return self._sites(jnp.asarray(self.corrected[chosen]))

    def _sites(self, z: Float[Array, "s n"]) -> dict[str, Array]:
        values = silo_programs.global_values(self._structured, self.shared.theta, z)
        return {name: values[name] for name in self._structured.global_names()}

    def posterior(self, draws: int = 1000, seed: int = 0, *, corrected: bool | None = None) -> az.InferenceData:
        """The posterior of what all silos share, for ArviZ: corrected draws where the fit has them, and else q's.

        `corrected=True` asks silos for the evidence that it takes (see `correct`), `corrected=False` gives q's draws.
        """
        return _inference_data({"posterior": self.draws(draws, seed, corrected=corrected)})

    def correct(self, rounds: int = ROUNDS, points: int = POINTS, inner: int = INNER, seed: int = 0) -> Corrected:
        """Mend what a Gaussian q(Z_G) cannot represent, and keep the draws, which `draws` and `posterior` then give.

        Each evidence round asks every silo for log p(y_j | Z_G) at `points` draws of Z_G, by `inner` draws of its own latents;
        the draws of the next come from a mixture fitted to the weighted ones so far. At most `rounds`, and up to twice
        as many where the weights can be trusted and are only too few. It is refused where they cannot be trusted in the end.
        """
        found, n = mended(self.sampler(points, inner, seed), self._tilted(seed), rounds), self.shared.eta.mean.size
        if found is None:
            raise UserError(f"there are {n} global latents, but draws of more than {MOST} cannot be corrected by their weights")
        if not found.reliable:
            weights = f"k̂ is {found.khat:.2f} and {found.ess:.0f} of {len(found.z)} draws are effective"
            raise UserError(f"{weights}: the weights cannot be trusted after {found.rounds} rounds; fit longer or more richly")
        self.corrected = found.resampled(KEPT, seed).astype(self.shared.eta.mean.dtype)
        return found

    def sampler(self, points: int = POINTS, inner: int = INNER, seed: int = 0) -> Sampler:
        """Importance sampling of Z_G by evidence rounds."""
        if why := _inseparable(self.simulation):
            raise UserError(f"{why}, so draws cannot be weighed element by element; k̂ is not available for this model")
        frame = Standardised.of(self._structured, self.shared.theta, self.shared.eta)
        return Sampler(self.shared.eta, self._log_prior, functools.partial(self._ask, inner, seed), seed, points, frame)

    def _tilted(self, seed: int) -> Callable[[], Tilted] | None:
        """Draws from the prior times the silos' factors, where q is a product of them."""
        factors = self.algorithm.factors(self.simulation.state)
        if factors is None:
            return None
        return functools.partial(Tilted.of, self._structured, self.shared.eta, factors, seed)

    def _log_prior(self, z: Float[np.ndarray, "s n"]) -> Float[np.ndarray, " s"]:
        given = jnp.asarray(z, self.shared.eta.mean.dtype)
        return np.asarray(silo_programs.log_populations(self._structured, self.shared.theta, given))

    def _ask(self, inner: int, seed: int, z: Float[np.ndarray, "s n"], round: int) -> Told:
        """An evidence round over the silos that trained, by the steps of any round.

        All have the noise of one round, so that silos' errors are the same function of Z_G in each.
        """
        algorithm = Evidence(self.algorithm, len(z), inner)
        state, key = algorithm.asking(self.shared, z), keys.of_round(seed, self.simulation.round + 1)
        down, partial, own = steps.broadcast(algorithm, key, state), None, {}
        for place, (name, (form, arrays)) in enumerate(zip(self.simulation.names, self.simulation.parts, strict=True)):
            if name in self.adapted:
                continue
            given = (keys.fold(key, np.uint32(place)), down, self.simulation.own(name, padded=True), arrays)
            up, _, _ = steps.client(algorithm, form, *given)
            partial = steps.accumulate(reduce.empty(up) if partial is None else partial, up)
            own[name] = {field: int(getattr(up, field)) for field in ("latents", "moved", "scaled")}
        assert partial is not None
        if round == 1:  # the points of which are those of q
            self._own = own
        return jax.device_get(steps.close(algorithm, key, state, down, partial, {}).state.told)

    def assess(self, correct: Correct = "auto") -> Assessed:
        """Judge the fit anew; see `fedbayes.results.verdict`. With `correct` its corrected draws are kept, if there are any."""
        simulation, algorithm = self.simulation, self.algorithm
        seed = simulation.seed
        mine = {name: simulation.own(name) for name in simulation.names if name not in self.adapted}
        case = Case(
            q=self.shared.eta,
            log_prior=self._log_prior,
            ask=functools.partial(self._ask, INNER, seed),
            numbers=functools.partial(global_numbers, self._structured, self.shared),
            bounds=[entry["bound"] for entry in self.history if "bound" in entry],
            health=algorithm.health(simulation.state, mine),
            why_not=_inseparable(simulation),
            samples=algorithm.samples,
            seed=seed,
            frame=None if _inseparable(simulation) else Standardised.of(self._structured, self.shared.theta, self.shared.eta),
            tilted=self._tilted(seed),
        )
        found = assess(case, correct)
        if self._own and not algorithm.samples:
            found.verdict["checks"]["silos"] = dict(list(self._own.items())[:LARGEST])
        self.corrected = None
        if found.corrected is not None:
            self.corrected = found.corrected.resampled(KEPT, seed).astype(self.shared.eta.mean.dtype)
        return found

    def local_posterior(self, silo: str, draws: int = 1000, seed: int = 0) -> az.InferenceData:
        """A silo's own posterior, computed where its data is: its latents and the global ones that they were drawn with.

        Also what the model would observe there (posterior_predictive), what was observed, and its log density. Where the
        method samples, draws come by chain, so that r-hat and effective sizes mean something, with `sample_stats.diverging`.
        """
        simulation, place = self.simulation, self.simulation.index(silo)
        data = simulation.data(silo)
        form, arrays = trees.take_apart(data)
        key = keys.fold(jax.random.key(seed), np.uint32(place))
        given = (key, simulation.down(), simulation.own(silo), arrays)
        values, diverging = silo_programs.local_posterior(self.algorithm, form, draws, *given)
        latents, seen = self._structured.local_latents(data), self._structured.observed_values(data)
        logs = {f"log {name}" for name in seen}
        groups = {
            "posterior": {name: value for name, value in values.items() if name not in seen and name not in logs},
            "posterior_predictive": {name: value for name, value in values.items() if name in seen},
            "log_likelihood": {name: values[f"log {name}"] for name in seen},
            "observed_data": seen,
            "sample_stats": {"diverging": diverging} if self.algorithm.samples else {},
        }
        return _inference_data(groups, latents, by_chain=True)

    def _predicted(self, silo: str, form: trees.Form, arrays: Any, draws: int, seed: int, *, own: bool) -> Values:
        key = keys.fold(jax.random.key(seed), np.uint32(self.simulation.index(silo)))
        family = self.algorithm.family
        return silo_programs.predict(family, self._structured, form, draws, own, key, self.shared, self.eta(silo), arrays)

    def predictive(self, silo: str, data: Any, draws: int = 200, seed: int = 0) -> dict[str, Array]:
        """Draws of what a silo would observe on new rows, and of the model's deterministic sites: (draws, …) for each.

        What the silo has outside plates is drawn from its posterior, and so are elements that rows refer to by index, as
        `a[data["county"]]` does; other elements of plates are new and come from their prior, or from what an encoder gives.
        What is not known of the new rows may be None where the model allows `obs=None`.
        """
        form, arrays = naming_silo(silo, trees.take_apart, data)
        laid_out = like(self.simulation.data(silo), trees.put_together(form, arrays))
        form, arrays = trees.take_apart(laid_out)
        return self._predicted(silo, form, arrays, draws, seed, own=False)

    def adapt(self, name: str, data: Any, seed: int = 0) -> SiloFit:
        """This fit with one silo more, which did not train: it fits its own latents to its data and changes nothing else."""
        simulation, algorithm = self.simulation, self.simulation.algorithm
        if name in simulation.names:
            raise UserError(f"there is a silo {name!r} already; give the new one another name")
        old = {silo: simulation.data(silo) for silo in simulation.names}
        grown = SiloSimulation(algorithm, {**old, name: data}, seed=simulation.seed)
        grown.state, grown.round = simulation.state, simulation.round
        for silo in simulation.names:
            grown.put(silo, simulation.own(silo))
        key = keys.fold(jax.random.key(seed), np.uint32(keys.ADAPT))
        form, arrays = grown.parts[grown.index(name)]
        own = grown.own(name, padded=True)
        grown.put(name, silo_programs.adapt(algorithm, form, key, simulation.down(), own, arrays))
        return SiloFit.of(grown, self.result, self.history, *self.adapted, name)

    def khat(self, draws: int = 1000, inner: int = INNER, seed: int = 0) -> float:
        """PSIS k̂ of q(Z_G); see `diagnose`."""
        return self.diagnose(draws, inner, seed)["khat"]

    def diagnose(self, draws: int = 1000, inner: int = INNER, seed: int = 0) -> dict[str, float]:
        """How q(Z_G) compares with the federated log density: k̂ of its importance weights, and their effective share.

        Each silo tells log p(y_j | Z_G) at draws of Z_G, by importance sampling from its q(Z_L | Z_G) with `inner` draws; only
        the sum over silos is needed. The effective share `ess` is 1 where q is the posterior. A k̂ above 0.7 says that the
        posterior has heavier tails than q.
        """
        z = _global_draws(self.shared.eta, draws, seed)
        log_q = jax.vmap(lambda one: gaussian.log_global(self.shared.eta, one))(z)
        weights, khat = smoothed(np.asarray(self.log_density(z, inner, seed), float) - np.asarray(log_q, float))
        return {"khat": khat, "ess": float(1 / np.sum(weights**2) / draws)}

    def log_density(self, z: Float[Array, "s n"], inner: int = INNER, seed: int = 0) -> Float[Array, " s"]:
        """log p(Z_G) + Σ_j log p(y_j | Z_G) at draws of Z_G on the real line; `inner` draws of silos' latents for each."""
        points = np.asarray(z)
        return jnp.asarray(self.sampler(len(points), inner, seed).ask(points, 1).evidence + self._log_prior(points))

    def eta(self, silo: str) -> variational.Locals:
        """η_L of a silo, written with the μ_G that the server has."""
        return self.algorithm.eta(self.simulation.own(silo), self.shared)


def global_numbers(structured: Structured, shared: variational.Shared, z: Float[np.ndarray, "s n"]) -> dict[str, np.ndarray]:
    """The numbers of Z_G by name, as the population's sites have them and, where these are constrained, on the real line."""
    of = functools.partial(silo_programs.global_values, structured, shared.theta)
    values = by_blocks(of, z, shared.eta.mean.dtype)
    found, place = dict(numbers({name: values[name] for name in structured.global_names()}, LARGEST)), 0
    for latent in structured.global_latents():
        for offset in range(latent.width):
            label = latent.name if latent.width == 1 else f"{latent.name}[{offset}]"
            column = np.asarray(z[:, place + offset], float)
            if not (label in found and np.allclose(found[label], column)):
                found[f"{label} on the real line"] = column
        place += latent.width
    return found


def kept_draws(folder: Path) -> Float[np.ndarray, "s n"] | None:
    """The corrected draws that a run left in its folder, if it was corrected."""
    arrays, _ = files.read_arrays(folder / SHARED, "the shared model", AGAIN)
    return arrays.get(CORRECTED)


def summarised(draws: Sequence[tuple[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Mean, standard deviation and 5 % and 95 % quantiles of each number."""
    found = {}
    for name, value in draws:
        low, high = np.quantile(value, [0.05, 0.95])
        found[name] = {"mean": float(value.mean()), "sd": float(value.std()), "5%": float(low), "95%": float(high)}
    return found


def _inseparable(simulation: SiloSimulation) -> str:
    structured = simulation.algorithm.structured
    firsts = (simulation.data(simulation.names[group.places[0]]) for group in simulation.groups)
    return next((why for data in firsts if (why := inseparable(structured, data))), "")


def _global_draws(q: gaussian.Global, count: int, seed: int) -> Float[Array, "s n"]:
    return silo_programs.global_draws(q, jax.random.normal(jax.random.key(seed), (count, q.mean.size)))


def _inference_data(
    groups: dict[str, dict[str, Any]], latents: list[Latent] | None = None, *, by_chain: bool = False
) -> az.InferenceData:
    """Draws as one chain, or by chain; an axis that is a plate has its name."""
    dims = {}
    for latent in latents or []:
        value = np.asarray(groups["posterior"][latent.name])
        value = value[0] if by_chain else value
        names = [f"{latent.name}_dim_{axis}" for axis in range(value.ndim - 1)]
        if latent.plate.name:
            names[value.ndim - 1 - latent.transform.codomain.event_dim + latent.plate.dim] = latent.plate.name
        dims[latent.name] = names
    arrays = {group: {name: np.asarray(value) for name, value in sites.items()} for group, sites in groups.items() if sites}
    for group in () if by_chain else arrays.keys() - {"observed_data"}:
        arrays[group] = {name: value[None] for name, value in arrays[group].items()}
    return quietly("arviz").from_dict(dims=dims, **arrays)
