"""Convolutions as matrix products, and pooling as a maximum of slices.

On a CPU, XLA's own convolution inside `scan`, `map` or `vmap` is many times slower than outside of them, and a simulator has
nothing outside. Matrix products are fast everywhere. Two ways lead to them; `benchmarks/convolution.py` has the figures:

- im2col: the patches under the kernel side by side, one product with the kernel; for kernels of any size and stride.
- Winograd's F(4 × 4, 3 × 3): sixteen outputs from 36 multiplications where im2col needs 144, for 3 × 3 kernels with stride 1
  and enough channels. Its rounding error is about eight times that of im2col: 5e-6 of the largest output
  against 7e-7, with 32 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import NDArray

from fedbayes.errors import UserError

Padding = Literal["VALID", "SAME"]


def conv2d(
    x: Float[Array, "n h w c"], kernel: Float[Array, "kh kw c d"], stride: int = 1, padding: Padding = "VALID"
) -> Float[Array, "n p q d"]:
    """y[n, i, j, d] = sum_{a, b, c} x[n, s i + a, s j + b, c] kernel[a, b, c, d], by matrix products.

    >>> conv2d(jnp.ones((2, 5, 5, 1)), jnp.ones((3, 3, 1, 4))).shape
    (2, 3, 3, 4)
    """
    kh, kw, c, d = kernel.shape
    x = _pad(x, kh, kw, stride, padding)
    p, q = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    # With few channels either way is cheap and im2col rounds less: at 20 rows of 26 × 26 and 8 channels the tiles save 0.3
    # of 1.7 ms, at 32 channels 10 of 17. Tiles that stick out over the edge are computed for nothing; two thirds is a guess.
    if (kh, kw, stride) == (3, 3, 1) and min(c, d) >= 8 and 3 * p * q >= 2 * OUT**2 * -(-p // OUT) * -(-q // OUT):
        return winograd(x, kernel)
    return im2col(x, kernel, stride)


def im2col(x: Float[Array, "n h w c"], kernel: Float[Array, "kh kw c d"], stride: int = 1) -> Float[Array, "n p q d"]:
    """The convolution without padding, as one product of patches and kernel.

    >>> im2col(jnp.ones((2, 5, 5, 1)), jnp.ones((3, 3, 1, 4)), stride=2).shape
    (2, 2, 2, 4)
    """
    kh, kw, c, d = kernel.shape
    return jnp.concatenate(_windows(x, kh, kw, stride), axis=-1) @ kernel.reshape(kh * kw * c, d)


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

    A maximum of slices: its gradient is a chain of comparisons, several times cheaper than that of a windowed reduction.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    n, h, w, c = x.shape
    p, q = h // size, w // size
    squares = x[:, : p * size, : q * size].reshape(n, p, size, q, size, c)
    largest = squares[:, :, 0, :, 0]
    for i in range(1, size * size):
        largest = jnp.maximum(largest, squares[:, :, i // size, :, i % size])
    return largest


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
    h, w = (x.shape[1] - kh) // stride * stride + 1, (x.shape[2] - kw) // stride * stride + 1
    return [x[:, a : a + h : stride, b : b + w : stride] for a in range(kh) for b in range(kw)]


# Winograd's minimal filtering F(4 × 4, 3 × 3), after Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, 2016.
# A tile d of 6 × 6 inputs and a 3 × 3 kernel g give 4 × 4 outputs, Y = Aᵀ [(G g Gᵀ) ∘ (Bᵀ d B)] A. The product in the middle,
# summed over channels and taken for all tiles at once, is 36 matrix products.
OUT, TILE = 4, 6
BT = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
G = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
AT = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])


@jax.custom_vjp
def winograd(x: Float[Array, "n h w c"], kernel: Float[Array, "3 3 c d"]) -> Float[Array, "n p q d"]:
    """The convolution of a 3 × 3 kernel with stride 1 and without padding, in tiles of 4 × 4 outputs.

    The gradient is written out. Everything here is linear, so JAX would find it, but as sums of padded arrays. A barrier
    follows every pass over one axis: without them, what XLA fuses takes up to four times as long.

    >>> winograd(jnp.ones((2, 6, 7, 1)), jnp.ones((3, 3, 1, 4))).shape
    (2, 4, 5, 4)
    """
    return _winograd_forward(x, kernel)[0]


Residual = tuple[Float[Array, "36 t c"], Float[Array, "3 3 c d"], Float[Array, "n h w 0"]]


def _winograd_forward(x: Float[Array, "n h w c"], kernel: Float[Array, "3 3 c d"]) -> tuple[Float[Array, "n p q d"], Residual]:
    n, h, w, c = x.shape
    d = kernel.shape[-1]
    P, Q = _tiles(h), _tiles(w)
    tall = jnp.pad(x, ((0, 0), (0, (P + 1) * OUT - h), (0, (Q + 1) * OUT - w), (0, 0))).reshape(n, P + 1, OUT, (Q + 1) * OUT, c)
    rows = _combine(BT, [tall[:, i // OUT : i // OUT + P, i % OUT] for i in range(TILE)]).reshape(TILE, n, P, Q + 1, OUT, c)
    inputs = _combine(BT, [rows[:, :, :, j // OUT : j // OUT + Q, j % OUT] for j in range(TILE)]).reshape(TILE**2, n * P * Q, c)
    products = jnp.matmul(inputs, _transformed(kernel)).reshape(TILE, TILE, n, P, Q, d)  # columns of the tile before its rows
    columns = _combine(AT, list(products))
    y = _combine(AT, [columns[:, i] for i in range(TILE)], axis=3)  # (column, n, P, row, Q, d)
    y = jnp.moveaxis(y, 0, 4).reshape(n, P * OUT, Q * OUT, d)[:, : h - 2, : w - 2]
    return y, (inputs, kernel, jnp.zeros((n, h, w, 0), x.dtype))  # the last for its shape alone


def _winograd_backward(
    residual: Residual, dy: Float[Array, "n p q d"]
) -> tuple[Float[Array, "n h w c"], Float[Array, "3 3 c d"]]:
    inputs, kernel, like = residual
    n, h, w, _ = like.shape
    c, d = kernel.shape[2:]
    P, Q = _tiles(h), _tiles(w)
    tall = jnp.pad(dy, ((0, 0), (0, P * OUT - h + 2), (0, Q * OUT - w + 2), (0, 0))).reshape(n, P, OUT, Q * OUT, d)
    rows = _combine(AT.T, [tall[:, :, i] for i in range(OUT)]).reshape(TILE, n, P, Q, OUT, d)
    products = _combine(AT.T, [rows[:, :, :, :, j] for j in range(OUT)]).reshape(TILE**2, n * P * Q, d)

    dkernel = jnp.einsum("etc,etd->ecd", inputs, products).reshape(TILE**2, c * d)
    dkernel = (jnp.asarray(np.kron(G, G).T, dkernel.dtype) @ dkernel).reshape(3, 3, c, d).swapaxes(0, 1)

    dinputs = jnp.einsum("etd,ecd->etc", products, _transformed(kernel)).reshape(TILE, TILE, n, P, Q, c)
    columns = _overlap(list(_combine(BT.T, list(dinputs))), axis=3)  # (row, n, P, Q + 1, column, c)
    dx = _overlap(list(_combine(BT.T, list(columns))), axis=1)  # (n, P + 1, row, Q + 1, column, c)
    return dx.reshape(n, (P + 1) * OUT, (Q + 1) * OUT, c)[:, :h, :w], dkernel


winograd.defvjp(_winograd_forward, _winograd_backward)


def _tiles(size: int) -> int:
    return -(-(size - 2) // OUT)


def _transformed(kernel: Float[Array, "3 3 c d"]) -> Float[Array, "36 c d"]:
    _, _, c, d = kernel.shape
    flat = kernel.swapaxes(0, 1).reshape(9, c * d)
    return (jnp.asarray(np.kron(G, G), kernel.dtype) @ flat).reshape(TILE**2, c, d)


def _combine(matrix: NDArray[np.number], parts: Sequence[Array], axis: int = 0) -> Array:
    """sum_j matrix[i, j] parts[j] for each i, stacked on a new axis; no matrix product, as most entries are 0 or ±1."""
    sums = []
    for row in matrix:
        used = [(w, part) for w, part in zip(row, parts, strict=True) if w != 0]
        terms = [part if w == 1 else -part if w == -1 else float(w) * part for w, part in used]
        sums.append(sum(terms[1:], terms[0]))
    return jax.lax.optimization_barrier(jnp.stack(sums, axis=axis))


def _overlap(parts: Sequence[Array], axis: int) -> Array:
    """Tiles laid out at every fourth place, summed where they overlap: the last two of six elements are in the next tile."""
    here, before = ([edges if i == axis else (0, 0) for i in range(parts[0].ndim)] for edges in ((0, 1), (1, 0)))
    sums = [jnp.pad(part, here) for part in parts[:OUT]]
    for i, part in enumerate(parts[OUT:]):
        sums[i] = sums[i] + jnp.pad(part, before)
    return jax.lax.optimization_barrier(jnp.stack(sums, axis=axis + 1))
