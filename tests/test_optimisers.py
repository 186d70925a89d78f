"""Optax's optimisers for clients and for the server: the steps are Optax's own, and what is no optimiser is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Stop, assert_close, assert_same, simulated, stop_after
from table import TABLE, registered

import fedbayes as fb
from fedbayes import cli
from fedbayes.algorithms import find, names
from fedbayes.algorithms.fedavg import Server, Up
from fedbayes.models import Categorical, Normal, from_functions, mlp
from fedbayes.primitives import optimisers
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend
from fedbayes.results import serialise
from fedbayes.results.folder import describe
from fedbayes.results.posterior import Posterior
from fedbayes.study.options import arguments, default, override
from fedbayes.trees import other_peoples_code

KEY = jax.random.key(0)
START = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "scale": jnp.float32(0.7)}


# Clients


def descended(training, clients, steps=4):
    """So many full-batch steps on ½ Σ (w − 1)²."""

    def loss(w, key, batch):
        return sum(jnp.sum((leaf - 1) ** 2) for leaf in jax.tree.leaves(w)) / 2

    data = jax.tree.map(lambda leaf: leaf[0], clients.train([0], 32))
    training = dataclasses.replace(training, epochs=steps, batch=1000)
    model = mlp((4,), Categorical(2))
    return jax.jit(lambda w: descend(model, loss, w, training, training.lr_of(1), KEY, data)[0])(START)


def by_optax(optimiser, steps=4):
    w, state = START, optimiser.init(START)
    with other_peoples_code():
        for _ in range(steps):
            updates, state = optimiser.update(jax.tree.map(lambda leaf: leaf - 1, w), state, w)
            w = optax.apply_updates(w, updates)
    return w


@pytest.mark.parametrize("name", optimisers.known())
def test_every_name_is_optax_s_optimiser(name, clients):
    found = descended(Training(optimiser=name, lr=0.05), clients)
    assert_close(found, by_optax(getattr(optax, name)(0.05)), 1e-6)
    assert not np.allclose(found["w"], START["w"], atol=1e-7)


def test_the_usual_optimisers_have_names():
    usual = "adabelief adadelta adagrad adam adamax adamw amsgrad lamb lars lion nadam radam rmsprop sgd yogi"
    assert set(usual.split()) <= set(optimisers.known())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimiser": "adamw:b1=0.5,nesterov=true"}, lambda: optax.adamw(0.1, b1=0.5, nesterov=True)),
        ({"optimiser": "adamw", "weight_decay": 0.3}, lambda: optax.adamw(0.1, weight_decay=0.3)),
        ({"optimiser": "adamw", "weight_decay": 0.0}, lambda: optax.adam(0.1)),
        ({"optimiser": "adamw:weight_decay=0.3"}, lambda: optax.adamw(0.1, weight_decay=0.3)),
        ({"weight_decay": 0.3}, lambda: optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1))),
        ({"optimiser": "adam", "weight_decay": 0.3}, lambda: optax.chain(optax.add_decayed_weights(0.3), optax.adam(0.1))),
        ({"optimiser": "adam", "momentum": 0.9}, lambda: optax.adam(0.1)),
        ({"optimiser": "rmsprop", "momentum": 0.9}, lambda: optax.rmsprop(0.1, momentum=0.9)),
        ({"optimiser": "sgd:nesterov=true", "momentum": 0.9}, lambda: optax.sgd(0.1, momentum=0.9, nesterov=True)),
        ({"optimiser": "lion", "clip": 0.5}, lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.lion(0.1))),
        ({"optimiser": optax.noisy_sgd(0.02, key=1), "momentum": 0.9}, lambda: optax.noisy_sgd(0.02, key=1)),
    ],
)
def test_settings_reach_the_optimiser(settings, expected, clients):
    assert_close(descended(Training(**settings), clients), by_optax(expected()), 1e-6)


def test_the_decay_of_a_run_scales_a_transformation():
    training = Training(optimiser=optax.sgd(0.5), lr=3.0, decay_at=(0.5,), rounds=10)
    model, gradient = mlp((4,), Categorical(2)), {"w": jnp.ones(2)}
    for number, step in ((5, 0.5), (6, 0.05)):
        built = training.build(training.lr_of(number), model)
        np.testing.assert_allclose(built.update(gradient, built.init(gradient), gradient)[0]["w"], -step, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda **options: Training(**options), lambda **options: ServerStep(**options)])
@pytest.mark.parametrize(
    ("optimiser", "message"),
    [
        ("adamww", r"no optimiser 'adamww' in Optax; did you mean adamw"),
        ("SGD", r"no optimiser 'SGD' in Optax; did you mean sgd"),
        ("", r"no optimiser ''"),
        ("lbfgs", r"no optimiser 'lbfgs'"),
        ("adamw:bb1=0.9", r"adamw has no option 'bb1'; did you mean b1"),
        ("adamw:b1=high", r"'high' is no value of b1; write numbers and true or false"),
        ("adamw:mu_dtype=[1]", r"'\[1\]' is no value of mu_dtype"),
        (optax.adam, "but it is a name, such as adamw, or a GradientTransformation"),
        (None, "the optimiser is None, but"),
    ],
)
def test_no_optimiser_is_refused_when_it_is_made(make, optimiser, message):
    with pytest.raises(fb.UserError, match=message):
        make(optimiser=optimiser)


def test_a_misspelt_optimiser_on_the_command_line(capfd):
    for option in ("--train.optimiser", "--server-step.optimiser"):
        assert cli.main(["run", "fedavg", option, "adamww"]) == 2
        said = capfd.readouterr().err
        assert "no optimiser 'adamww'" in said
        assert "adamw" in said.split("did you mean")[1]
        assert "Traceback" not in said
    with pytest.raises(fb.UserError, match="no optimiser 'yogii'"):
        override(default("fedavg"), ["server_step.optimiser=yogii"])


def test_optimisers_on_the_command_line(tmp_path):
    words = ["--server-step.optimiser", "yogi", "--server-step.lr", "0.1", "--train.optimiser", "adamw:b1=0.8"]
    out = tmp_path / "run"
    assert cli.main(["run", "fedavg", "--rounds", "1", "--model", "linear", "--out", str(out), *words]) == 0
    options = json.loads((out / "config.json").read_text())["options"]
    assert options["train"]["optimiser"] == "adamw:b1=0.8"
    assert options["server_step"] == {"optimiser": "yogi", "lr": 0.1, "momentum": 0.0}
    settings = ["train.optimiser=adamw:b1=0.8", "server_step.optimiser=yogi", "server_step.lr=0.1"]
    assert arguments(override(default("fedavg"), settings), default("fedavg")) == words


def test_gaussian_networks_refuse_a_decay_that_the_optimiser_brings(model):
    with pytest.raises(fb.UserError, match="weight_decay pulls deviations too"):
        fb.BPFed(model, train=Training(optimiser="adamw"))
    fb.BPFed(model, train=Training(optimiser="adamw", weight_decay=0.0))


def test_a_transformation_runs_and_is_in_no_file(model, clients, tmp_path):
    """A run needs the code and not its name; a file of a personal model asks for it."""
    train = Training(epochs=2, batch=8, optimiser=optax.chain(optax.scale_by_adam(), optax.scale(-0.01)))
    named = Training(epochs=2, batch=8, optimiser="adam", lr=0.01)
    algorithm = fb.FedAvg(model, train=train)
    fit = fb.simulate(algorithm, clients, rounds=2, cohort=3, folder=tmp_path / "run")
    assert_close(fit.simulation.state, simulated(fb.FedAvg(model, train=named), clients, 2, cohort=3).state, 1e-6)
    json.dumps(describe(algorithm))
    person = fit.posterior_of("1")
    person.save(tmp_path / "me.safetensors")
    with pytest.raises(fb.UserError, match=r"FedAvg with a GradientTransformation is somebody's own code .* algorithm=…"):
        Posterior.load(tmp_path / "me.safetensors")
    again = Posterior.load(tmp_path / "me.safetensors", algorithm=algorithm)
    assert_same(again.draws(clients.x), person.draws(clients.x))
    with pytest.raises(fb.UserError, match="FedAvg with a GradientTransformation is somebody's own code"):
        fb.open(tmp_path / "run")
    x = clients.rows("1", "test")[0]
    assert_same(fb.open(tmp_path / "run", algorithm=algorithm).predict(x, client="1"), fit.predict(x, client="1"))


def test_named_optimisers_are_in_a_file(model):
    algorithm = fb.FedAvg(model, train=Training(optimiser="lion:b1=0.8"), server_step=ServerStep("adam", 0.1))
    found = serialise.decode(json.loads(json.dumps(serialise.encode(algorithm))))
    assert dataclasses.replace(found, model=model) == algorithm  # a network is equal to itself alone


# The server


def constant():
    """y ~ N(w, 1): one full step of size η from w leads client i to w − η (w − ȳ_i)."""
    return from_functions(lambda key: {"w": jnp.array([0.0])}, lambda w, x: jnp.broadcast_to(w["w"], (len(x), 1)), Normal(1.0))


def quadratic(step, rounds=5, eta=0.5):
    """w after each round of one full step per client on two clients, and the mean that the clients draw it to."""
    y = np.array([1.0, 3.0, 5.0, 8.0, 8.0, 8.0, 8.0, 8.0], np.float32)
    data = fb.Clients.build(np.zeros((8, 1), np.float32), y, np.repeat([0, 1], 4), test=0.0)
    algorithm = fb.FedAvg(constant(), train=Training(epochs=1, batch=8, lr=eta), server_step=step)
    simulation, found = fb.Simulation(algorithm.planned(rounds), data), []
    for _ in range(rounds):
        simulation.step()
        found.append(float(simulation.state.params["w"][0]))
    return found, float(y.mean())


def by_hand(update, rounds=5, eta=0.5):
    """Reddi et al.'s Algorithm 2 with a scalar w: `update` maps the round and Δ to the step."""
    w, found, mean = 0.0, [], np.array([1.0, 3.0, 5.0, 8.0, 8.0, 8.0, 8.0, 8.0]).mean()
    for t in range(1, rounds + 1):
        w += update(t, -eta * (w - mean))
        found.append(w)
    return found


