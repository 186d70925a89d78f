"""Convolutions as matrix products, and pooling as a maximum over a reshaped array.

On a CPU, XLA's own convolution inside `scan`, `map` or `vmap` is many times slower than outside of them, and a simulator has
nothing outside. A matrix product is fast everywhere; `benchmarks/convolution.py` has the figures.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbayes.errors import UserError

Padding = Literal["VALID", "SAME"]


def conv2d(
    x: Float[Array, "n h w c"], kernel: Float[Array, "kh kw c d"], stride: int = 1, padding: Padding = "VALID"
) -> Float[Array, "n p q d"]:
    """y[n, i, j, d] = sum_{a, b, c} x[n, s i + a, s j + b, c] kernel[a, b, c, d], as one product of patches and kernel.

    >>> conv2d(jnp.ones((2, 5, 5, 1)), jnp.ones((3, 3, 1, 4))).shape
    (2, 3, 3, 4)
    """
    kh, kw, c, d = kernel.shape
    patches = jnp.concatenate(_windows(_pad(x, kh, kw, stride, padding), kh, kw, stride), axis=-1)
    return patches @ kernel.reshape(kh * kw * c, d)


def depthwise_conv2d(
    x: Float[Array, "n h w c"], kernel: Float[Array, "kh kw c"], stride: int = 1, padding: Padding = "SAME"
) -> Float[Array, "n p q c"]:
    """y[n, i, j, c] = sum_{a, b} x[n, s i + a, s j + b, c] kernel[a, b, c], as a sum of shifted products.

    >>> depthwise_conv2d(jnp.ones((2, 5, 5, 3)), jnp.ones((3, 3, 3)))[0, 2, 2].tolist()
    [9.0, 9.0, 9.0]
    """
    kh, kw, c = kernel.shape
    windows = _windows(_pad(x, kh, kw, stride, padding), kh, kw, stride)
    weights = kernel.reshape(kh * kw, 1, 1, 1, c)
    return sum((window * weight for window, weight in zip(windows[1:], weights[1:], strict=True)), windows[0] * weights[0])


def max_pool(x: Float[Array, "n h w c"], size: int) -> Float[Array, "n p q c"]:
    """The maximum over each `size` × `size` square; rows and columns that fill no square are left out.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    n, h, w, c = x.shape
    p, q = h // size, w // size
    return x[:, : p * size, : q * size].reshape(n, p, size, q, size, c).max(axis=(2, 4))


def _pad(x: Float[Array, "n h w c"], kh: int, kw: int, stride: int, padding: Padding) -> Float[Array, "n H W c"]:
    """Zeros around x as XLA's SAME adds them: so many that there are ceil(h / stride) windows, the odd one at the end."""
    if padding == "VALID":
        if x.shape[1] < kh or x.shape[2] < kw:
            raise UserError(f"an image of {x.shape[1]} × {x.shape[2]} has no room for a {kh} × {kw} convolution")
        return x
    total = [max((-(-size // stride) - 1) * stride + k - size, 0) for size, k in ((x.shape[1], kh), (x.shape[2], kw))]
    return jnp.pad(x, ((0, 0), *((t // 2, t - t // 2) for t in total), (0, 0)))


def _windows(x: Float[Array, "n H W c"], kh: int, kw: int, stride: int) -> list[Float[Array, "n p q c"]]:
    """For each place in the kernel, the elements of x that it meets."""
    p, q = (x.shape[1] - kh) // stride + 1, (x.shape[2] - kw) // stride + 1
    return [
        x[:, a : a + (p - 1) * stride + 1 : stride, b : b + (q - 1) * stride + 1 : stride] for a in range(kh) for b in range(kw)
    ]
