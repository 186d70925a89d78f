"""Your own network, in three ways: a Flax module, a pair of functions, an Equinox module. Run: python examples/own_model.py.

A model is a pair of pure functions over nested dicts of named arrays, and a likelihood that says what the outputs mean. Methods
that keep a part of the network on the client name it by its path, so give the parts names.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import fedbayes as fb
from fedbayes.models import Categorical, Model, from_equinox, from_flax, from_functions


class Network(nnx.Module):
    """Attributes become the names of the parameters: body/kernel, body/bias, head/kernel, head/bias."""

    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(64, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.nn.relu(self.body(x)))


def with_flax(clients: fb.Clients) -> Model:
    # The module sees (x - shift) / scale; shape lets a wrong last layer be found here and not in the first round.
    return from_flax(Network, Categorical(10), shape=clients.shape, shift=clients.shift, scale=clients.scale)


def with_functions(clients: fb.Clients) -> Model:
    def init(key):
        first, second = jax.random.split(key)
        return {
            "body": {"kernel": jax.random.normal(first, (64, 32)) / 8},
            "head": {"kernel": jax.random.normal(second, (32, 10)) / 6},
        }

    def apply(params, x):
        return jnp.tanh(x @ params["body"]["kernel"]) @ params["head"]["kernel"]

    return from_functions(init, apply, Categorical(10), shape=clients.shape, shift=clients.shift, scale=clients.scale)


def with_equinox(clients: fb.Clients) -> Model:
    import equinox

    def factory(key):  # a module for one row; its two layers are layers/0 and layers/1
        return equinox.nn.MLP(64, 10, width_size=32, depth=1, key=key)

    return from_equinox(factory, Categorical(10), shape=clients.shape, shift=clients.shift, scale=clients.scale)


def main(rounds: int = 20) -> dict[str, float]:
    clients = fb.data.load("digits", hold_out=5)
    algorithms = {
        "Flax": fb.FedPer(with_flax(clients), personal=("head",)),
        "functions": fb.FedPer(with_functions(clients), personal=("head",)),
        "Equinox": fb.FedPer(with_equinox(clients), personal=("layers/1",)),
    }
    accuracies = {}
    for name, algorithm in algorithms.items():
        fit = fb.simulate(algorithm, clients, rounds=rounds, cohort=10, modes=("personal",))
        accuracies[name] = fit.result["metrics"]["personal"]["participating"]["accuracy"]["rows"]
        print(f"{name}: accuracy {accuracies[name]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
