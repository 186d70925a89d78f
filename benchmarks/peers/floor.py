"""The floor: a bare jitted JAX loop of the same arithmetic, with no framework around it.

All data are on the device before the clock starts; a round is one compiled call that draws the shuffles, scans over groups of
clients and over their steps, and averages. Convolutions are those of fedbayes, so that the floor and the simulator differ in
what surrounds the arithmetic and not in the arithmetic.
"""

from __future__ import annotations

import os

import jobs

from peers import serve, timed

WIDTH = {"A": 1, "B": 1, "C": 50}
"""Clients that are vmapped together inside the scan over groups. A: the fastest of 1, 2, 5 and 10. B: 1, as 20 was no faster.
C: of 1, 5, 10, 20, 50, 100 and 200, of which 20 and more are within a few per cent. FLOOR_WIDTH overrides it."""


class Floor:
    """The global model, the rows, and the compiled round."""

    def __init__(self, job, x, y, layers, seed, *, threads, shuffle):
        del threads  # XLA takes all cores that the process may use
        import jax
        import jax.numpy as jnp

        from fedbayes.models.convolution import conv2d, max_pool

        self.width = int(os.environ.get("FLOOR_WIDTH", WIDTH[job.name]))
        self.note = f"{self.width} vmapped" if self.width > 1 else "clients scanned one by one"

        def apply(layers, x):
            for layer in layers[: len(job.filters)]:
                x = jax.nn.relu(conv2d(x, layer.kernel) + layer.bias)
            if job.filters:
                x = max_pool(x, 2).reshape(len(x), -1)
            for layer in layers[len(job.filters) : -1]:
                x = jax.nn.relu(x @ layer.kernel + layer.bias)
            return x @ layers[-1].kernel + layers[-1].bias

        def loss(layers, x, y):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(apply(layers, x)), y[:, None], axis=1))

        def client(layers, x, y, key):
            order = jax.random.permutation(key, job.rows) if shuffle else jnp.arange(job.rows)

            def step(layers, rows):
                gradient = jax.grad(loss)(layers, x[rows], y[rows])
                return jax.tree.map(lambda value, slope: value - job.lr * slope, layers, gradient), None

            return jax.lax.scan(step, layers, order.reshape(job.steps, job.batch))[0]

        weight = job.rows / (job.rows * job.cohort)

        def group(layers, x, y, ids, keys):
            if self.width == 1:
                return client(layers, x[ids[0]], y[ids[0]], keys[0])
            trained = jax.vmap(client, in_axes=(None, 0, 0, 0))(layers, x[ids], y[ids], keys)
            return jax.tree.map(lambda value: value.sum(axis=0), trained)

        @jax.jit
        def round(key, layers, x, y):
            cohort_key, shuffle_key = jax.random.split(key)
            cohort = jax.random.permutation(cohort_key, job.clients)[: job.cohort].reshape(-1, self.width)
            keys = jax.random.split(shuffle_key, cohort.shape)

            def add(total, chosen):
                return jax.tree.map(lambda a, b: a + weight * b, total, group(layers, x, y, *chosen)), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, layers), (cohort, keys))[0]

        self.jax, self.compiled = jax, round
        self.key = jax.random.key(seed)
        self.layers = jax.tree.map(jnp.asarray, layers)
        self.x, self.y = jax.device_put((x, y))

    def round(self) -> None:
        self.key, key = self.jax.random.split(self.key)
        self.layers = self.jax.block_until_ready(self.compiled(key, self.layers, self.x, self.y))

    def run(self, rounds: int) -> list[float]:
        return timed(self.round, rounds)

    def parameters(self) -> list[jobs.Layer]:
        return self.jax.device_get(self.layers)


if __name__ == "__main__":
    serve(Floor, ["jax", "jaxlib", "numpy"])
