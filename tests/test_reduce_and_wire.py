"""Reduction as declared, provenance of uploads, and bytes that are checked before they are believed."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same

from fedbayes import wire
from fedbayes.algorithm import Algorithm, Data, Mean, Reduce, Stack, Sum
from fedbayes.engine import reduce
from fedbayes.engine.clients import Simulation
from fedbayes.engine.round import accumulate
from fedbayes.errors import UserError
from fedbayes.wire import provenance


class Up(NamedTuple):
    average: Mean[dict]
    total: Sum[jax.Array]
    each: Stack[jax.Array]
    weight: Sum[jax.Array]


UPS = Up({"a": jnp.arange(12.0).reshape(4, 3)}, jnp.arange(4.0), jnp.arange(8.0).reshape(4, 2), jnp.array([1.0, 2.0, 3.0, 4.0]))
PRESENT = jnp.ones(4)


def part(ups, places):
    return jax.tree.map(lambda leaf: leaf[places], ups)


def test_fields_reduce_as_declared():
    partial = reduce.add(reduce.empty(part(UPS, 0)), UPS, PRESENT)
    up = reduce.finish(Up, partial, reduce.stacked(UPS))
    np.testing.assert_allclose(up.average["a"], np.average(UPS.average["a"], axis=0, weights=UPS.weight), rtol=1e-6)
    assert float(up.total) == 6
    assert float(up.weight) == 10
    np.testing.assert_array_equal(up.each, UPS.each)


def test_streaming_gives_what_one_sum_gives():
    whole = reduce.add(reduce.empty(part(UPS, 0)), UPS, PRESENT)
    one = reduce.add(reduce.empty(part(UPS, 0)), part(UPS, slice(0, 1)), jnp.ones(1))
    rest = reduce.add(reduce.empty(part(UPS, 0)), part(UPS, slice(1, 4)), jnp.ones(3))
    assert_close(reduce.combine(one, rest), whole, 1e-5)


def test_a_sum_in_place_is_the_same_sum(monkeypatch):
    here = reduce.empty(part(UPS, 0))
    for place in range(4):
        before, here = here, accumulate(here, jax.device_get(part(UPS, place)))
        assert before.weight.is_deleted()  # its memory is used again
    on_host = jax.tree.map(np.array, reduce.empty(part(UPS, 0)))
    monkeypatch.setattr(reduce, "BLOCK", 2)
    for place in range(4):
        reduce.add_here(on_host, jax.device_get(part(UPS, place)))
    assert_close(on_host, here, 1e-6)
    assert_close(here, reduce.add(reduce.empty(part(UPS, 0)), UPS, PRESENT), 1e-6)


def test_padding_adds_nothing_whatever_it_holds():
    junk = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.nan), UPS)
    short = reduce.add(reduce.empty(part(UPS, 0)), part(UPS, slice(0, 3)), jnp.ones(3))
    assert_close(reduce.add(reduce.empty(part(UPS, 0)), junk, jnp.array([1.0, 1.0, 1.0, 0.0])), short, 0)


def test_without_a_weight_every_client_counts_the_same():
    class Plain(NamedTuple):
        average: Mean[jax.Array]

    ups = Plain(jnp.array([1.0, 2.0, 6.0]))
    assert float(reduce.finish(Plain, reduce.add(reduce.empty(part(ups, 0)), ups, jnp.ones(3)), {}).average) == 3


def test_sums_use_memory_of_one_upload():
    partial = reduce.empty(part(UPS, 0))
    assert sum(leaf.size for leaf in jax.tree.leaves(partial)) == 3 + 1 + 1 + 1  # Stack is not among them


def test_a_field_without_a_reduction_is_refused():
    class Bare(NamedTuple):
        gradient: float

    with pytest.raises(TypeError, match=r"Bare.gradient must be declared Mean\[…\], Sum\[…\] or Stack\[…\]"):
        reduce.declared(Bare)


def test_a_mean_of_whole_numbers_is_refused():
    class Whole(NamedTuple):
        count: Mean[jax.Array]

    with pytest.raises(TypeError, match="is declared Mean but holds whole numbers"):
        reduce.empty(Whole(jnp.int32(3)))


def test_an_averaged_weight_is_refused():
    class Odd(NamedTuple):
        weight: Mean[float]

    with pytest.raises(TypeError, match="must be declared Sum"):
        reduce.declared(Odd)


X = jax.ShapeDtypeStruct((4, 3), "float32")
COPIES = {
    "as it is": lambda a, b: a,
    "another shape": lambda a, b: a.reshape(-1)[::-1].T,
    "a row of it": lambda a, b: a[2],
    "behind a select": lambda a, b: jnp.where(b > 0, a, 0.0),
    "sorted": lambda a, b: jnp.sort(a, axis=0),
    "inside jit": lambda a, b: jax.jit(lambda v: v.T)(a),
    "through a loop": lambda a, b: jax.lax.fori_loop(0, 3, lambda i, v: v[::-1], a),
    "through a scan": lambda a, b: jax.lax.scan(lambda c, v: (c, v), 0.0, a)[1],
    "in a branch": lambda a, b: jax.lax.cond(b.sum() > 0, lambda: a, lambda: b),
    "beside other numbers": lambda a, b: jnp.concatenate([b * 2, a]),
    "scaled": lambda a, b: a * 2 + 1,
    "negative": lambda a, b: -a,
    "times a mask": lambda a, b: a * (b > 0).astype(a.dtype),
    "times a mask of rows": lambda a, b: a * (b[:, 0] > 0).astype(a.dtype)[:, None],
    "added into zeros": lambda a, b: jnp.zeros((8, 3)).at[jnp.arange(4)].add(a),
    "a sum of one": lambda a, b: a[:, None].sum(axis=1),
    "clipped": lambda a, b: jnp.clip(a, -1.0, 1.0),
    "its largest": lambda a, b: jax.lax.top_k(a, 2)[0],
}
STATISTICS = {
    "a sum": lambda a, b: a.sum(),
    "a product": lambda a, b: a @ b.T,
    "a step": lambda a, b: b - 0.1 * jax.grad(lambda b: ((a - b) ** 2).sum())(b),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_seen_however_it_is_moved(how):
    (flow,) = provenance.trace(COPIES[how], {"a": X, "b": X})
    assert "a" in flow.copies


@pytest.mark.parametrize("how", STATISTICS)
def test_a_statistic_is_no_copy_but_depends(how):
    (flow,) = provenance.trace(STATISTICS[how], {"a": X, "b": X})
    assert "a" not in flow.copies
    assert "a" in flow.depends


def test_what_is_not_used_is_not_named():
    flows = provenance.trace(lambda a, b: (a.sum(), jax.lax.fori_loop(0, 3, lambda i, v: v + 1, b)), {"a": X, "b": X})
    assert [flow.depends for flow in flows] == [("a",), ("b",)]


def test_a_loop_count_is_a_dependency():
    (flow,) = provenance.trace(lambda n, b: jax.lax.fori_loop(0, n, lambda i, v: v + 1, b), {"n": np.int32(3), "b": X})
    assert flow.depends == ("b", "n")


class LeakUp(NamedTuple):
    rows: Stack[jax.Array]


class Empty(NamedTuple):
    pass


@dataclasses.dataclass(frozen=True)
class Leak(Algorithm[Empty, Empty, Empty, LeakUp]):
    """Sends its rows, to see that it is caught; and in `Stack`, to see that stacks keep the clients' order."""

    model: object = None

    def init_server(self, key):
        return Empty()

    def init_local(self, key, data):
        return Empty()

    def broadcast(self, key, server):
        return Empty()

    def client(self, key, down, local, data):
        return LeakUp(data.x[:1]), local

    def server(self, key, server, down, up):
        return server

    def adapt(self, key, down, local, data):
        return local

    def predict(self, key, down, local, x):
        return x[None]


