"""SFVI, SFVI-Avg and PVI over silos: exact answers, invariance, participation, what is sent, and runs that go on."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import ROOT, assert_close, assert_same
from hierarchy import DEVIATION, EVIDENCE, MEAN, OWN, WEIGHT, Y, partition, population, sampled, silo
from table import TABLE, methods

from fedbayes import files
from fedbayes.algorithms.pvi import PVI
from fedbayes.algorithms.sfvi import SFVI
from fedbayes.algorithms.sfvi_avg import SFVIAvg
from fedbayes.engine.silo_data import plan
from fedbayes.engine.silos import SiloSimulation
from fedbayes.errors import UserError
from fedbayes.primitives import factored, gaussian
from fedbayes.primitives.variational import Family
from fedbayes.results.simulate import simulate
from fedbayes.results.structured_fit import SiloFit
from fedbayes.results.structured_run import fit_silos


def started(name, data, rounds=4, **options):
    return SiloSimulation(plan(TABLE[name](population, silo), data, rounds), data, **options)


def advanced(simulation, rounds):
    return np.concatenate([done.trace["bound"] for done in simulation.advance(rounds)])


def deviation(q):
    return float(jnp.sqrt(gaussian.covariance(q)[0, 0]))


def is_exact(fit):
    q = fit.shared.eta
    assert abs(float(q.mean[0]) - MEAN) < 0.01 * DEVIATION
    assert deviation(q) == pytest.approx(DEVIATION, rel=0.01)


def test_sfvi_is_exact_on_a_conjugate_hierarchy():
    fit = simulate(SFVI(population, silo, lr=0.05, decay=1e-3), partition(5, 7), 4000)
    is_exact(fit)
    own = fit.simulation.own("s1").eta["units"]
    np.testing.assert_allclose(own.C[:, 0, 0], 1 - WEIGHT, rtol=0.01)
    np.testing.assert_allclose(np.exp(own.log_scale), OWN, rtol=0.01)
    np.testing.assert_allclose(own.mean[:, 0], WEIGHT * Y[5:] + (1 - WEIGHT) * MEAN, atol=0.01 * DEVIATION)
    assert fit.bound[-1] == pytest.approx(EVIDENCE, abs=0.01)
    assert fit.khat() < 0.3


@pytest.mark.parametrize(
    ("damping", "sizes", "options"),
    [
        (0.5, (5, 3, 4), {}),
        pytest.param(1.0, (4, 4, 4), {"in_turn": True}, marks=pytest.mark.slow),
        pytest.param(0.7, (4, 4, 4), {"cohort": 2}, marks=pytest.mark.slow),
        pytest.param(1.0, (5, 3, 4), {"in_turn": True}, marks=pytest.mark.slow),
        pytest.param(0.7, (5, 3, 4), {"cohort": 2}, marks=pytest.mark.slow),
    ],
)
def test_pvi_is_exact_on_a_conjugate_hierarchy_however_silos_take_turns(damping, sizes, options):
    fit = simulate(PVI(population, silo, lr=0.05, steps=600, decay=1e-3, damping=damping), partition(*sizes), 18, **options)
    is_exact(fit)
    # q and the silos' factors stay one: t_0 and the t_j multiply to q.
    state, simulation = fit.simulation.state, fit.simulation
    factors = [factored.arrived(simulation.own(name), simulation.down()) for name in simulation.names]
    for found, expected in zip(map(sum, zip(state.prior, *factors, strict=True)), (0.0, 1.0), strict=True):  # q is N(0, I)
        np.testing.assert_allclose(found, np.full(found.shape, expected), atol=1e-3)
    if "cohort" not in options:  # else it is scaled from unequal silos
        assert fit.bound[-9:].mean() == pytest.approx(EVIDENCE, abs=0.2)  # a round's estimate has a standard error of 0.15


@pytest.mark.slow
def test_sfvi_avg_of_silos_that_are_alike_is_sfvi():
    """Where each silo's data is the others', N/N_j copies of it are the data of all, so averaging costs nothing."""
    alike = {name: {"y": Y[:6]} for name in ("a", "b")}
    for family in (Family(), Family(full=False)):
        fit = simulate(SFVIAvg(population, silo, family=family, steps=300, lr=0.05, decay=1e-3), alike, 8)
        precision = 1 / 2.0**2 + 12 / (0.7**2 + 0.5**2)
        assert float(fit.shared.eta.mean[0]) == pytest.approx(2 * Y[:6].sum() / 0.74 / precision, abs=0.01)
        assert deviation(fit.shared.eta) == pytest.approx(precision**-0.5, rel=0.02)
        own = fit.simulation.own("a").eta["units"]
        np.testing.assert_allclose(np.exp(own.log_scale), OWN, rtol=0.02)  # the whole local term is scaled: not too narrow


def test_a_factor_may_be_negative_but_q_may_not():
    q, change = gaussian.Natural(jnp.zeros(1), jnp.eye(1)), gaussian.Natural(jnp.zeros(1), -3.0 * jnp.eye(1))
    assert float(factored.proper_part(q, change)) == 0.25
    assert float(factored.proper_part(q, gaussian.Natural(jnp.zeros(1), -0.5 * jnp.eye(1)))) == 1.0
    assert float(factored.proper_part(q, gaussian.Natural(jnp.zeros(1), -1e9 * jnp.eye(1)))) == 0.0


@pytest.mark.slow
def test_pvi_with_a_prior_that_is_not_gaussian():
    """A rate with a Gamma prior and Poisson counts: the posterior is Gamma, nearly normal on the log scale."""

    def rates():
        return numpyro.sample("rate", dist.Gamma(3.0, 1.0))

    def counts(rate, data):
        numpyro.sample("y", dist.Poisson(rate), obs=data["y"])

    data = {"a": {"y": np.array([3, 5, 4])}, "b": {"y": np.array([6, 2, 4, 5])}}
    fit = simulate(PVI(rates, counts, lr=0.05, steps=400, decay=1e-3, family=Family(draws=4)), data, 12)
    drawn = np.asarray(fit.draws(20_000)["rate"])
    assert drawn.mean() == pytest.approx(32 / 8, rel=0.01)
    assert drawn.std() == pytest.approx(np.sqrt(32) / 8, rel=0.03)
    assert fit.result["ess"] > 0.95


@pytest.mark.slow
def test_empirical_bayes_finds_the_likelihood_s_best_parameter():
    """y_i ~ N(z_i, 1), z_i ~ N(0, τ²): with exact local posteriors τ² tends to mean(y²) − 1."""

    def nothing():
        return numpyro.param("spread", 1.0, constraint=dist.constraints.positive)

    def effects(spread, data):
        with numpyro.plate("units", len(data["y"])):
            z = numpyro.sample("z", dist.Normal(0.0, spread))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=data["y"])

    y = np.random.default_rng(1).normal(size=40).astype(np.float32) * 2.0
    fit = simulate(SFVI(nothing, effects, lr=0.05, decay=1e-2), {"a": {"y": y[:15]}, "b": {"y": y[15:]}}, 2500)
    assert float(fit.theta["spread"]) ** 2 == pytest.approx(np.mean(y**2) - 1, rel=0.02)
    assert "spread" in str(fit)
    with pytest.raises(UserError, match=r"PVI has no θ, but the model has spread; give it a prior, or use SFVI"):
        simulate(PVI(nothing, effects), {"a": {"y": y}}, 2)


@pytest.mark.slow
def test_an_encoder_finds_what_each_unit_s_own_parameters_find():
    """q(effect | y) = N(a y + b, e^c): the best of it is what free parameters without coupling reach."""

    def encoder(data):
        a, b, c = (numpyro.param(name, 0.0) for name in ("slope", "shift", "width"))
        return {"units": ((a * data["y"] + b)[:, None], jnp.full((data["y"].shape[0], 1), 1.0) * c)}

    def fitted(**options):
        algorithm = SFVI(population, silo, family=Family(coupled=False, draws=4, **options), lr=0.05, decay=1e-2)
        return simulate(algorithm, partition(5, 7), 1500)

    free, amortised = fitted(), fitted(encoder=encoder)
    assert amortised.simulation.own("s0").eta == {}
    np.testing.assert_allclose(amortised.bound[-20:].mean(), free.bound[-20:].mean(), atol=0.05)
    assert float(amortised.shared.theta["slope"]) == pytest.approx(WEIGHT, abs=0.03)
    assert float(jnp.exp(amortised.shared.theta["width"])) == pytest.approx(OWN, rel=0.05)
    assert amortised.local_posterior("s1", 50).posterior["effect"].shape == (1, 50, 7)
    with pytest.raises(UserError, match="encoder gives elsewhere, but the silo has latents in units"):
        simulate(SFVI(population, silo, family=Family(encoder=lambda data: {"elsewhere": (1, 2)})), partition(12), 2)


@pytest.mark.slow
def test_subsampled_plates_and_partial_participation_reach_the_answer():
    fit = simulate(SFVI(population, sampled, lr=0.05, decay=1e-3), partition(6, 6), 4000, cohort=1)
    assert abs(float(fit.shared.eta.mean[0]) - MEAN) < 0.15 * DEVIATION
    assert deviation(fit.shared.eta) == pytest.approx(DEVIATION, rel=0.15)
    assert fit.local_posterior("s0", 20).posterior["effect"].shape == (1, 20, 6)


INVARIANCE = """
import sys; sys.path.insert(0, "tests")
import conftest, jax, jax.numpy as jnp, numpy as np
from test_silos import iterates
jax.config.update("jax_enable_x64", True)
print(iterates())
"""


def iterates(steps=20):
    """How far SFVI over 2 and 5 silos moves from SFVI over one, with the same noise."""
    found = {}
    for counts in ((12,), (5, 7), (1, 2, 3, 4, 2)):
        algorithm = SFVI(population, silo, lr=0.02, decay=1.0)
        parts, edges = [part["y"].astype(float) for part in partition(*counts).values()], np.cumsum((0, *counts))
        data = [{"y": jnp.asarray(part)} for part in parts]
        whole = {"y": jnp.asarray(np.concatenate(parts))}
        server, local = jax.jit(
            lambda algorithm=algorithm, data=data: (
                algorithm.init_server(jax.random.key(0)),
                [algorithm.init_local(jax.random.key(0), part) for part in data],
            )
        )()

        @jax.jit
        def iterate(server, local, number, algorithm=algorithm, data=data, whole=whole, edges=edges):
            key = jax.random.fold_in(jax.random.key(1), number)
            down = algorithm.broadcast(key, server)
            noise = algorithm.family.noise(key, algorithm.structured, whole)["units"]
            replies = [
                algorithm.respond({"units": noise[:, :, edges[i] : edges[i + 1]]}, down, local[i], part)
                for i, part in enumerate(data)
            ]
            up = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *[reply[0] for reply in replies])
            return algorithm.server(key, server, down, up), [reply[1] for reply in replies]

        for number in range(steps):
            server, local = iterate(server, local, number)
        found[counts] = (server.shared, jnp.concatenate([state.eta["units"].mean for state in local]))
    reference = jax.tree.leaves(found.pop((12,)))
    return max(
        float(jnp.abs(a - b).max()) for other in found.values() for a, b in zip(jax.tree.leaves(other), reference, strict=True)
    )


def test_the_same_noise_gives_the_same_iterates_for_any_partition():
    assert iterates() < 1e-5


@pytest.mark.slow
def test_in_double_precision_partitions_agree_to_ten_digits():
    """In a process of its own: JAX's precision is set once."""
    run = subprocess.run([sys.executable, "-c", INVARIANCE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(run.stdout.split()[-1]) < 1e-10


@methods("silos", often=("sfvi-avg",))
@pytest.mark.parametrize("options", [{"cohort": 2}, pytest.param({"in_turn": True}, marks=pytest.mark.slow)])
def test_silos_that_are_absent_keep_their_state(name, options):
    same, mixed = started(name, partition(4, 4, 4), **options), started(name, partition(3, 4, 5), **options)
    assert same.compiled
    assert not mixed.compiled
    for simulation in (same, mixed):
        before = {silo: jax.device_get(simulation.own(silo)) for silo in simulation.names}
        advanced(simulation, 1)
        absent = [silo for place, silo in enumerate(simulation.names) if place not in simulation.chosen(1)]
        assert absent
        for other in absent:
            assert_same(simulation.own(other), before[other])


def test_silos_may_differ_in_structure_and_hold_plain_numbers_and_frames():
    def mixed(mean, data):
        extra = numpyro.sample("shift", dist.Normal(0.0, 0.1)) if data.get("shifted") else 0.0
        with numpyro.plate("units", data["n"]):
            numpyro.sample("y", dist.Normal(mean + extra, 1.0), obs=data["y"])

    first, second = {"n": 5, "y": Y[:5], "shifted": True}, {"n": 7, "y": list(Y[5:])}
    fit = simulate(SFVI(population, mixed), {"a": first, "b": {**second, "y": np.asarray(second["y"])}}, 20)
    assert set(fit.simulation.own("a").eta) == {""}
    assert fit.simulation.own("b").eta == {}
    frame = simulate(SFVI(population, silo), {"a": pd.DataFrame({"y": Y})}, 5)
    assert_same(frame.shared, simulate(SFVI(population, silo), {"a": {"y": Y}}, 5).shared)


@pytest.mark.slow
def test_sfvi_starts_where_sfvi_avg_ended():
    data = partition(5, 7)
    first = simulate(SFVIAvg(population, silo, steps=100, lr=0.05), data, 4)
    fit = simulate(SFVI(population, silo, lr=1e-6), data, 1, start=first)
    assert_close(fit.shared.eta, first.shared.eta, 1e-4)
    assert_close(fit.simulation.own("s1").eta, first._eta("s1"), 1e-4)
    again = simulate(SFVIAvg(population, silo, steps=1, lr=1e-9), data, 1, start=first)
    assert_close(again.simulation.own("s1").eta, first._eta("s1"), 1e-4)  # not centred a second time
    with pytest.raises(UserError, match="a fit to start from must be of the same silos"):
        simulate(SFVI(population, silo), {"other": {"y": Y}}, 1, start=first)
    with pytest.raises(UserError, match="PVI cannot start from another method's fit; SFVI can"):
        simulate(PVI(population, silo), data, 1, start=first)


def test_posteriors_for_arviz_and_a_silo_that_never_trained():
    fit = simulate(SFVI(population, silo, lr=0.05, decay=1e-2, adapt_steps=800), partition(5, 7), 1500)
    assert fit.posterior(300).posterior["mean"].shape == (1, 300)
    local = fit.local_posterior("s1", 4000)
    assert local.posterior["effect"].dims == ("chain", "draw", "units")
    np.testing.assert_allclose(local.observed_data["y"], Y[5:])
    effect = np.asarray(local.posterior["effect"][0])
    np.testing.assert_allclose(effect.mean(axis=0), WEIGHT * Y[5:] + (1 - WEIGHT) * MEAN, atol=0.04)
    marginal = np.hypot(OWN, (1 - WEIGHT) * DEVIATION)
    np.testing.assert_allclose(effect.std(axis=0), marginal, rtol=0.06)
    predictive = np.asarray(local.posterior_predictive["y"][0])
    np.testing.assert_allclose(predictive.std(axis=0), np.hypot(marginal, 0.5), rtol=0.06)
    new = fit.predictive("s0", {"y": np.zeros(3, np.float32)}, draws=6000)["y"]
    np.testing.assert_allclose(new.std(axis=0), np.sqrt(DEVIATION**2 + 0.7**2 + 0.5**2), rtol=0.05)
    grown = fit.adapt("new", {"y": Y[:3]})
    own = np.asarray(grown.local_posterior("new", 4000).posterior["effect"][0])
    np.testing.assert_allclose(own.mean(axis=0), WEIGHT * Y[:3] + (1 - WEIGHT) * MEAN, atol=0.05)
    assert_same(grown.shared, fit.shared)
    assert grown.diagnose(200) == fit.diagnose(200)  # q says nothing of a silo that came later
    with pytest.raises(UserError, match="there is a silo 's0' already; give the new one another name"):
        fit.adapt("s0", {"y": Y[:3]})
    with pytest.raises(UserError, match="there is no silo 'nowhere'; there are s0, s1"):
        fit.local_posterior("nowhere")


def test_a_factor_is_a_likelihood_without_data():
    def weighed(mean, data):
        numpyro.factor("fit", -0.5 * jnp.sum((data["y"] - mean) ** 2) / (0.7**2 + 0.5**2))

    fit = simulate(SFVI(population, weighed, lr=0.05, decay=1e-3), partition(5, 7), 1500)
    is_exact(fit)
    assert set(fit.local_posterior("s0", 10).groups()) == {"posterior"}


@pytest.mark.slow
def test_k_hat_tells_a_q_that_is_too_narrow():
    fit = simulate(SFVI(population, silo, lr=0.05, decay=1e-2), partition(5, 7), 1500)
    good = fit.khat()
    q = fit.shared.eta
    state = fit.simulation.state
    narrow = q._replace(mean=q.mean + 3 * DEVIATION, log_scale=q.log_scale - 1.5)
    fit.simulation.state = state._replace(shared=state.shared._replace(eta=narrow))
    assert good < 0.5
    assert SiloFit.of(fit.simulation, fit.result, fit.history).khat() > 0.7


@pytest.mark.slow
def test_importance_weights_mend_what_the_family_misses():
    """Without coupling q is a fifth too narrow; resampled by its weights it is right."""
    family = Family(coupled=False, draws=4)
    fit = simulate(SFVI(population, silo, family=family, lr=0.05, decay=1e-2), partition(5, 7), 1500)
    assert deviation(fit.shared.eta) < 0.85 * DEVIATION
    mended = np.asarray(fit.posterior(8000, corrected=True).posterior["mean"])
    assert mended.std() == pytest.approx(DEVIATION, rel=0.04)
    assert mended.mean() == pytest.approx(MEAN, abs=0.06 * DEVIATION)
    state = fit.simulation.state
    far = state.shared.eta._replace(mean=state.shared.eta.mean + 2.0)
    fit.simulation.state = state._replace(shared=state.shared._replace(eta=far))
    far = SiloFit.of(fit.simulation, fit.result, fit.history)
    mended = np.asarray(far.posterior(4000, corrected=True).posterior["mean"])  # 8 sd away, it takes a few rounds more
    assert mended.mean() == pytest.approx(MEAN, abs=0.1 * DEVIATION)
    with pytest.raises(UserError, match="the weights cannot be trusted after 1 rounds"):
        far.correct(rounds=1)


def test_no_diagnosis_where_plates_cannot_be_weighed_on_their_own():
    def outside(mean, data):
        with numpyro.plate("units", 5):
            effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(effect.sum(), 1.0), obs=data["y"].sum())

    fit = simulate(SFVI(population, outside), {"a": {"y": Y}}, 3)
    assert fit.result["khat"] is None
    assert fit.result["verdict"]["verdict"] == "not checked"
    why = "y depends on latents of several elements of plate 'units' at once"
    assert why in fit.result["verdict"]["reasons"][-1]
    with pytest.raises(UserError, match=f"{why}, so draws cannot be weighed"):
        fit.diagnose()


class Stop(Exception):
    pass


@methods("silos", often=("sfvi-avg",))
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedbayes.results.structured_run.CHECKPOINT", 0.0)
    data, algorithm = partition(4, 4, 4), TABLE[name](population, silo)
    whole = fit_silos(algorithm, data, 6, folder=tmp_path / "whole")

    def kill(simulation, bound):
        if simulation.round >= 4:
            raise Stop

    with pytest.raises(Stop):
        fit_silos(algorithm, data, 6, folder=tmp_path / "killed", callbacks=(kill,))
    again = fit_silos(algorithm, data, 6, folder=tmp_path / "killed", resume=True)
    assert_same(again.simulation.state, whole.simulation.state)
    assert_same(again.simulation.states, whole.simulation.states)
    assert again.history == whole.history
    assert (tmp_path / "killed" / "result.json").read_text() == (tmp_path / "whole" / "result.json").read_text()
    finished = fit_silos(algorithm, data, 6, folder=tmp_path / "whole", resume=True)
    assert_same(finished.simulation.state, whole.simulation.state)
    assert finished.result == files.read_json(tmp_path / "whole" / "result.json") == again.result
    for file in ("posterior.nc", "posterior.png", "bound.png"):
        assert (tmp_path / "whole" / file).stat().st_size > 1000
    with pytest.raises(UserError, match="is a run with another"):
        fit_silos(algorithm, partition(4, 3, 5), 6, folder=tmp_path / "whole", resume=True)


@pytest.mark.slow
def test_ctrl_c_keeps_the_run(tmp_path):
    data, asked = partition(5, 7), []
    with pytest.raises(KeyboardInterrupt):
        fit_silos(
            SFVI(population, silo),
            data,
            400,
            folder=tmp_path,
            callbacks=(lambda simulation, bound: asked.append(simulation.round),),
            stopped=lambda: bool(asked) and asked[-1] > 10,
        )
    fit = fit_silos(SFVI(population, silo), data, 400, folder=tmp_path, resume=True)
    assert_same(fit.simulation.state, fit_silos(SFVI(population, silo), data, 400).simulation.state)


REFUSED = {
    "there is no silo; give at least one": lambda: simulate(SFVI(population, silo), {}, 3),
    "rounds is 0, but a run has at least one": lambda: simulate(SFVI(population, silo), partition(12), 0),
    "silo 's0': silo reads 'y', which its data": lambda: simulate(SFVI(population, silo), {"s0": {"x": Y}}, 3),
    "silo 'b': its data holds object, but data is arrays of numbers": lambda: simulate(
        SFVI(population, silo), {"a": {"y": Y}, "b": {"y": np.array(["x", "y"], object)}}, 3
    ),
    "data is list, but SFVI fits silos: give a dict": lambda: simulate(SFVI(population, silo), [Y], 3),
    "the cohort is 3 silos a round, but only 2 take part": lambda: simulate(
        SFVI(population, silo), partition(5, 7), 3, cohort=3
    ),
    "in_turn visits one silo a round, so it cannot be combined": lambda: simulate(
        SFVI(population, silo), partition(5, 7), 3, cohort=1, in_turn=True
    ),
    "seed is -1, but a seed is not negative": lambda: simulate(SFVI(population, silo), partition(12), 3, seed=-1),
    "the parameter extra is only in silo 's1'; name it in population": lambda: simulate(
        SFVI(population, extra_parameter), partition(5, 7), 3
    ),
    "silo 's0': encoder gives units a mean of shape (5, 1) and a log-scale of shape (5, 2)": lambda: simulate(
        SFVI(population, silo, family=Family(encoder=lambda data: {"units": (jnp.zeros((5, 1)), jnp.zeros((5, 2)))})),
        partition(5, 7),
        3,
    ),
    "PVI needs a full covariance": lambda: PVI(population, silo, family=Family.mean_field()),
    "the parameter w has shape (5,) in silo 's0' and (7,) in silo 's1', but it is shared": lambda: simulate(
        SFVI(population, shaped_by_data), partition(5, 7), 3
    ),
    "silo 's0': the parameter start starts from the silo's data, which would reach every silo": lambda: simulate(
        SFVI(population, started_by_data), partition(5, 7), 3
    ),
    "silo 's0': silo(population, data) does not fit this data: size of plate should be positive": lambda: simulate(
        SFVI(population, silo), {"s0": {"y": Y[:0]}, "s1": {"y": Y}}, 3
    ),
    "two silos have the same name; give each its own": lambda: simulate(
        SFVI(population, silo), {1: {"y": Y}, "1": {"y": Y}}, 3
    ),
    "bound is 0, but it is at least 1": lambda: Family(bound=0),
    "round 2, silo 's0': its numbers are not finite": lambda: simulate(SFVI(population, silo, lr=1e30), partition(5, 7), 9),
    "silo 's0': its numbers are not finite": lambda: simulate(SFVI(population, silo, lr=1e30), partition(5, 7), 9, loop=True),
}


def extra_parameter(mean, data):
    more = numpyro.param("extra", 0.0) if data["y"].shape[0] == 7 else 0.0
    numpyro.sample("y", dist.Normal(mean + more, 1.0), obs=data["y"])


def shaped_by_data(mean, data):
    w = numpyro.param("w", jnp.zeros(data["y"].shape[0]))
    numpyro.sample("y", dist.Normal(mean + w, 1.0), obs=data["y"])


def started_by_data(mean, data):
    start = numpyro.param("start", data["y"].mean())
    numpyro.sample("y", dist.Normal(mean + start, 1.0), obs=data["y"])


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_gets_one_sentence(sentence):
    with pytest.raises(UserError) as caught:
        REFUSED[sentence]()
    assert str(caught.value).startswith(sentence) or sentence in str(caught.value)
    assert "\n" not in str(caught.value)