class Adaptive:
    """Adam's and Yogi's moments of −Δ, with Optax's bias correction, by hand."""

    def __init__(self, kind, lr, b1, b2, eps, start=0.0):
        self.kind, self.lr, self.b1, self.b2, self.eps, self.m, self.v = kind, lr, b1, b2, eps, start, start

    def __call__(self, t, delta):
        self.m = self.b1 * self.m + (1 - self.b1) * delta
        if self.kind == "adam":
            self.v = self.b2 * self.v + (1 - self.b2) * delta**2
        else:
            self.v -= (1 - self.b2) * delta**2 * np.sign(self.v - delta**2)
        m, v = self.m / (1 - self.b1**t), self.v / (1 - self.b2**t)
        return self.lr * m / (np.sqrt(v) + self.eps)


class Momentum:
    def __init__(self, lr, decay):
        self.lr, self.decay, self.m = lr, decay, 0.0

    def __call__(self, t, delta):
        self.m = self.decay * self.m + delta
        return self.lr * self.m


@pytest.mark.parametrize(
    ("step", "update"),
    [
        (ServerStep(), Momentum(1.0, 0.0)),
        (ServerStep(momentum=0.9), Momentum(1.0, 0.9)),
        (ServerStep(lr=0.5, momentum=0.9), Momentum(0.5, 0.9)),
        (ServerStep("sgd:nesterov=false", lr=0.5, momentum=0.9), Momentum(0.5, 0.9)),
        (ServerStep("adam:b2=0.99,eps=0.001", lr=0.3), Adaptive("adam", 0.3, 0.9, 0.99, 1e-3)),
        (ServerStep("adam"), Adaptive("adam", 0.01, 0.9, 0.999, 1e-8)),
        (ServerStep("yogi:b2=0.99", lr=0.3), Adaptive("yogi", 0.3, 0.9, 0.99, 1e-3, start=1e-6)),
        (ServerStep(optax.adam(0.3), lr=7.0), Adaptive("adam", 0.3, 0.9, 0.999, 1e-8)),
    ],
)
def test_fedavgm_fedadam_and_fedyogi_by_hand(step, update):
    np.testing.assert_allclose(quadratic(step)[0], by_hand(update), rtol=1e-5)