def test_an_algorithm_that_sends_a_row_is_refused(clients):
    rows = jax.tree.map(lambda leaf: leaf[0], clients.train([0], 8))
    with pytest.raises(UserError, match="the upload 'rows' holds data/x as it is, which must not leave a client"):
        wire.check(wire.manifest(Leak(), rows))


def test_stacks_come_in_the_order_of_the_clients(clients):
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watch(Leak):
        def server(self, key, server, down, up):
            jax.debug.callback(lambda rows: seen.append(np.asarray(rows)), up.rows)
            return server

    for mode in ("vmap", "loop"):
        simulation = Simulation(Watch(), clients, clients=mode, width=2 if mode == "vmap" else None)
        simulation.step()
        jax.effects_barrier()
    expected = np.stack([clients.x[clients.offsets[i]][None] for i in clients.participants])
    np.testing.assert_array_equal(seen[0], expected)
    np.testing.assert_array_equal(seen[1], expected)


TREE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": (np.int32(4), np.float32(0.5))}


def test_pack_keeps_every_bit_and_its_metadata():
    content = wire.pack(TREE, {"round": 3, "sha": "x"})
    assert_same(wire.unpack(content, TREE, "message"), TREE)
    assert wire.metadata(content) == {"round": 3, "sha": "x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: {"w": tree["w"]}, "lacks n/0, n/1; it was written for another algorithm or network"),
        (lambda tree: {**tree, "secret": np.ones(1)}, "holds secret, which this algorithm does not declare"),
        (lambda tree: {**tree, "w": tree["w"].T}, r"w is float32\[3, 2\] where float32\[2, 3\] is expected"),
        (
            lambda tree: {**tree, "w": tree["w"].astype(np.float64)},
            r"w is float64\[2, 3\] where float32\[2, 3\] .* JAX_ENABLE_X64",
        ),
        (lambda tree: {**tree, "w": tree["w"] * np.nan}, "w holds numbers that are not finite"),
    ],
)
def test_what_does_not_fit_the_template_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        wire.unpack(wire.pack(change(TREE)), TREE, "the upload of site-1", finite=True)


