"""Convolutions and pooling against XLA's own, in value and in gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbayes.errors import UserError
from fedbayes.models import convolution
from fedbayes.models.convolution import conv2d, depthwise_conv2d, im2col, max_pool, winograd


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def reference(x, kernel, stride=1, padding="VALID", groups=1):
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def assert_close(actual, expected):
    """To 1e-4 of each array's largest element; a sum of many terms that cancel has no relative error of its own."""
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=0, atol=1e-4 * max(float(jnp.abs(e).max()), 1e-6)), actual, expected
    )


def assert_same_with_gradients(ours, theirs, *arguments):
    @jax.jit
    def both(*arguments):
        value, back = jax.vjp(ours, *arguments)
        other, other_back = jax.vjp(theirs, *arguments)
        g = jax.random.normal(jax.random.key(9), other.shape)
        return (value, back(g)), (other, other_back(g))

    ours_all, theirs_all = both(*arguments)
    assert ours_all[0].shape == theirs_all[0].shape
    assert_close(ours_all, theirs_all)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(
    ("image", "size", "stride", "channels"),
    [
        ((28, 28), 3, 1, (1, 32)),
        ((26, 26), 3, 1, (32, 64)),  # Winograd, whole tiles
        ((13, 10), 3, 1, (8, 9)),  # Winograd, tiles that stick out
        ((9, 8), 3, 2, (8, 8)),
        ((8, 9), 3, 3, (2, 3)),
        ((7, 6), 5, 1, (2, 3)),
        ((7, 6), 2, 2, (2, 3)),
        ((5, 4), 1, 1, (8, 8)),
        ((3, 3), 3, 1, (8, 8)),
    ],
)
def test_convolution(image, size, stride, channels, padding):
    x, kernel = normal(0, 3, *image, channels[0]), normal(1, size, size, *channels)
    assert_same_with_gradients(
        lambda x, k: conv2d(x, k, stride, padding), lambda x, k: reference(x, k, stride, padding), x, kernel
    )


@pytest.mark.parametrize("image", [(3, 3), (4, 7), (6, 6), (7, 11)])
def test_winograd_on_any_size(image):
    assert_same_with_gradients(winograd, reference, normal(0, 2, *image, 3), normal(1, 3, 3, 3, 5))


def test_both_ways_are_taken(monkeypatch):
    taken = []
    monkeypatch.setattr(convolution, "winograd", lambda *a: taken.append("winograd") or winograd(*a))
    monkeypatch.setattr(convolution, "im2col", lambda *a: taken.append("im2col") or im2col(*a))
    for shape, kernel in [((1, 26, 26, 32), (3, 3, 32, 64)), ((1, 28, 28, 1), (3, 3, 1, 32)), ((1, 4, 4, 32), (3, 3, 32, 32))]:
        conv2d(jnp.zeros(shape), jnp.zeros(kernel))
    assert taken == ["winograd", "im2col", "im2col"]


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolution(stride, padding):
    x, kernel = normal(0, 2, 9, 8, 6), normal(1, 3, 3, 6)
    assert_same_with_gradients(
        lambda x, k: depthwise_conv2d(x, k, stride, padding),
        lambda x, k: reference(x, k.reshape(3, 3, 1, 6), stride, padding, groups=6),
        *(x, kernel),
    )


@pytest.mark.parametrize(("image", "size"), [((8, 8), 2), ((9, 7), 2), ((9, 10), 3), ((4, 4), 1)])
def test_max_pool(image, size):
    def windowed(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size, size, 1), (1, size, size, 1), "VALID")

    assert_same_with_gradients(lambda x: max_pool(x, size), windowed, normal(0, 2, *image, 3))


def test_mapped_over_kernels_and_rows():
    x, kernels = normal(0, 3, 2, 10, 10, 8), normal(1, 3, 3, 3, 8, 8)

    def gradient(convolve, x, kernel):
        return jax.grad(lambda x, k: jnp.sum(convolve(x, k) ** 2), argnums=(0, 1))(x, kernel)

    mapped = jax.jit(jax.vmap(lambda x, k: gradient(conv2d, x, k)))(x, kernels)
    assert_close(mapped, jax.vmap(lambda x, k: gradient(reference, x, k))(x, kernels))
    shared = jax.jit(jax.vmap(lambda k: gradient(conv2d, x[0], k)))(kernels)
    assert_close(shared, jax.vmap(lambda k: gradient(reference, x[0], k))(kernels))


def test_second_derivative():
    """Methods that differentiate through a step of training ask for it, in either mode over the gradient."""
    x, kernel, tangent = normal(0, 2, 8, 8, 8), normal(1, 3, 3, 8, 8), normal(2, 3, 3, 8, 8)

    def gradient(convolve):
        return jax.grad(lambda k: jnp.sum(jnp.tanh(convolve(x, k))))

    expected = jax.jvp(gradient(reference), (kernel,), (tangent,))[1]
    assert_close(jax.jvp(gradient(conv2d), (kernel,), (tangent,))[1], expected)
    assert_close(jax.grad(lambda k: jnp.vdot(gradient(conv2d)(k), tangent))(kernel), expected)


def test_no_rows():
    assert conv2d(jnp.zeros((0, 12, 12, 8)), jnp.zeros((3, 3, 8, 8))).shape == (0, 10, 10, 8)
    assert max_pool(jnp.zeros((0, 12, 12, 8)), 2).shape == (0, 6, 6, 8)


def test_image_smaller_than_kernel():
    with pytest.raises(UserError, match="no room"):
        conv2d(jnp.zeros((1, 2, 5, 1)), jnp.zeros((3, 3, 1, 1)))