@pytest.mark.parametrize("step", [ServerStep(momentum=0.5), ServerStep("adam", lr=0.3), ServerStep("yogi", lr=0.3)])
def test_server_optimisers_end_at_the_mode(step):
    found, mode = quadratic(step, rounds=300)
    assert found[-1] == pytest.approx(mode, abs=1e-2)


def has_step(name):
    return any(field.name == "server_step" for field in dataclasses.fields(find(registered(name))))


STEPPED = [name for name in TABLE if has_step(name)]
OWN = ["fedpa", "fedrecon", "fedvi"]
OFTEN = ("fedavg", "fedbabu", "fedper", "ifca", "bpfed", "fedvi")
methods = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in (*STEPPED, *OWN)]
)


def test_every_method_whose_server_takes_a_mean_has_a_server_step():
    """Over clients, the others are closed-form: M-steps of FedHB, FedBE's distillation and the product of BayesADMM's sites."""
    assert set(names("clients")) - set(STEPPED) - set(OWN) == {"fedhb-niw", "fedhb-mixture", "fedbe", "bayes-admm"}


def with_step(algorithm, optimiser, lr=1.0):
    if type(algorithm).__name__ in ("FedPA", "FedRecon", "FedVI"):
        return dataclasses.replace(algorithm, server_optimiser=optimiser, server_lr=lr, server_momentum=0.0)
    return dataclasses.replace(algorithm, server_step=ServerStep(optimiser, lr))