def message():
    rows = np.random.default_rng(0).normal(size=(37, 5))
    return {"a": rows.astype(np.float32), "empty": np.zeros((0, 3)), "n": np.int32(7)[...], "b": np.array([True, False])}


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_pieces_of_any_size_join_to_the_same_arrays(monkeypatch, size):
    monkeypatch.setattr(wire, "PIECE", size)
    arrays, given = message(), message()
    told, pieces = wire.cut(given)
    pieces = list(pieces)
    assert not given
    assert all(len(piece) == size for piece in pieces[:-1])
    found = wire.join(told, pieces)
    assert_same(found, arrays)
    assert not pieces
    assert [array.dtype for array in found.values()] == [array.dtype for array in arrays.values()]


@pytest.mark.parametrize(
    "told",
    [
        '[["a", "float32", [1000000000000]]]',
        '[["a", "float32", [-1, -185]]]',
        '[["a", "object", [93]]]',
        '[["a", "float32", [3]]]',
        '[["a", "no such type", [3]]]',
        "[3]",
        "not told",
    ],
)
def test_pieces_that_do_not_fit_what_is_told_are_refused(told):
    with pytest.raises((ValueError, TypeError)):
        wire.join(told, list(wire.cut(message())[1]))


@pytest.mark.parametrize("cut", [0, 4, 20, -3])
def test_bytes_that_are_cut_short_are_refused(cut):
    content = wire.pack(TREE)
    with pytest.raises(UserError, match="the upload of site-1 cannot be read"):
        wire.unpack(content[:cut] if cut else b"", TREE, "the upload of site-1")


def test_reduce_is_an_enum_of_three():
    assert [kind.value for kind in Reduce] == ["mean", "sum", "stack"]
    assert isinstance(Data(*[np.ones(1)] * 2, np.ones(1, bool)), tuple)
