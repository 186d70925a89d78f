"""fedbayes: its simulator with FedAvg, as a user would set it up."""

from __future__ import annotations

import jobs

from peers import NotSupported, serve, timed


class FedBayes:
    """`Simulation.step`, all rows of each client for training."""

    def __init__(self, job, x, y, layers, seed, *, threads, shuffle):
        del threads  # XLA takes all cores that the process may use
        if not shuffle:
            raise NotSupported("the simulator always shuffles")
        import jax.numpy as jnp
        import numpy as np

        import fedbayes as fb

        rows = job.clients * job.rows
        clients = fb.Clients.build(
            x.reshape(rows, *job.shape),
            y.reshape(rows),
            np.repeat(np.arange(job.clients), job.rows),
            classes=[str(label) for label in range(job.classes)],
            is_test=np.zeros(rows, bool),
        )
        likelihood = fb.models.Categorical(job.classes)
        if job.filters:
            model = fb.models.cnn(job.shape, likelihood, channels=job.filters, hidden=job.hidden)
        else:
            model = fb.models.mlp(job.shape, likelihood, hidden=job.hidden)
        training = fb.Training(epochs=1, batch=job.batch, lr=job.lr, momentum=0.0)
        self.simulation = fb.Simulation(fb.FedAvg(model, train=training), clients, cohort=job.cohort, seed=seed)
        self.names = [f"conv{i}" for i in range(len(job.filters))] + [f"dense{i}" for i in range(len(job.hidden))]
        named = [{"kernel": jnp.asarray(layer.kernel), "bias": jnp.asarray(layer.bias)} for layer in layers]
        params = {"body": dict(zip(self.names, named, strict=False)), "head": named[-1]}
        self.simulation.state = self.simulation.state._replace(params=params)

    def run(self, rounds: int) -> list[float]:
        return timed(self.round, rounds)

    def round(self) -> None:
        import jax

        self.simulation.step()
        jax.block_until_ready(self.simulation.state)

    def parameters(self) -> list[jobs.Layer]:
        import jax

        params = jax.device_get(self.simulation.state.params)
        found = [*(params["body"][name] for name in self.names), params["head"]]
        return [jobs.Layer(layer["kernel"], layer["bias"]) for layer in found]


if __name__ == "__main__":
    serve(FedBayes, ["fedbayes", "jax", "jaxlib", "numpy"])
