"""FedJAX: its federated averaging over `for_each_client` with the jit backend, which is its default on one device."""

from __future__ import annotations

import jobs

from peers import serve, timed


class FedJax:
    """`fedjax.algorithms.fed_avg` with a Haiku network, clients from `InMemoryFederatedData`."""

    def __init__(self, job, x, y, layers, seed, *, threads, shuffle):
        del threads  # XLA takes all cores that the process may use
        import haiku as hk
        import jax
        import numpy as np
        import optax

        # FedJAX 0.0.17 calls jax.tree_map, which newer JAX has under another name; put back, FedJAX runs on the others' JAX.
        self.note = ""
        if not hasattr(jax, "tree_map"):
            jax.tree_map = jax.tree.map
            self.note = "with jax.tree_map put back"
        import fedjax
        from fedjax.algorithms import fed_avg

        self.names = [f"layer{i}" for i in range(len(layers))]

        def network(x):
            names = iter(self.names)
            for filters in job.filters:
                x = jax.nn.relu(hk.Conv2D(filters, 3, padding="VALID", name=next(names))(x))
            if job.filters:
                x = hk.MaxPool(2, 2, "VALID")(x)
            x = hk.Flatten()(x)
            for outputs in job.hidden:
                x = jax.nn.relu(hk.Linear(outputs, name=next(names))(x))
            return hk.Linear(job.classes, name=next(names))(x)

        transformed = hk.without_apply_rng(hk.transform(network))

        def loss(parameters, batch, key):
            del key
            scores = transformed.apply(parameters, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()

        template = transformed.init(jax.random.PRNGKey(0), x[0, :1])
        start = {name: {"w": layer.kernel, "b": layer.bias} for name, layer in zip(self.names, layers, strict=True)}
        assert jax.tree.map(np.shape, start) == jax.tree.map(np.shape, dict(template))
        data = fedjax.InMemoryFederatedData({i: {"x": x[i], "y": y[i]} for i in range(job.clients)})
        batches = fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=1, skip_shuffle=not shuffle)
        fedjax.set_for_each_client_backend("jit")
        self.algorithm = fed_avg.federated_averaging(
            jax.grad(loss), fedjax.optimizers.sgd(job.lr), fedjax.optimizers.sgd(1.0), batches
        )
        self.state = self.algorithm.init(jax.tree.map(jax.numpy.asarray, start))
        self.sampler = fedjax.client_samplers.UniformGetClientSampler(data, job.cohort, seed)
        self.jax = jax

    def round(self) -> None:
        self.state, _ = self.algorithm.apply(self.state, self.sampler.sample())
        self.jax.block_until_ready(self.state.params)

    def run(self, rounds: int) -> list[float]:
        return timed(self.round, rounds)

    def parameters(self) -> list[jobs.Layer]:
        import numpy as np

        found = [self.state.params[name] for name in self.names]
        return [jobs.Layer(np.asarray(layer["w"]), np.asarray(layer["b"])) for layer in found]


if __name__ == "__main__":
    serve(FedJax, ["fedjax", "dm-haiku", "jax", "numpy"])
