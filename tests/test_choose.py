"""Settings of `adapt` that a federation chooses: by newcomers' scores, the same everywhere, kept with the run."""

import dataclasses
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Stop, assert_same, stop_after
from deployed import deployment, parts_of

import fedbayes as fb
from fedbayes import wire
from fedbayes.algorithm import settled
from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedper import FedPer
from fedbayes.data import Clients
from fedbayes.deploy.coordinator import Coordinator
from fedbayes.engine import choose, keys
from fedbayes.engine.choose import Choice, Choosing, Plan, Up, candidates, decided
from fedbayes.errors import UserError
from fedbayes.models import Categorical, linear
from fedbayes.primitives.training import Training, shuffle
from fedbayes.results.posterior import Posterior

ROUNDS = 10


def people(own, clients=12, rows=40, seed=0, hold_out=3):
    """Clients with labels from a linear model, of which each has its own intercepts of this spread."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(clients * rows, 4)).astype(np.float32)
    client = np.repeat(np.arange(clients), rows)
    logits = x @ random.normal(size=(4, 3)) + own * random.normal(size=(clients, 3))[client]
    y = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    return Clients.build(x, y, client, test=0.5, seed=seed).hold_out(hold_out, seed=seed)


@pytest.fixture(scope="module")
def different():
    return people(own=3.0)


@pytest.fixture(scope="module")
def network():
    return linear((4,), Categorical(3))


@pytest.fixture(scope="module")
def algorithm(network):
    return FedAvg(network, train=Training(lr=0.3))


@pytest.fixture(scope="module")
def fit(algorithm, different):
    return fb.simulate(algorithm, different, ROUNDS, modes=("global", "adapted"))


def unseen(fit, mode="adapted"):
    return fit.evaluation.summary()[mode]["unseen"]["log_score"]["rows"]


def test_newcomers_who_differ_are_adapted_to(fit, algorithm, different):
    before = fb.simulate(algorithm, different, ROUNDS, modes=("adapted",), choose=False)
    assert unseen(fit) > unseen(fit, "global") + 0.3
    assert unseen(fit) > unseen(before) + 0.2  # at the default step size hardly anything moves
    told = fit.result["choice"]["up to 50 rows"]
    assert told["settings"]["tune.lr"] > 0
    assert told["gain"] > told["error"] > 0


def test_newcomers_who_do_not_differ_are_left_alone(network):
    alike = people(own=0.0)
    fit = fb.simulate(FedAvg(network, train=Training(lr=0.3)), alike, 30, modes=("global", "adapted", "adapted:5"))
    assert fit.result["choice"]["up to 10 rows"]["settings"]["tune.lr"] <= 0.001
    assert unseen(fit, "adapted:5") == pytest.approx(unseen(fit, "global"), abs=0.02)  # ten gentle steps, if any


def test_no_candidate_is_given_for_what_a_user_has_set(network):
    assert candidates(FedAvg(network)).names == ("tune.lr", "tune.steps")
    assert candidates(FedAvg(network, tune=Training(epochs=5, lr=0.02, momentum=0.9))).names == ("tune.steps",)
    assert candidates(fb.KNNPer(network)) == ((), ())


def test_a_step_size_of_zero_does_not_adapt(algorithm, different):
    names, values = candidates(algorithm)
    assert dict(zip(names, values[0], strict=True)) == {"tune.lr": 0.001, "tune.steps": 10}  # where nothing is chosen
    still = next(one for one in values if one[names.index("tune.lr")] == 0)
    server = algorithm.init_server(jax.random.key(0))
    down, data = algorithm.broadcast(jax.random.key(0), server), different.example
    data = jax.tree.map(jnp.asarray, data)
    choice = Choice(names, np.tile(np.asarray(still, np.float32), (3, 1)))
    adapted = choose.adapt(algorithm, choice, jax.random.key(1), down, algorithm.init_local(jax.random.key(0), data), data)
    assert_same(adapted.params, down.params)


def test_one_newcomer_is_little_evidence(algorithm):
    values = candidates(algorithm).values
    score = np.zeros((3, len(values)))
    score[:, 3] = 20.0  # .2 a row, with a standard error of .1 by rows
    told = Up(score, np.full_like(score, 100 * (1.0 + 0.04)), np.full(3, 100.0))
    many, one = (decided(algorithm, told, repeats=1, newcomers=count) for count in (1000, 1))
    np.testing.assert_allclose([many.error[0], one.error[0]], [0.1, 0.3], rtol=0.01)
    assert many.gain[0] == pytest.approx(0.2)
    assert one.gain[0] == 0
    np.testing.assert_array_equal(one.choice.values[0], np.float32(values[0]))


def test_a_choice_depends_on_the_number_of_rows(algorithm, different):
    down = algorithm.broadcast(jax.random.key(0), algorithm.init_server(jax.random.key(0)))
    local = algorithm.init_local(jax.random.key(0), different.example)
    choice = Choice(("tune.lr",), np.array([[0.0], [0.3], [0.0]], np.float32))
    x, y = jnp.ones((60, 4)), jnp.zeros(60, jnp.int32)
    for rows, moves in ((10, False), (11, True), (50, True), (51, False)):
        data = fb.algorithm.Data(x, y, jnp.arange(60) < rows)
        new = choose.adapt(algorithm, choice, jax.random.key(1), down, local, data)
        assert (not jnp.allclose(new.params["head"]["bias"], down.params["head"]["bias"])) == moves


def test_the_best_is_taken_where_it_is_ahead_by_its_error(algorithm):
    C = len(candidates(algorithm).values)
    score, square = np.zeros((3, C)), np.zeros((3, C))
    score[:, 4], square[:, 4] = 50.0, 100.0
    found = decided(algorithm, Up(score, square, np.array([400.0, 200.0, 100.0])), repeats=4)
    np.testing.assert_allclose(found.gain, [0.125, 0.25, 0.5])
    by_rows = np.array([(0.25 - 0.125**2) * 4 / 400, (0.5 - 0.0625) * 4 / 200, 0.75 * 4 / 100])
    np.testing.assert_allclose(found.error, np.sqrt(by_rows * (1 + choose.BETWEEN / choose.NEWCOMERS)))
    assert (found.choice.values == np.float32(candidates(algorithm).values[4])).all()
    noisy = decided(algorithm, Up(score, 1e4 * square, np.array([400.0, 0.0, 0.0])), repeats=4)
    assert (noisy.choice.values == np.float32(candidates(algorithm).values[0])).all()  # and sizes without rows follow
    none = decided(algorithm, Up(score, square, np.zeros(3)))
    np.testing.assert_allclose(none.choice.values[0], [algorithm.tune.lr, algorithm.tune.steps])


@pytest.mark.parametrize("name", ["fedavg", "fedpop", "bpfed"])
def test_a_candidates_score_is_that_of_adapt_with_its_settings(name, network, different):
    algorithm = {
        "fedavg": FedAvg(network),
        "fedpop": fb.FedPop(network),
        "bpfed": fb.BPFed(network, personal=("head/bias",)),
    }[name].planned(ROUNDS, **different.facts)
    rows, key = np.asarray(different.train_counts)[0], jax.random.key(3)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), different.train([0], int(rows)))
    data = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, 40)] + [(0, 0)] * (leaf.ndim - 1)), data)  # and padding changes nothing
    down = algorithm.broadcast(key, algorithm.init_server(key))
    local, choosing = algorithm.init_local(key, data), Choosing(algorithm, 1)
    found, _ = jax.jit(choosing.client)(key, down, local, data)

    for place, size in ((0, 5), (2, 3 * int(rows) // 4)):
        folded = jax.random.fold_in(jax.random.fold_in(key, np.uint32(keys.CHOOSE)), place)
        for_rows, for_adapt, for_draws = jax.random.split(folded, 3)
        order = np.asarray(shuffle(for_rows, data))[:rows]
        support, query = (jax.tree.map(lambda leaf, part=part: leaf[part], data) for part in (order[:size], order[size:]))

        @jax.jit
        def score(value, support=support, query=query, for_adapt=for_adapt, for_draws=for_draws):
            own = settled(algorithm, dict(zip(choosing.settings.names, value, strict=True)))
            draws = algorithm.predict(for_draws, down, own.adapt(for_adapt, down, local, support), query.x)
            each = algorithm.likelihood.log_prob(draws, query.y)
            return jnp.sum(jax.nn.logsumexp(each, axis=0) - jnp.log(each.shape[0]))

        expected = [score(np.asarray(value, np.float32)) for value in choosing.settings.values]
        np.testing.assert_allclose(found.score[place], expected, rtol=2e-4)
        assert float(found.rows[place]) == min(choose.QUERY, rows - size)


def test_short_arrays_for_few_rows_change_nothing(algorithm, different, monkeypatch):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), different.train([0], int(different.train_counts[0])))
    key, local = jax.random.key(3), algorithm.init_local(jax.random.key(0), data)
    down = algorithm.broadcast(key, algorithm.init_server(key))
    one, _ = jax.jit(Choosing(algorithm, 2).client)(key, down, local, data)
    monkeypatch.setattr(choose, "CACHE", 1)
    two, _ = jax.jit(Choosing(algorithm, 2).client)(key, down, local, data)
    for mine, theirs in zip(one, two, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_federation_has_a_budget_of_draws():
    plans = [Plan.of(fb.FedAvg(linear((4,), Categorical(2))), 0, np.arange(5 * count), 10) for count in (2, 3, 6, 10)]
    assert [plan.repeats for plan in plans] == [3, 2, 1, 1]
    numbers = Plan.of(fb.FedPop(linear((4,), fb.models.Normal(scale=None))), 0, np.arange(50), 10)
    assert numbers.repeats == 3  # what is a property of the population is told by every draw


def test_a_property_of_the_population_is_one_choice_and_may_lie_between_candidates():
    algorithm = fb.FedPop(linear((4,), fb.models.Normal(scale=None)))
    names, values = candidates(algorithm)
    assert names == ("sigma", "noise")
    assert values[0] == (0.1, 1.0)  # the prior that an undecided federation keeps
    sigma, noise = np.asarray(values)[1:].T
    far = np.where(sigma > 0, np.log(np.maximum(sigma, 1e-3) / 0.3), 10.0)  # σ = 0 does not adapt
    best = np.concatenate([[-100.0], -(far**2) - np.log(noise / 0.6) ** 2])
    score = np.stack([best, 3 * best, np.zeros_like(best)])
    found = decided(algorithm, Up(score, np.ones_like(score), np.array([50.0, 50.0, 0.0])), repeats=1)
    np.testing.assert_allclose(found.choice.values, [[0.3, 0.6]] * 3, rtol=1e-5)  # also where no newcomer has the rows
    still = decided(algorithm, Up(score, 1e9 * np.ones_like(score), np.array([50.0, 50.0, 0.0])), repeats=1)
    np.testing.assert_array_equal(still.choice.values, np.tile(np.float32(values[0]), (3, 1)))


def test_the_width_of_a_known_population_is_found():
    random, width = np.random.default_rng(0), 0.5
    client = np.repeat(np.arange(40), 60)
    x = random.normal(size=(len(client), 4)).astype(np.float32)
    weights = random.normal(size=4) + width * random.normal(size=(40, 4))
    y = (np.sum(x * weights[client], axis=1) + 0.5 * random.normal(size=len(x))).astype(np.float32)
    clients = Clients.build(x, y, client, test=0.25)
    fit = fb.simulate(fb.FedPop(fb.network("linear", clients)), clients, 40, modes=("global",))
    for told in fit.result["choice"].values():
        assert width / 1.5 < told["settings"]["sigma"] * clients.target_moments()[1] < 1.5 * width


def test_newcomers_do_not_train_until_the_choice(algorithm, different):
    plan = Plan.of(algorithm, 0, different.participants, ROUNDS)
    assert (plan.until, len(plan.newcomers)) == (8, 2)
    simulation = fb.Simulation(algorithm, different, plan=plan)
    assert not np.isin(plan.newcomers, simulation.chosen(8)).any()
    assert np.isin(plan.newcomers, simulation.chosen(9)).all()
    assert Plan.of(algorithm, 0, different.participants, 9) is None
    assert Plan.of(algorithm, 0, different.participants[:7], ROUNDS) is None  # a single newcomer says nothing of others
    assert len(Plan.of(algorithm, 0, different.participants[:8], ROUNDS).newcomers) == 2


def test_what_leaves_a_newcomer_are_sums(algorithm, different):
    leaves = [leaf for leaf in wire.manifest(Choosing(algorithm), different.example) if leaf.message == "up"]
    assert {leaf.path: (leaf.shape, leaf.reduction) for leaf in leaves} == {
        "score": ((3, 13), "sum"),
        "square": ((3, 13), "sum"),
        "rows": ((3,), "sum"),
    }


def test_loop_and_coordinator_choose_as_the_simulator(algorithm, network, tmp_path):
    clients = people(own=3.0, clients=4, hold_out=0)
    algorithm = FedPer(network, personal=("head/bias",), train=Training(lr=0.3))
    fit = fb.simulate(algorithm, clients, ROUNDS, seed=5, modes=("adapted",))
    loop = fb.simulate(algorithm, clients, ROUNDS, seed=5, modes=("adapted",), clients="loop")
    coordinator, post = deployment(algorithm.planned(ROUNDS, **clients.facts), parts_of(clients), tmp_path, rounds=ROUNDS)
    result = coordinator.finish(post)
    for label, told in fit.result["choice"].items():
        for other in (loop.result, result):
            assert other["choice"][label]["settings"] == told["settings"]
            assert other["choice"][label]["gain"] == pytest.approx(told["gain"], abs=1e-4)
    adapted = result["metrics"]["adapted"]["participating"]["log_score"]["rows"]
    assert adapted == pytest.approx(fit.result["metrics"]["adapted"]["participating"]["log_score"]["rows"], abs=1e-4)
    x, y = clients.rows("2")
    mine, theirs = (one.adapt(x, y).predict(x) for one in (fit.newcomer, post.places[2].posterior()))
    np.testing.assert_allclose(mine.shape, theirs.shape)


def chosen_by(parts, folder, faults=None, away=()):
    """A coordinator after a run over sites of which some are away, or answer badly, in the choosing round."""
    algorithm = FedAvg(linear((4,), Categorical(3)), train=Training(lr=0.3))
    coordinator, post = deployment(algorithm, parts, folder, rounds=ROUNDS, faults=faults, patience=0.2)
    for _ in range(coordinator.experiment.plan.until - 1):
        coordinator.step(post)
    post.faults = {**post.faults, **dict.fromkeys(away, "away")}
    coordinator.step(post)
    post.faults = {}
    return coordinator, post


@pytest.fixture(scope="module")
def ten():
    return parts_of(people(own=3.0, clients=10, hold_out=0))


FEW = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("error", "extra", "lost")]


@pytest.mark.parametrize("fault", ["nan", "huge", "unrows", "away", *FEW])
def test_a_newcomer_without_an_answer_that_counts_has_no_say(fault, ten, tmp_path, caplog):
    """Two sites are newcomers; the other one chooses, as if it were the only one."""
    plan = deployment(FedAvg(linear((4,), Categorical(3))), ten, tmp_path / "plan", rounds=ROUNDS)[0].experiment.plan
    first, second = plan.newcomers.tolist()
    faults, away = ({}, [first]) if fault == "away" else ({(first, "choose"): fault}, [])
    with caplog.at_level("WARNING", "fedbayes"):
        coordinator, post = chosen_by(ten, tmp_path / "one", faults, away)
    assert any(f"sites {first} have no say" in line for line in caplog.messages)
    told = next(entry for entry in coordinator.history if "choice" in entry)
    assert told["sites"] == [second]
    alone = post.places[second].choose(
        coordinator.run, plan.until, 0, jax.device_get(coordinator.algorithm.broadcast(jax.random.key(0), coordinator.state))
    )
    assert told["choice"] == decided(coordinator.algorithm, alone, plan.repeats, newcomers=1).to_json()
    assert coordinator.finish(post)["choice"] == told["choice"]


def test_without_any_newcomer_the_algorithms_own_settings_stay(ten, tmp_path, caplog):
    plan = deployment(FedAvg(linear((4,), Categorical(3))), ten, tmp_path / "plan", rounds=ROUNDS)[0].experiment.plan
    with caplog.at_level("WARNING", "fedbayes"):
        coordinator, post = chosen_by(ten, tmp_path / "one", away=plan.newcomers.tolist())
    assert any("nobody chose settings of adapt" in line for line in caplog.messages)
    result, own = coordinator.finish(post), coordinator.algorithm.tune
    for told in result["choice"].values():
        assert told["settings"] == {"tune.lr": own.lr, "tune.steps": own.steps}
        assert told["rows"] == told["gain"] == 0
    assert all("not chosen" in words for _, words in choose.described(result["choice"]))
    assert result["sites"] == list(range(len(ten)))


@pytest.mark.parametrize("after", [7, 8, 9])
def test_a_deployment_that_stops_around_the_choice_chooses_once(after, ten, tmp_path):
    algorithm = FedAvg(linear((4,), Categorical(3)), train=Training(lr=0.3))
    whole, post = deployment(algorithm, ten, tmp_path / "whole", rounds=ROUNDS)
    expected = whole.finish(post)
    first, post = deployment(algorithm, ten, tmp_path / "parts", rounds=ROUNDS)
    for _ in range(after):
        first.step(post)
    first.kept.close()
    again = Coordinator(first.experiment, first.folder)
    assert (again.choice is None) == (after < 8)
    result = again.finish(post)
    assert result["choice"] == expected["choice"]
    assert result["metrics"] == expected["metrics"]
    assert_same(again.state, whole.state)
    assert [entry["round"] for entry in again.history if "choice" in entry] == [8]


def test_a_server_that_ends_while_sites_choose_asks_them_again(ten, tmp_path):
    algorithm = FedAvg(linear((4,), Categorical(3)), train=Training(lr=0.3))
    whole, post = deployment(algorithm, ten, tmp_path / "whole", rounds=ROUNDS)
    expected = whole.finish(post)
    first, post = deployment(algorithm, ten, tmp_path / "parts", rounds=ROUNDS)
    for _ in range(7):
        first.step(post)
    asked, post.ask = post.ask, stop_at("choose", post.ask)
    with pytest.raises(Stop):
        first.step(post)
    first.kept.close()
    post.ask = asked
    again = Coordinator(first.experiment, first.folder)
    assert (again.round, again.choice) == (7, None)
    assert again.finish(post)["choice"] == expected["choice"]
    assert_same(again.state, whole.state)


def stop_at(kind, ask):
    """A post's `ask` in which the server ends at a kind of request."""

    def asking(request, patience):
        if request.kind == kind:
            raise Stop
        return ask(request, patience)

    return asking


