"""Plain PyTorch: the eager loop that one would write by hand."""

from __future__ import annotations

import jobs
import numpy as np

from peers import serve, timed


def network(job):
    """The job's network as a module; images come as (rows, channels, height, width)."""
    from torch import nn

    layers, channels, size = [], job.shape[-1], job.shape[0]
    for filters in job.filters:
        layers += [nn.Conv2d(channels, filters, 3), nn.ReLU()]
        channels, size = filters, size - 2
    if job.filters:
        layers += [nn.MaxPool2d(2), nn.Flatten()]
    inputs = channels * (size // 2) ** 2 if job.filters else job.shape[0]
    for outputs in job.hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Linear(inputs, job.classes))


def tensors(job, x, y):
    """The data as tensors, images with their channels first."""
    import torch

    x = np.moveaxis(x, -1, 2) if job.filters else x
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64))


def _flattened(job) -> tuple[int, int, int]:
    """Height, width and channels of the image that the first dense layer sees."""
    size = (job.shape[0] - 2 * len(job.filters)) // 2
    return size, size, job.filters[-1]


def load(job, module, layers) -> None:
    """Copy layers, as `jobs.parameters` orders them, into a module."""
    import torch

    found = [part for part in module.modules() if hasattr(part, "weight")]
    for i, (part, layer) in enumerate(zip(found, layers, strict=True)):
        kernel = layer.kernel
        if kernel.ndim == 4:
            weight = kernel.transpose(3, 2, 0, 1)
        elif job.filters and i == len(job.filters):
            weight = kernel.reshape(*_flattened(job), -1).transpose(3, 2, 0, 1).reshape(kernel.shape[1], -1)
        else:
            weight = kernel.T
        with torch.no_grad():
            part.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
            part.bias.copy_(torch.from_numpy(layer.bias))


def dump(job, module) -> list[jobs.Layer]:
    """The inverse of `load`."""
    found = [part for part in module.modules() if hasattr(part, "weight")]
    layers = []
    for i, part in enumerate(found):
        weight = part.weight.detach().numpy()
        if weight.ndim == 4:
            kernel = weight.transpose(2, 3, 1, 0)
        elif job.filters and i == len(job.filters):
            height, width, channels = _flattened(job)
            kernel = weight.reshape(-1, channels, height, width).transpose(2, 3, 1, 0).reshape(-1, weight.shape[0])
        else:
            kernel = weight.T
        layers.append(jobs.Layer(kernel.copy(), part.bias.detach().numpy().copy()))
    return layers


class PyTorch:
    """One module, loaded with the global state for each client."""

    def __init__(self, job, x, y, layers, seed, *, threads, shuffle):
        import torch

        torch.set_num_threads(threads)
        self.job, self.shuffle, self.torch = job, shuffle, torch
        self.x, self.y = tensors(job, x, y)
        self.module = network(job)
        load(job, self.module, layers)
        self.state = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.random = torch.Generator().manual_seed(seed)

    def round(self) -> None:
        torch, job = self.torch, self.job
        cohort = torch.randperm(job.clients, generator=self.random)[: job.cohort].tolist()
        total = {name: torch.zeros_like(value) for name, value in self.state.items()}
        for client in cohort:
            self.module.load_state_dict(self.state)
            optimizer = torch.optim.SGD(self.module.parameters(), lr=job.lr)
            x, y = self.x[client], self.y[client]
            order = torch.randperm(job.rows, generator=self.random) if self.shuffle else torch.arange(job.rows)
            for rows in order.split(job.batch):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.module(x[rows]), y[rows]).backward()
                optimizer.step()
            weight = job.rows / (job.rows * len(cohort))
            for name, value in self.module.state_dict().items():
                total[name].add_(value, alpha=weight)
        self.state = total

    def run(self, rounds: int) -> list[float]:
        return timed(self.round, rounds)

    def parameters(self) -> list[jobs.Layer]:
        self.module.load_state_dict(self.state)
        return dump(self.job, self.module)


if __name__ == "__main__":
    serve(PyTorch, ["torch", "numpy"])