@methods
def test_a_step_of_size_one_by_optax_is_the_plain_mean(name, model, clients):
    """`sgd:nesterov=false` goes through Optax, where `sgd` of size 1 takes the mean as it is."""
    algorithm = TABLE[name](model)
    plain, stepped = (simulated(with_step(algorithm, one), clients, 2, cohort=3).state for one in ("sgd", "sgd:nesterov=false"))
    field = plain._fields[0]
    assert_close(getattr(plain, field), getattr(stepped, field), 2e-6)
    start = fb.Simulation(algorithm.planned(2, **clients.facts), clients, cohort=3).state
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), getattr(start, field), getattr(plain, field))
    assert max(jax.tree.leaves(moved)) > 1e-3


@methods
def test_yogi_moves_every_method_s_server_by_less_than_its_step(name, model, clients):
    lr = 1e-3
    algorithm = with_step(TABLE[name](model), "yogi", lr).planned(1, **clients.facts)
    simulation = fb.Simulation(algorithm, clients, cohort=3)
    before = simulation.state[0]
    simulation.step()
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before, simulation.state[0]))
    assert 1e-6 < max(moved) <= 1.1 * lr


def test_fedavgm_without_momentum_is_fedavg_to_the_bit(model, clients):
    plain = simulated(TABLE["fedavg"](model), clients, 3, cohort=3)
    same = simulated(dataclasses.replace(TABLE["fedavg"](model), server_step=ServerStep("sgd", 1.0, 0.0)), clients, 3, cohort=3)
    assert_same(plain.state, same.state)
    assert plain.state.optimiser is None
    assert jax.tree.structure(plain.state) == jax.tree.structure(Server(plain.state.params, plain.state.round))


def test_a_mean_of_the_broadcast_model_leaves_it(model):
    """Without a change there is nothing to step along, whichever the optimiser."""
    for step in (ServerStep(momentum=0.9), ServerStep("adam"), ServerStep("yogi")):
        algorithm = fb.FedAvg(model, server_step=step)
        server = algorithm.init_server(KEY)
        after = algorithm.server(KEY, server, None, Up(server.params, jnp.float32(1), jnp.float32(0)))
        assert_close(after.params, server.params, 1e-5)  # Yogi's moments start at 1e-6
        assert int(after.round) == 1


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_resumed_run_has_its_optimiser_s_state(optimiser, model, clients, tmp_path):
    step = ServerStep(optimiser, lr=0.1, momentum=0.9)
    algorithm = dataclasses.replace(TABLE["fedavg"](model), server_step=step)
    options = {"rounds": 4, "cohort": 3, "checkpoint_every": 2}
    with pytest.raises(Stop):
        fb.simulate(algorithm, clients, folder=tmp_path / "run", callbacks=(stop_after(3),), **options)
    resumed = fb.simulate(algorithm, clients, folder=tmp_path / "run", resume=True, **options)
    straight = fb.simulate(algorithm, clients, folder=tmp_path / "straight", **options)
    assert_same(resumed.simulation.state, straight.simulation.state)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(resumed.simulation.state.optimiser)) > 0


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"lr": float("nan")}])
def test_impossible_server_steps_are_refused(settings):
    with pytest.raises(fb.UserError, match="the step is above 0 and momentum from 0 to below 1"):
        ServerStep(**settings)