def test_sites_with_other_candidates_have_another_experiment(ten, tmp_path):
    network = linear((4,), Categorical(3))
    found = deployment(FedAvg(network), ten, tmp_path / "one", rounds=ROUNDS)[0].experiment.fingerprint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "candidates", lambda algorithm: choose.Candidates(("tune.lr",), ((0.0,), (0.5,))))
        other = deployment(FedAvg(network), ten, tmp_path / "other", rounds=ROUNDS)[0].experiment.fingerprint
    assert other != found


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs fedbayes[flower]")
def test_flower_asks_nobody_where_nobody_is_there():
    code = "from fedbayes.deploy import flower; print(list(flower.FlowerPost({}, {}).ask(flower.Request('choose', {}, {}), 1)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True).stdout == b"[]\n"


@pytest.mark.parametrize("after", [7, 8, 9])
def test_a_run_that_stops_around_the_choice_resumes_to_the_bit(after, fit, algorithm, different, tmp_path):
    options = {"modes": ("global", "adapted"), "folder": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(Stop):
        fb.simulate(algorithm, different, ROUNDS, **options, callbacks=[stop_after(after)])
    again = fb.simulate(algorithm, different, ROUNDS, **options, resume=True)
    assert again.result["choice"] == fit.result["choice"]
    assert_same(again.evaluation.scores, fit.evaluation.scores)


def test_a_run_that_is_extended_keeps_its_choice(algorithm, different, tmp_path):
    first = fb.simulate(algorithm, different, ROUNDS, folder=tmp_path / "run")
    longer = fb.simulate(algorithm, different, ROUNDS + 5, folder=tmp_path / "run", resume=True)
    assert longer.result["choice"] == first.result["choice"]


def test_the_choice_is_in_the_folder_and_in_files(fit, algorithm, different, tmp_path):
    kept = fb.simulate(algorithm, different, ROUNDS, modes=("global", "adapted"), folder=tmp_path / "run")
    x, y = different.rows("0")
    opened = fb.open(tmp_path / "run")
    np.testing.assert_allclose(opened.adapt(x, y).predict(x), kept.adapt(x, y).predict(x), atol=1e-6)
    kept.shared.save(tmp_path / "shared.safetensors")
    again = Posterior.load(tmp_path / "shared.safetensors")
    np.testing.assert_array_equal(again.choice.values, kept.shared.choice.values)
    np.testing.assert_allclose(again.adapt(x, y).predict(x), fit.shared.adapt(x, y).predict(x), atol=1e-6)
    still = kept.replace(tune=Training(epochs=0))  # what a user sets is not chosen
    assert still.shared.choice is None
    np.testing.assert_allclose(still.adapt(x, y).predict(x), kept.predict(x), atol=1e-6)


def test_a_choice_of_other_settings_is_refused(algorithm):
    for given in ({"names": ["model"], "values": [[1.0]] * 3}, {"names": ["tune.lr"], "values": [[float("nan")]] * 3}):
        with pytest.raises(UserError, match="the choice has"):
            Choice.from_json(algorithm, given)


def test_all_candidates_are_one_program(algorithm, different):
    settings = dataclasses.replace(algorithm, train=Training(lr=0.31))  # so that no other test has compiled it
    simulation = fb.Simulation(settings, different, plan=Plan.of(settings, 0, different.participants, ROUNDS))
    simulation.step()
    simulation.choose()
    compiled = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name == event else None
    )
    simulation.choose()
    assert not compiled


def test_unknown_modes_are_refused(algorithm, different):
    for mode in ("adapted:0", "adapted:x", "global:5"):
        with pytest.raises(UserError, match="there is no mode"):
            fb.simulate(algorithm, different, 1, modes=(mode,))
