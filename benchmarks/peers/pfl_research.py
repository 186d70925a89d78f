"""pfl-research on PyTorch: SimulatedBackend with FederatedAveraging, without logging or evaluation."""

from __future__ import annotations

import asyncio

import jobs

from peers import serve, timed
from peers.pytorch import dump, load, network, tensors


class PflResearch:
    """`FederatedAveraging.run`, one central iteration at a time.

    pfl does not shuffle a user's rows; they are permuted where a user's dataset is made, which is where pfl leaves preparation
    of the data to its caller.
    """

    def __init__(self, job, x, y, layers, seed, *, threads, shuffle):
        import numpy as np
        import torch
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.data.pytorch import PyTorchTensorDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.metrics import Weighted
        from pfl.model.pytorch import PyTorchModel

        torch.set_num_threads(threads)
        np.random.seed(seed)
        torch.manual_seed(seed)
        asyncio.set_event_loop(asyncio.new_event_loop())

        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = network(job)

            def loss(self, x, y):
                return torch.nn.functional.cross_entropy(self.layers(x), y)

            @torch.no_grad()
            def metrics(self, x, y):
                return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}

        x, y = tensors(job, x, y)

        def user(client):
            if not shuffle:
                return PyTorchTensorDataset((x[client], y[client]), user_id=client)
            order = torch.randperm(job.rows)
            return PyTorchTensorDataset((x[client][order], y[client][order]), user_id=client)

        self.job, self.module, self.done = job, Network(), 0
        load(job, self.module, layers)
        data = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(job.clients))))
        self.backend = SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()])
        self.model = PyTorchModel(
            model=self.module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.module.parameters(), lr=1.0),
        )
        self.algorithm = FederatedAveraging()
        self.training = NNTrainHyperParams(local_batch_size=job.batch, local_num_epochs=1, local_learning_rate=job.lr)

    def round(self) -> None:
        from pfl.algorithm.base import NNAlgorithmParams

        self.done += 1
        # A round is evaluated when its number, counted from 0, is a multiple of the frequency: the first, which is warm-up.
        settings = NNAlgorithmParams(
            central_num_iterations=self.done,
            evaluation_frequency=10**9,
            train_cohort_size=self.job.cohort,
            val_cohort_size=0,
        )
        self.model = self.algorithm.run(
            settings, self.backend, self.model, self.training, callbacks=[], send_metrics_to_platform=False
        )

    def run(self, rounds: int) -> list[float]:
        return timed(self.round, rounds)

    def parameters(self) -> list[jobs.Layer]:
        return dump(self.job, self.module)


if __name__ == "__main__":
    serve(PflResearch, ["pfl", "torch", "numpy"])
